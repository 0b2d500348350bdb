"""The scheduler's and interpreter's own microseconds for a live thread and step.

    python bench/overhead.py

A scripted engine stands below, and its time is taken off. All tokens are forced; what a choice
among the logits costs, greedy or sampled, comes on lines of its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np
from common import emit, interleaved, seconds_of, spread

from pasta_decoding.engines.base import Feed, FloatArray
from pasta_decoding.engines.scripted import ScriptedEngine
from pasta_decoding.lang.layout import ChunkRun, PromiseRun, Run, Segment
from pasta_decoding.lang.positions import SHARED_MAX
from pasta_decoding.models.control_tokens import BUCKETS, ControlTokens
from pasta_decoding.runtime.constraints import NOTHING, Constraint
from pasta_decoding.runtime.request import Request, Rules, SamplingParams
from pasta_decoding.runtime.sampler import Replay, Sampler
from pasta_decoding.runtime.scheduler import Scheduler
from pasta_decoding.runtime.vocabulary import Vocabulary

SIZE, END, FIRST_WORD = 49_152, 2, 100
CONTROL = ControlTokens(3, {size: 10 + n for n, size in enumerate(BUCKETS)}, 4, 5, 6)
TEXTS = tuple("" if n < FIRST_WORD else f" w{n}" for n in range(SIZE))
WIDTHS = (1, 2, 4, 8, 16, 32)
CHUNK_TOKENS = 200
SIZES = (SIZE, 128_256)
SAMPLINGS = (
    ("greedy", SamplingParams()),
    ("temperature 1", SamplingParams(temperature=1)),
    ("temperature 0.7, top-p 0.9", SamplingParams(temperature=0.7, top_p=0.9)),
)


class ClockedEngine(ScriptedEngine):
    """Counts the seconds spent in it, and how many threads were fed."""

    def __init__(self) -> None:
        super().__init__(lambda _seen: np.zeros(SIZE, np.float32), SIZE, max_positions=2**20)
        self.seconds, self.fed = 0.0, 0
        self.row_V = np.zeros(SIZE, np.float32)

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        """Feed, but ask no script: the choice is forced."""
        began_s = time.perf_counter()
        self._table.plan(feeds)
        wanted = sum(feed.wants_logits for feed in feeds)
        rows_FV = np.broadcast_to(self.row_V, (wanted, SIZE))
        self.fed += len({feed.branches[-1] for feed in feeds})
        self.seconds += time.perf_counter() - began_s
        return rows_FV


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    options, _ = parser.parse_known_args()  # `make bench` gives all benchmarks the same options
    words = vocabulary()
    calls = {width: partial(microseconds, width, words) for width in WIDTHS}
    for width, values in interleaved(calls, options.repeats).items():
        emit("overhead", threads=width, microseconds_per_thread_and_step=spread(values, 2))
    choices = {(name, size): chooser(one, size) for name, one in SAMPLINGS for size in SIZES}
    for (name, size), values in interleaved(choices, 100 * options.repeats).items():
        emit("overhead", choice=name, vocabulary=size, microseconds=spread(values, 2))


def chooser(sampling: SamplingParams, size: int) -> Callable[[], float]:
    """Return what chooses from a row of `size` logits, and says how many microseconds it took."""
    sampler, allowed, indices = Sampler(sampling), Constraint(NOTHING), count()
    logits_V = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    return lambda: seconds_of(lambda: sampler.sample(0, next(indices), logits_V, allowed)) * 1e6


def microseconds(width: int, words: Vocabulary) -> float:
    """Replay an answer with `width` live threads; return what is not the engine's, per token.

    The clock runs over the steps in which all of them are live.
    """
    engine = ClockedEngine()
    scheduler = Scheduler(engine, words, SHARED_MAX)
    segments = answer(width)
    rules = Rules(
        max_tokens=width * (CHUNK_TOKENS + 50),
        max_threads=width + 1,
        max_chunks=width + 1,
        min_chunk_tokens=CHUNK_TOKENS + 9,
    )
    chooser = Replay(segments, async_close=CONTROL.async_close, end=END)
    number = scheduler.add(Request((FIRST_WORD,) * 8, chooser, rules))
    seconds, tokens = 0.0, 0
    while scheduler.result(number) is None:
        engine.fed, engine.seconds = 0, 0.0
        taken_s = seconds_of(scheduler.step)
        if engine.fed == width:
            seconds += taken_s - engine.seconds
            tokens += width
    return seconds / tokens * 1e6


def answer(width: int) -> list[Segment]:
    """Main promises one chunk less than `width`, then writes on beside them."""
    segments: list[Segment] = []
    for number in range(width - 1):
        ids = (CONTROL.promise_open, FIRST_WORD + number, CONTROL.promise_close[200])
        words = tuple(range(FIRST_WORD, FIRST_WORD + CHUNK_TOKENS))
        segments += [PromiseRun(ids, 200), ChunkRun((CONTROL.async_open, *words))]
    return [*segments, Run(tuple(range(FIRST_WORD, FIRST_WORD + CHUNK_TOKENS)))]


def vocabulary() -> Vocabulary:
    """Return words w100, w101, ... and the control tokens below them."""
    return Vocabulary(
        TEXTS, lambda ids: "".join(TEXTS[i] for i in ids), CONTROL, frozenset({END}), END
    )


if __name__ == "__main__":
    main()
