"""Answers written on a vLLM server: what they ask for, and what its prefix cache saves.

    python bench/remote_answers.py --base-url http://127.0.0.1:8000/v1 --adapter served --block 32

One answer after the other, greedy. `shared_tokens` are those that a prompt has in whole blocks in
common with anything that was asked or had come before it; `hit_tokens` those that the server says
it found. Both count every request, also those that were broken off. Nobody else may ask meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

from common import SAMPLE, emit, spread

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import open_decoder
from pasta_decoding.cli.console import cache_folder
from pasta_decoding.data.dataset import read_rows
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.control_tokens import ControlTokens
from pasta_decoding.remote.client import Service
from pasta_decoding.remote.decoder import RemoteDecoder
from pasta_decoding.remote.replicas import Lease, ReplicaPool
from pasta_decoding.remote.stream import Completion
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.request import Rules, SamplingParams


@dataclass(eq=False)
class Asked:
    """One request: its prompt, what came, and how much of the prompt was known by then."""

    prompt: tuple[int, ...]
    shared_tokens: int
    came: list[int] = field(default_factory=list)


class Watched(ReplicaPool):
    """A pool that keeps a record of what is asked of it."""

    def __init__(self, service: Service, block: int) -> None:
        super().__init__(service)
        self.block = block
        self.asked: list[Asked] = []

    async def stream(self, lease: Lease, asked: Completion) -> AsyncGenerator[int]:
        """See `ReplicaPool`."""
        request = Asked(asked.prompt, self._shared_tokens(asked.prompt))
        self.asked.append(request)
        async for token in super().stream(lease, asked):
            request.came.append(token)
            yield token

    def _shared_tokens(self, prompt: tuple[int, ...]) -> int:
        # What came last has not been computed when it comes, and a prompt's last token always is.
        known = [(*one.prompt, *one.came[:-1]) for one in self.asked]
        alike = (sum(takewhile(bool, map(eq, prompt[:-1], one))) for one in known)
        most = max(alike, default=0)
        return most // self.block * self.block


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--adapter", required=True, help="folder of the checkpoint that is served")
    parser.add_argument("--block", type=int, required=True, help="the server's block size")
    parser.add_argument("--prompts", type=Path, default=SAMPLE, help="JSONL, `instruction` a line")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args()
    loading = EngineConfig(
        adapter=options.adapter,
        engine="remote",
        join=Joining.text,
        base_url=(options.base_url,),
    )
    decoder = open_decoder(loading, cache_folder())
    assert isinstance(decoder, RemoteDecoder), "as the engine's name says"
    prompts = [row.instruction for row in read_rows(options.prompts)][: options.limit]
    before, began_s = counted(options.base_url), time.perf_counter()
    pool = Watched(decoder.service, options.block)
    answers = asyncio.run(write(decoder, pool, prompts, Rules(max_tokens=options.max_tokens)))
    seconds, after = time.perf_counter() - began_s, counted(options.base_url)
    emit(
        "remote_answers",
        checkpoint=Path(options.adapter).name,
        prompts=options.prompts.name,
        block=options.block,
        hit_tokens=after["hits"] - before["hits"],
        looked_up_tokens=after["queries"] - before["queries"],
        seconds_an_answer=round(seconds / len(answers), 2),
        **figures(answers, pool.asked, decoder.vocabulary.control),
    )


async def write(
    decoder: RemoteDecoder, pool: Watched, prompts: list[str], rules: Rules
) -> list[Answer]:
    """Write all answers, one after the other."""
    async with pool:
        requests = [decoder.request(prompt, rules, SamplingParams()) for prompt in prompts]
        return [
            await decoder.writer(request, pool, lambda _events, _step: None).run()
            for request in requests
        ]


def counted(base_url: str) -> dict[str, int]:
    """Return how many tokens vLLM has looked up in its prefix cache so far, and how many it hit."""
    with urlopen(urljoin(base_url, "/metrics")) as reply:
        lines = reply.read().decode()
    pattern = r"^vllm:prefix_cache_(queries|hits)_total(?:{.*})? (\S+)$"
    return {name: int(float(count)) for name, count in re.findall(pattern, lines, re.MULTILINE)}


def figures(answers: list[Answer], asked: list[Asked], control: ControlTokens) -> dict[str, object]:
    """Return means an answer, and what a promise and a sync left to be computed."""
    forks = [one for one in asked if one.prompt[-1] == control.async_open]
    syncs = [one for one in asked if one.prompt[-1] == control.sync]
    sent = [answer.trace.sent for answer in answers if answer.trace.sent is not None]

    def mean(total: float) -> float:
        return round(total / len(answers), 2)

    return {
        "answers": len(answers),
        "tokens": mean(sum(len(row.trace.fed) - row.trace.rewritten_tokens for row in answers)),
        "chunks": mean(sum(answer.chunks for answer in answers)),
        "syncs": mean(sum(len(answer.layouts) - 1 for answer in answers)),
        "requests": mean(sum(one.requests for one in sent)),
        "corrections": mean(sum(one.corrections for one in sent)),
        "interventions": mean(sum(answer.interventions for answer in answers)),
        "prompt_tokens": mean(sum(len(one.prompt) for one in asked)),
        "shared_tokens": sum(one.shared_tokens for one in asked),
        "prefill_a_promise": spread_of(forks),
        "prefill_a_sync": spread_of(syncs),
    }


def spread_of(asked: list[Asked]) -> dict[str, float] | None:
    """Return how many tokens of these prompts were new to the server; None if there are none."""
    new = [len(one.prompt) - one.shared_tokens for one in asked]
    return spread(new) | {"mean": round(sum(new) / len(new), 1)} if new else None


if __name__ == "__main__":
    main()
