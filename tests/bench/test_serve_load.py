"""The load benchmark against a server of the tiny model: what it reports, and what it counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pasta_decoding.runtime.decoder import LocalDecoder
from tests.bench.test_benchmarks import lines_of
from tests.checkpoint import TinyCheckpoint, torch_decoder
from tests.server.running import STEP_S, Running, endless, running

QUICK = ("--seconds", 0.5, "--warmup", 0.5, "--max-tokens", 24)


@pytest.fixture(scope="module")
def decoder(tiny_checkpoint: TinyCheckpoint) -> LocalDecoder:
    return torch_decoder(tiny_checkpoint.base, tiny_checkpoint.adapter, cache_tokens=4096)


@pytest.fixture(scope="module")
def server(decoder: LocalDecoder) -> Iterator[Running]:
    with running(endless(decoder), max_requests=2, max_queue=1) as server:
        yield server


def lines(server: Running, *options: object) -> list[dict[str, Any]]:
    found = lines_of("serve_load.py", "--base-url", f"{server.url}/v1", *QUICK, *options)
    server.wait_until_idle()
    return found


def test_each_mode_has_a_line_for_each_number_of_clients(server: Running) -> None:
    modes = ("sequential", "governor")
    found = lines(server, "--clients", 1, 2, "--modes", *modes, "--warmup", 30)
    assert [(line["clients"], line["mode"]) for line in found] == [
        (clients, mode) for clients in (1, 2) for mode in modes
    ]
    for line, sequential in zip(found, [found[0]] * 2 + [found[2]] * 2, strict=True):
        assert line["answers"] > 0
        assert line["errors"] == {}
        assert line["warm"]
        assert line["plain_tokens_median"] > 10
        assert line["at_limit"] == 1
        # A step takes no less than STEP_S.
        assert 0 < line["plain_tokens_per_s"]["median"] <= line["clients"] / STEP_S
        assert line["latency_s"]["p50"] >= 24 * STEP_S
        assert line["first_text_s"]["p50"] < line["latency_s"]["p50"]
        assert line["goodput"]["within_s"] == sequential["latency_s"]["p95"]
        assert line["goodput"]["per_s"] <= line["answers_per_s"]
    assert [line["of_sequential"]["median"] for line in found[::2]] == [1, 1]
    assert [line["of_bar"]["median"] for line in found[::2]] == [1, 1]
