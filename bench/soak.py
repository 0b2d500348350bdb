"""Many clients for a time: every answer must be the one that its request gets alone.

    python bench/soak.py --engines torch:float32 fast:auto --minutes 60
    python bench/soak.py --engines fast:auto --http --requests 10000

First `--answers` requests are decoded one after the other, each with a seed and a temperature of
its own. Then `--clients` threads ask for them at random: they pause, choose a priority and a
number of threads, and some leave before the end. An answer that differs is listed with the gap of
its first other token: how far the two best scores lay apart, as logits, noise included. A gap
under `--near` is a near-tie, which rounding decides. With `--http` the clients ask a server of this
process, and leave by closing the connection. The exit status is 1 if an answer differs by more than
a near-tie, if an error came, if slots are held in the end, or if memory grew by more than 5 %.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from random import Random
from threading import Thread
from typing import Any

import httpx2
import numpy as np
import psutil
from alone import Reference, decode_references, difference
from common import ROOT, arguments, decoder_named, emit

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.settings import Priority
from pasta_decoding.scheduling.decoder import LocalDecoder
from pasta_decoding.scheduling.loop import EngineLoop, Failure, News
from tests.server.running import MODEL, running

LEAVE = 0.25
"""The share of requests whose client leaves before the end."""
MAX_GROWTH = 1.05
"""The memory at the end, relative to that after the first tenth of the run."""
TIMEOUT_S = 600.0
Ask = Callable[[Reference, Random], Answer | str | None]
"""Asks for an answer, whole or as text; None if the client left before its end."""


@contextmanager
def by_loop(decoder: LocalDecoder, options: Namespace) -> Iterator[Ask]:
    """Ask the thread that owns the engine."""

    def ask(reference: Reference, chance: Random) -> Answer | None:
        rules = replace(reference.request.rules, max_threads=chance.choice([1, 2, 4, 32]))
        news: SimpleQueue[News] = SimpleQueue()
        priority = chance.choice(list(Priority))
        request = replace(reference.request, rules=rules, priority=priority)
        cancel = loop.submit(request, news.put)
        max_news = max_news_of(chance, options)
        for news_count in count():
            if news_count == max_news:
                cancel()
                break
            match news.get(timeout=TIMEOUT_S):
                case Failure() as failure:
                    raise failure.error
                case Answer() as answer:
                    return answer
        return None

    with closing(EngineLoop(decoder.scheduler(max_requests=options.together))) as loop:
        yield ask


@contextmanager
def by_http(decoder: LocalDecoder, options: Namespace) -> Iterator[Ask]:
    """Ask a server of this process."""

    def ask(reference: Reference, chance: Random) -> str | None:
        sampling = reference.request.sampler.params
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": reference.question}],
            "max_tokens": reference.request.rules.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stream": True,
        }
        max_news = max_news_of(chance, options)
        text = ""
        with httpx2.stream("POST", url, json=body, timeout=TIMEOUT_S) as reply:
            reply.raise_for_status()
            for news_count, line in enumerate(reply.iter_lines()):
                if news_count == max_news:
                    return None
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    text += choice["delta"].get("content") or ""
        return text

    with running(decoder, max_requests=options.together, max_queue=options.clients) as server:
        url = f"{server.url}/v1/chat/completions"
        yield ask
        server.wait_until_idle()


def max_news_of(chance: Random, options: Namespace) -> int | None:
    """Return after how much news a client leaves; None if it stays."""
    return chance.randrange(options.max_tokens) if chance.random() < LEAVE else None


@dataclass
class Clients:
    """Threads that ask for answers, and what came of their requests.

    ends:        how many requests ended in each way.
    differences: of answers from those of the references.
    memory:      bytes of the process, ten times during the run.
    """

    ask: Ask
    references: Sequence[Reference]
    close: int
    options: Namespace
    ends: Counter[str] = field(default_factory=Counter)
    differences: list[dict[str, Any]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Let them ask for the minutes, or for the number of requests."""
        began_s = time.monotonic()
        duration_s = 60 * self.options.minutes
        self._stop_s = began_s + duration_s
        self._numbers = iter(range(self.options.requests or sys.maxsize))
        threads = [Thread(target=self._client, args=(n,)) for n in range(self.options.clients)]
        for thread in threads:
            thread.start()
        process = psutil.Process()
        next_share = 0.0
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(1.0, duration_s / 50))
            passed_s = time.monotonic() - began_s
            done = self.ends.total() / (self.options.requests or np.inf)
            if max(done, passed_s / duration_s) >= next_share:
                next_share += 0.1
                self.memory.append(process.memory_info().rss)
                counts = f"{dict(self.ends)}, {len(self.differences)} differ"
                print(f"{passed_s / 60:.1f} minutes: {counts}", file=sys.stderr)
        for thread in threads:
            thread.join()

    def _client(self, number: int) -> None:
        chance = Random(self.options.seed + number)
        for _ in self._numbers:  # all clients share them
            if time.monotonic() >= self._stop_s:
                return
            time.sleep(chance.expovariate(1 / self.options.pause))
            try:
                self._ask_once(chance)
            except Exception as error:  # noqa: BLE001  it is counted, and fails the run
                self.ends[f"{type(error).__name__}: {error}"] += 1

    def _ask_once(self, chance: Random) -> None:
        index = chance.randrange(len(self.references))
        reference = self.references[index]
        answer = self.ask(reference, chance)
        if answer is None:
            self.ends["left"] += 1
            return
        self.ends["answered"] += 1
        differs = difference(reference, answer, self.close)
        if differs is not None:
            self.differences.append({"answer": index, **differs})
            print(f"differs: {self.differences[-1]}", file=sys.stderr)


