"""Does a chunk become as long as was promised? The first promise is forced to say another length.

    python bench/kept_lengths.py --engines compiled:bfloat16 --adapter balanced --prompts FILE

Greedy. Each prompt whose answer promises is answered for each length, with the closing of its
first promise replaced and all before it as it was; its first chunk's tokens are counted. `medians`
are over the prompts, by the length promised. `kept` is the share that came to the bucket promised
or to one next to it, `slope` the least-squares slope of log tokens over log promised length: 1 if
chunks keep what was promised, 0 if they do not care.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, linear_regression, median

from common import arguments, decoder_named, emit
from rich.console import Console
from rich.progress import track

from pasta_decoding.data.questions import Question, read_questions
from pasta_decoding.lang.layout import ChunkRun, PromiseRun
from pasta_decoding.models.load import DEFAULT_ADAPTER
from pasta_decoding.runtime.constraints import Constraint
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.runtime.sampler import Choice, Logits, TokenSource

LENGTHS = (20, 30, 40, 60, 100)


class Forcing:
    """Chooses as `chooser` does, but for the first promise's closing, which is `closing`."""

    def __init__(self, chooser: TokenSource, closings: Sequence[int], closing: int) -> None:
        self._chooser = chooser
        self._closings = frozenset(closings)
        self._closing: int | None = closing

    def choose(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:
        """See `TokenSource`."""
        choice = self._chooser.choose(thread, index, logits_V, allowed)
        if self._closing is None or choice.token not in self._closings:
            return choice
        closing, self._closing = self._closing, None
        return Choice(closing, intervened=False)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=60, help="prompts that are tried")
    parser.add_argument("--max-tokens", type=int, default=240)
    options = parser.parse_args()
    questions = read_questions(options.prompts)[: options.limit]
    for name in options.engines:
        decoder = decoder_named(name, options)
        shown = track(questions, "answering", console=Console(stderr=True), transient=True)
        found = [forced(decoder, question, options.max_tokens) for question in shown]
        report(decoder, name, options, len(questions), [one for one in found if one])


def forced(decoder: LocalDecoder, question: Question, max_tokens: int) -> dict[int, int]:
    """Return the first chunk's tokens by the length promised; nothing where there is no promise.

    A chunk that a limit cut counts with what it has.
    """
    # One chunk is enough, and no promise of its own may cut it.
    rules = Rules(max_tokens=max_tokens, max_chunks=1, min_chunk_tokens=max_tokens)
    control = decoder.vocabulary.control
    found = {}
    for length in LENGTHS:
        asked = decoder.request(question.instruction, rules, SamplingParams())
        closings = control.promise_close
        chooser = Forcing(asked.sampler, list(closings.values()), closings[length])
        answer = decoder.answer(replace(asked, sampler=chooser))
        for promise, chunk in pairwise(answer.segments):
            if isinstance(promise, PromiseRun) and isinstance(chunk, ChunkRun):
                found[length] = len(chunk.ids) - 1  # ASYNC_OPEN is not its text
        if not found:
            break
    return found


def report(
    decoder: LocalDecoder,
    name: str,
    options: argparse.Namespace,
    asked: int,
    found: Sequence[dict[int, int]],
) -> None:
    """Print the line of one engine."""
    is_near = decoder.vocabulary.control.is_near
    both = [(length, tokens) for one in found for length, tokens in one.items()]
    logs = [(math.log(length), math.log(max(1, tokens))) for length, tokens in both]
    emit(
        "kept_lengths",
        engine=decoder.engine.name,
        requested=name,
        adapter=options.adapter or DEFAULT_ADAPTER,
        prompts=options.prompts.name,
        asked=asked,
        promising=len(found),
        medians={length: median(one[length] for one in found) for length in LENGTHS if found},
        kept=round(fmean(is_near(*one) for one in both), 3) if both else None,
        slope=round(linear_regression(*zip(*logs, strict=True)).slope, 3) if both else None,
    )


if __name__ == "__main__":
    main()
