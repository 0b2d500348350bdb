"""A cache that cannot fit is refused before the kernel has to kill somebody for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pasta_decoding.engines import memory
from pasta_decoding.errors import PastaError


def test_what_is_left_is_the_machines_or_the_groups(tmp_path: Path) -> None:
    machine, group, none = tmp_path / "meminfo", tmp_path / "memory.max", tmp_path / "none"
    machine.write_text("MemTotal: 900 kB\nMemAvailable:    500 kB\n")
    for text, expected in (("max\n", 512_000), ("1000\n", 1000), ("600000\n", 512_000)):
        group.write_text(text)
        assert memory.available_bytes(machine, group) == expected
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
