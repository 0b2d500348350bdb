"""Prompts: a second turn, choices of one request, and a stream beside a long prompt.

    python bench/prompts.py --engines llama:F16 compiled:bfloat16

Each with prompts that share their beginnings and without, in turns, `--repeats` times, in one
process without a server. `second turn`: seconds to the first token of a conversation's next turn,
whose first prompt had `--prompt` tokens. `choices`: processor seconds until `--choices` answers to
that prompt have their first token. `beside`: how much longer 96 tokens take beside a prompt of
`--long` tokens, and that prompt beside them, than each takes alone; the longest gap between two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from common import SAMPLE, arguments, decoder_named, emit, interleaved, spread

from pasta_decoding.data.questions import read_questions
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.prompt_pace import DEFAULT_STRETCH, PromptPace
from pasta_decoding.runtime.request import Request, Rules, SamplingParams
from pasta_decoding.runtime.scheduler import Scheduler

STREAM_TOKENS = 96


def main() -> None:
    options = parsed()
    for name in options.engines:
        decoder = decoder_named(name, options)
        compared(decoder, "second turn", second_turn, options, tokens=options.prompt)
        compared(decoder, "choices", choices, options, tokens=options.prompt)
        beside(decoder, options)


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the first turn")
    parser.add_argument("--long", type=int, default=7000, help="tokens of a long prompt")
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--stretch", type=float, default=DEFAULT_STRETCH)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a comparison."""

    decoder: LocalDecoder
    options: argparse.Namespace
    keeps: bool

    def scheduler(self) -> Scheduler:
        """Return a scheduler with nothing kept yet."""
        return self.decoder.scheduler(keeps_prompts=self.keeps)


def compared(
    decoder: LocalDecoder,
    what: str,
    measure: Callable[[Case], float],
    options: argparse.Namespace,
    *,
    tokens: int,
) -> None:
    """Print what a case takes with shared beginnings and without, and the quotient."""
    cases = {keeps: Case(decoder, options, keeps) for keeps in (True, False)}
    calls = {keeps: (lambda one=one: measure(one)) for keeps, one in cases.items()}
    found = interleaved(calls, options.repeats)
    pairs = zip(found[True], found[False], strict=True)
    emit(
        "prompts",
        engine=decoder.engine.name,
        what=what,
        prompt_tokens=tokens,
        shared_s=spread(found[True], 3),
        apart_s=spread(found[False], 3),
        of_apart=spread([ours / theirs for ours, theirs in pairs], 3),
    )


def second_turn(case: Case) -> float:
    """Return the seconds to the first token of a second turn."""
    scheduler = case.scheduler()
    question = Message("user", text_of(case.decoder, case.options.prompt))
    answer = run(scheduler, asked(case.decoder, [question], 32))
    turn = [question, Message("assistant", answer), Message("user", "And what comes next?")]
    number = scheduler.add(asked(case.decoder, turn, 1))
    seconds = until_first_token(scheduler, number)
    scheduler.close()
    return seconds


def choices(case: Case) -> float:
    """Return the processor seconds until all choices of a request have their first token."""
    scheduler = case.scheduler()
    question = Message("user", text_of(case.decoder, case.options.prompt))
    began_s = time.process_time()
    for _ in range(case.options.choices):
        scheduler.add(asked(case.decoder, [question], 1))
    while scheduler.busy:
        scheduler.step()
    scheduler.close()
    return time.process_time() - began_s