def main() -> None:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--questions", type=Path, default=ROOT / "data" / "open_prompts.jsonl")
    add("--clients", type=int, default=64)
    add("--answers", type=int, default=96, help="different requests")
    add("--max-tokens", type=int, default=40)
    add(
        "--minutes",
        type=float,
        default=5.0,
        help="of each engine, after the answers that are decoded alone",
    )
    add("--requests", type=int, help="stop after this many")
    add("--pause", type=float, default=1.0, help="mean seconds between two requests of a client")
    add("--together", type=int, default=16, help="answers written at the same time")
    add("--near", type=float, default=1e-3, help="a smaller gap is a near-tie")
    add("--http", action="store_true", help="ask a server of this process")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = [name for name in options.engines if not soaked(name, options)]
    if failed:
        raise SystemExit(f"not sound: {', '.join(failed)}")


def soaked(name: str, options: Namespace) -> bool:
    """Soak one engine, print what came out, and return whether it was sound."""
    decoder = decoder_named(name, options)
    references = decode_references(decoder, options)
    asking = by_http if options.http else by_loop
    with asking(decoder, options) as ask:
        clients = Clients(ask, references, decoder.vocabulary.control.async_close, options)
        clients.run()
    leaked_slots = decoder.engine.slots_in_use
    memory = clients.memory
    growth = memory[-1] / memory[min(1, len(memory) - 1)]
    is_near_tie = [differs["gap"] < options.near for differs in clients.differences]
    emit(
        "soak",
        engine=decoder.engine.name,
        http=options.http,
        clients=options.clients,
        ends=clients.ends,
        with_chunks=sum(reference.answer.chunks > 0 for reference in references),
        tokens=sum(reference.answer.fed_tokens for reference in references),
        differences=clients.differences,
        memory_mb=[round(size_bytes / 1e6) for size_bytes in memory],
        growth=round(growth, 3),
        slots_held=leaked_slots,
    )
    errors = clients.ends.keys() - {"answered", "left"}
    return all(is_near_tie) and not errors and not leaked_slots and growth <= MAX_GROWTH


if __name__ == "__main__":
    main()
