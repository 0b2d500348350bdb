"""Answers of one checkpoint to many prompts, kept with their token ids.

A kept answer is laid out for training from the very ids that were sampled: text that is tokenised
again may be cut elsewhere, and would then be another sequence with another probability.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pasta_decoding.data.lines import append_line, read_lines
from pasta_decoding.data.questions import Question
from pasta_decoding.lang.layout import (
    ChunkRun,
    Layout,
    PromiseRun,
    Run,
    Segment,
    SyncRun,
    lay_out,
)
from pasta_decoding.lang.positions import Scheme
from pasta_decoding.lang.tree import Tree, read, strip
from pasta_decoding.models.control_tokens import ControlTokens
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams

Item = TypeVar("Item")


class Track(Protocol):
    """Shows progress: passes `items` through, `total` of them."""

    def __call__(self, items: Iterable[Item], doing: str, total: int, /) -> Iterable[Item]:
        """Yield every item."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer as it was sampled.

    prompt:     id of the prompt, of whose answers this is the `number`-th, from 0.
    prompt_ids: the prompt as the model saw it.
    end:        the token that ended it; None if a limit cut it off.
    annotated:  the text form, for people and for measures; training takes the segments.
    plain_tokens: tokens of the tag-free text, tokenised alone.
    truncated:  whether any limit ended a chunk or the answer, of which
    hit_limit:  the answer's own token budget was one.
    """

    prompt: str
    number: int
    seed: int
    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    end: int | None
    annotated: str
    plain_tokens: int
    critical_path: int
    truncated: bool
    hit_limit: bool
    interventions: int
    fed_tokens: int

    @property
    def tree(self) -> Tree:
        """What the answer says."""
        return read(self.annotated)

    @property
    def text(self) -> str:
        """The tag-free text."""
        return strip(self.tree)

    def with_true_lengths(self, control: ControlTokens) -> Sample:
        """Return it with promises that give the lengths their chunks came to.

        What the model did not choose, or did not end, is left as it is.
        """
        segments = list(self.segments)
        for place, (promise, chunk) in enumerate(pairwise(self.segments)):
            match promise, chunk:
                case PromiseRun(ids, _, 0), ChunkRun(body, True):
                    length = control.bucket(len(body) - 1)
                    ids = (*ids[:-1], control.promise_close[length])
                    segments[place] = PromiseRun(ids, length)
        return replace(self, segments=tuple(segments))

    def layout(self, scheme: Scheme, control: ControlTokens) -> Layout:
        """Lay the sampled ids out for a training forward."""
        return lay_out(
            self.prompt_ids,
            self.segments,
            scheme,
            async_close=control.async_close,
            end=self.end,
        )


@dataclass(frozen=True, slots=True)
class AnswerSampler:
    """How a set of answers is sampled.

    stage:   names the set; seeds are a pure function of (seed, stage, prompt, number).
    count:   answers a prompt.
    max_concurrency: answers decoded together.
    """

    stage: str
    count: int
    rules: Rules
    seed: int
    temperature: float = 1.0
    max_concurrency: int = 16

    def seed_of(self, prompt: Question, number: int) -> int:
        """Return the seed of one answer, below 2^48."""
        name = f"{self.seed}/{self.stage}/{prompt.id}/{number}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])


def sample_answers(
    load: Callable[[], LocalDecoder],
    prompts: Sequence[Question],
    sampler: AnswerSampler,
    path: Path,
    track: Track,
) -> list[Sample]:
    """Return `sampler.count` answers a prompt, in order; those not yet in `path` are sampled.

    Each is appended as soon as it ends, so a run that was stopped goes on. `load` is called only
    if there is something to sample.
    """
    known = {(s.prompt, s.number): s for s in map(decode_sample, read_lines(path, resume=True))}
    wanted = [(prompt, number) for prompt in prompts for number in range(sampler.count)]
    missing = [job for job in wanted if (job[0].id, job[1]) not in known]
    if missing:
        coming = _sampled(load(), missing, sampler)
        for sample in track(coming, f"sampling {sampler.stage}", len(missing)):
            append_line(path, encode_sample(sample))
            known[sample.prompt, sample.number] = sample
    return [known[prompt.id, number] for prompt, number in wanted]


def _sampled(
    decoder: LocalDecoder, jobs: Sequence[tuple[Question, int]], sampler: AnswerSampler
) -> Iterator[Sample]:
    """Decode all jobs, `sampler.max_concurrency` together, and yield each answer as it ends."""
    scheduler = decoder.scheduler()
    waiting = iter(jobs)
    running: dict[int, tuple[Question, int]] = {}
    try:
        while True:
            for prompt, number in islice(waiting, sampler.max_concurrency - len(running)):
                sampling = SamplingParams(sampler.temperature, seed=sampler.seed_of(prompt, number))
                request = decoder.request(prompt.instruction, sampler.rules, sampling)
                running[scheduler.add(request)] = prompt, number
            if not running:
                return
            scheduler.step()
            for ticket in list(running):
                if (answer := scheduler.result(ticket)) is not None:
                    scheduler.forget(ticket)
                    prompt, number = running.pop(ticket)
                    yield _sample(answer, decoder, prompt, number, sampler)
    finally:
        scheduler.close()


def _sample(
    answer: Answer, decoder: LocalDecoder, prompt: Question, number: int, sampler: AnswerSampler
) -> Sample:
    return Sample(
        prompt=prompt.id,
        number=number,
        seed=sampler.seed_of(prompt, number),
        prompt_ids=answer.layout.tokens[: answer.trace.prompt_tokens],
        segments=answer.segments,
        end=answer.end,
        annotated=answer.annotated,
        plain_tokens=decoder.plain_tokens(answer.text),
        critical_path=answer.critical_path,
        truncated=answer.truncated,
        hit_limit=answer.hit_limit,
        interventions=answer.interventions,
        fed_tokens=answer.fed_tokens,
    )


# As JSON

_KINDS: dict[str, type[Run] | type[PromiseRun] | type[ChunkRun] | type[SyncRun]] = {
    "run": Run,
    "promise": PromiseRun,
    "chunk": ChunkRun,
    "sync": SyncRun,
}


def encode_sample(sample: Sample) -> dict[str, Any]:
    """Return what JSON keeps of a sample."""
    names = {kind: name for name, kind in _KINDS.items()}
    segments = [{"kind": names[type(one)], **asdict(one)} for one in sample.segments]
    return asdict(sample) | {"segments": segments}


def decode_sample(line: dict[str, Any]) -> Sample:
    """Return the sample that `encode_sample` wrote."""
    segments = tuple(_decode_segment(one) for one in line["segments"])
    return Sample(**line | {"segments": segments, "prompt_ids": tuple(line["prompt_ids"])})


def _decode_segment(line: dict[str, Any]) -> Segment:
    fields: dict[str, Any] = {
        name: tuple(v) if name == "ids" else v for name, v in line.items() if name != "kind"
    }
    return _KINDS[line["kind"]](**fields)
