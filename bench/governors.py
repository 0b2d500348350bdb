"""The same requests at once under each governor: plain tokens a second, first text, same answers.

    python bench/governors.py --engines llama:F16 torch:float32 --requests 1 4 16 64

One process and no server: what differs between the lines of a load is only who writes when. The
governors take turns, `--repeats` times. `sequential` is the same weights with promises banned;
`bar` is a plain rate over the sequential rate of all tokens times the share of plain ones.
`differing` counts answers that are not, token by token, those of the first governor: of the
parallel ones those are near-ties, or a bug. All begin at once and nobody follows, so the last steps
are narrow: rates under a steady load are `serve_load.py`'s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from common import SAMPLE, arguments, decoder_named, emit, spread

from pasta_decoding.data.questions import read_questions
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.governor import CheapestStep, Eager, Governor, InReadingOrder
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import Request, Rules, SamplingParams

GOVERNORS: dict[str, Callable[[], Governor]] = {
    "eager": Eager,
    "reading order": InReadingOrder,
    "governor": CheapestStep,
    "sequential": Eager,
}


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch of requests came to."""

    answers: Sequence[Answer]
    seconds: float
    plain_tokens: int

    @property
    def fed_tokens(self) -> int:
        """All tokens that were computed, those in vain too."""
        return sum(answer.fed_tokens + answer.trimmed_tokens for answer in self.answers)

    @property
    def plain_share(self) -> float:
        """Plain tokens of all."""
        return self.plain_tokens / self.fed_tokens

    @property
    def first_text_s(self) -> float:
        """Mean seconds to the first token."""
        return fmean(answer.first_token_s or answer.seconds for answer in self.answers)


def main() -> None:
    options = parsed()
    questions = [one.instruction for one in read_questions(SAMPLE)]
    for name in options.engines:
        decoder = decoder_named(name, options)
        kept = {one: make() for one, make in GOVERNORS.items()}  # they learn from load to load
        for requests in options.requests:
            asked = [questions[n % len(questions)] for n in range(requests)]
            found: dict[str, list[Batch]] = {one: [] for one in kept}
            for _ in range(options.repeats):
                for one, governor in kept.items():
                    found[one].append(batch(decoder, governor, one, asked, options.max_tokens))
            report(decoder.engine.name, requests, found)


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def batch(
    decoder: LocalDecoder, governor: Governor, name: str, asked: Sequence[str], max_tokens: int
) -> Batch:
    """Answer all questions at once."""
    scheduler = decoder.scheduler(governor=governor)
    requests = [request_of(decoder, question, name, max_tokens) for question in asked]
    began_s = time.perf_counter()
    numbers = [scheduler.add(request) for request in requests]
    while scheduler.busy:
        scheduler.step()
    seconds = time.perf_counter() - began_s
    answers = [answer for number in numbers if (answer := scheduler.result(number))]
    plain_tokens = sum(decoder.plain_tokens(answer.text) for answer in answers)
    return Batch(answers, seconds, plain_tokens)


def request_of(decoder: LocalDecoder, question: str, name: str, max_tokens: int) -> Request:
    """Return the greedy request for a question."""
    request = decoder.request(question, Rules(max_tokens=max_tokens), SamplingParams())
    if name != "sequential":
        return request
    return replace(request, rules=replace(request.rules, parallel=False))


def report(engine: str, requests: int, found: dict[str, list[Batch]]) -> None:
    """Print a line for each governor."""
    first = next(iter(found.values()))[0].answers
    sequential = [one.fed_tokens / one.seconds for one in found["sequential"]]
    for name, batches in found.items():
        rates = [one.plain_tokens / one.seconds for one in batches]
        bars = [
            rate / (fed * one.plain_share)
            for rate, fed, one in zip(rates, sequential, batches, strict=True)
        ]
        pairs = zip(batches[-1].answers, first, strict=True)
        emit(
            "governors",
            engine=engine,
            requests=requests,
            governor=name,
            plain_tokens_per_s=spread(rates, 2),
            bar=spread(bars, 3),
            first_text_s=spread([one.first_text_s for one in batches], 3),
            mean_answer_s=spread([fmean(a.seconds for a in one.answers) for one in batches], 3),
            trimmed_tokens=sum(answer.trimmed_tokens for answer in batches[-1].answers),
            steps=max(len(answer.trace.steps) for answer in batches[-1].answers),
            differing=sum(ours.segments != theirs.segments for ours, theirs in pairs),
        )


if __name__ == "__main__":
    main()