def beside(decoder: LocalDecoder, options: argparse.Namespace) -> None:
    """Print what a stream and a long prompt cost each other."""
    calls: dict[str, Callable[[], tuple[float, float, float]]] = {
        "stream": lambda: together(decoder, options, stream=True, long=False),
        "prompt": lambda: together(decoder, options, stream=False, long=True),
        "both": lambda: together(decoder, options, stream=True, long=True),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    for _ in range(options.repeats):
        for name, call in calls.items():
            found[name].append(call())
    both, stream, prompt = found["both"], found["stream"], found["prompt"]
    emit(
        "prompts",
        engine=decoder.engine.name,
        what="beside",
        prompt_tokens=options.long,
        stretch=options.stretch,
        stream_s=spread([one[0] for one in stream], 3),
        stream_of_alone=spread([a[0] / b[0] for a, b in zip(both, stream, strict=True)], 3),
        longest_gap_s=spread([one[1] for one in both], 3),
        prompt_s=spread([one[2] for one in prompt], 3),
        prompt_of_alone=spread([a[2] / b[2] for a, b in zip(both, prompt, strict=True)], 3),
    )


class Stream:
    """A sequential answer that never ends: as one is over, another begins."""

    def __init__(self, decoder: LocalDecoder, scheduler: Scheduler) -> None:
        question = Message("user", "Tell me a long story about a lighthouse.")
        self._request = asked(decoder, [question], 4 * STREAM_TOKENS)
        self._scheduler = scheduler
        self._number = scheduler.add(self._request)
        self.came_s: list[float] = []

    def step(self) -> None:
        """Make a step, and note when its token came."""
        steps = self._scheduler.steps(self._number)
        self._scheduler.step()
        if self._scheduler.steps(self._number) > steps:
            self.came_s.append(time.perf_counter())
        if self._scheduler.result(self._number) is not None:
            self._number = self._scheduler.add(self._request)


def together(
    decoder: LocalDecoder, options: argparse.Namespace, *, stream: bool, long: bool
) -> tuple[float, float, float]:
    """Return the seconds of a stream, its longest gap, and those to a long prompt's first token."""
    scheduler = decoder.scheduler(pace=PromptPace(stretch=options.stretch))
    writing = Stream(decoder, scheduler) if stream else None
    step = scheduler.step if writing is None else writing.step
    for _ in range(8 if stream else 0):
        step()
    text = Message("user", text_of(decoder, options.long))
    first = 0 if writing is None else len(writing.came_s)
    began_s, first_s = time.perf_counter(), 0.0
    if long:
        reading = scheduler.add(asked(decoder, [text], 1))
        while (answer := scheduler.result(reading)) is None:
            step()
        first_s = answer.first_token_s or answer.seconds
    while writing is not None and len(writing.came_s) < first + STREAM_TOKENS:
        step()
    scheduler.close()
    came_s = [] if writing is None else writing.came_s[first : first + STREAM_TOKENS]
    gap_s = max((b - a for a, b in pairwise([began_s, *came_s])), default=0.0)
    return (came_s[-1] if came_s else began_s) - began_s, gap_s, first_s


def asked(decoder: LocalDecoder, messages: list[Message], max_tokens: int) -> Request:
    """Return a greedy, sequential request."""
    room = decoder.engine.max_positions - max_tokens
    ids = tuple(decoder.encoder.encode(messages, max_tokens=room))
    request = decoder.request_of(
        ids, Rules(max_tokens=max_tokens), decoder.sampler(ids, SamplingParams())
    )
    return replace(request, rules=replace(request.rules, parallel=False))


def text_of(decoder: LocalDecoder, tokens: int) -> str:
    """Return text of about so many tokens."""
    words = "\n".join(one.instruction for one in read_questions(SAMPLE)).split(" ") * 20
    return " ".join(words[: round(len(words) * tokens / decoder.plain_tokens(" ".join(words)))])


def run(scheduler: Scheduler, request: Request) -> str:
    """Return the text of an answer."""
    number = scheduler.add(request)
    while (answer := scheduler.result(number)) is None:
        scheduler.step()
    return answer.text


def until_first_token(scheduler: Scheduler, number: int) -> float:
    """Return the seconds to a request's first token."""
    while (answer := scheduler.result(number)) is None:
        scheduler.step()
    return answer.first_token_s or answer.seconds


if __name__ == "__main__":
    main()
