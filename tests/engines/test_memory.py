"""A cache that cannot fit is refused before the kernel has to kill somebody for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pasta_decoding.engines import memory
from pasta_decoding.errors import PastaError


def test_what_is_left_is_the_machines_or_the_groups(tmp_path: Path) -> None:
    machine, group, none = tmp_path / "meminfo", tmp_path / "group", tmp_path / "none"
    group.mkdir()
    machine.write_text("MemTotal: 900 kB\nMemAvailable:    500 kB\n")
    for text, expected in (("max\n", 512_000), ("1000\n", 1000), ("600000\n", 512_000)):
        (group / "memory.max").write_text(text)
        assert memory.available_bytes(machine, group) == expected
    (group / "memory.max").write_text("400000\n")
    (group / "memory.current").write_text("300000\n")
    assert memory.available_bytes(machine, group) == 100_000
    (group / "memory.stat").write_text("anon 200000\ninactive_file 50000\n")
    assert memory.available_bytes(machine, group) == 150_000
    assert memory.available_bytes(machine, none) == 512_000
    physical = memory.available_bytes(none, none)
    assert physical is None or physical > 2**20


def test_a_cache_is_refused_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**9)
    memory.refuse_what_cannot_fit(1000, 10**6)
    with pytest.raises(PastaError) as caught:
        memory.refuse_what_cannot_fit(2000, 10**6)
    message = "a cache of 2000 tokens takes 2.0 GB, and 1.0 GB of memory are left here"
    assert str(caught.value) == message
    assert caught.value.hint == "Give --ctx at most 1000."
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.refuse_what_cannot_fit(2000, 10**6)


def test_what_a_cell_holds_is_told_by_a_models_config() -> None:
    plain = {"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576}
    assert memory.cell_numbers(plain) == 2 * 30 * 9 * 64
    grouped = plain | {"num_key_value_heads": 3, "head_dim": 128}
    assert memory.cell_numbers(grouped) == 2 * 30 * 3 * 128
    assert memory.cell_numbers({"text_config": grouped}) == 2 * 30 * 3 * 128
    for broken in ({}, {"text_config": None}, plain | {"num_attention_heads": 0}):
        assert memory.cell_numbers(broken) is None
