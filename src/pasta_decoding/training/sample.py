"""Answers of one checkpoint to many prompts, kept with their token ids.

A kept answer is laid out for training from the very ids that were sampled: text that is tokenised
again may be cut elsewhere, and would then be another sequence with another probability.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import append_line, read_lines
from pasta_decoding.data.rows import Question
from pasta_decoding.lang.layout import ChunkRun, Layout, PromiseRun, Run, Segment, SyncRun, lay_out
from pasta_decoding.lang.positions import Scheme
from pasta_decoding.models.checkpoint import ControlTokens
from pasta_decoding.runtime.decoder import LocalDecoder
from pasta_decoding.runtime.generation import Generation
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.run import tracked

QUEUED = 16
"""Answers that wait for room in the engine's cache, so that it is always full."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer as it was sampled.

    prompt:     id of the prompt, of whose answers this is the `number`-th, from 0.
    prompt_ids: the prompt as the model saw it.
    end:        the token that ended it; None if a limit cut it off.
    annotated:  the text form, for people and for measures; training takes the segments.
    plain_tokens: tokens of the tag-free text, tokenised alone.
    truncated:  whether any limit ended a chunk or the answer.
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

    def with_true_lengths(self, control: ControlTokens) -> Sample:
        """Return it with true promises, where the model chose them and ended the chunk itself."""
        segments = list(self.segments)
        for place, (promise, chunk) in enumerate(pairwise(self.segments)):
            match promise, chunk:
                case PromiseRun(ids, _, 0), ChunkRun(body, True):
                    length = control.bucket(len(body) - 1)
                    ids = (*ids[:-1], control.promise_close[length])
                    segments[place] = PromiseRun(ids, length)
        return replace(self, segments=tuple(segments))

    def layout(self, scheme: Scheme, control: ControlTokens) -> Layout:
        close = control.async_close
        return lay_out(self.prompt_ids, self.segments, scheme, async_close=close, end=self.end)


def sample_answers(
    load: Callable[[], LocalDecoder],
    prompts: Sequence[Question],
    path: Path,
    *,
    name: str,
    count: int,
    rules: Rules,
    config: PreferenceConfig,
) -> list[Sample]:
    """Return `count` answers a prompt, in order; those not yet in `path` are sampled.

    Each is appended as soon as it ends, so a run that was stopped goes on. `load` is called only
    if there is something to sample.
    name: the seed of an answer is a pure function of (seed, name, prompt, number), below 2^48.
    """
    known = {(s.prompt, s.number): s for s in map(decode_sample, read_lines(path, resume=True))}
    asked = [(prompt, number) for prompt in prompts for number in range(count)]
    missing = [(prompt, number) for prompt, number in asked if (prompt.id, number) not in known]
    if missing:
        coming = _sampled(load(), missing, rules, config.temperature, f"{config.seed}/{name}")
        for sample in tracked(coming, f"sampling {name}", len(missing)):
            append_line(path, encode_sample(sample))
            known[sample.prompt, sample.number] = sample
    return [known[prompt.id, number] for prompt, number in asked]


def _sampled(
    decoder: LocalDecoder,
    jobs: Sequence[tuple[Question, int]],
    rules: Rules,
    temperature: float,
    seeded: str,
) -> Iterator[Sample]:
    """Decode all jobs, as many together as there is room for; yield each answer as it ends."""
    scheduler = decoder.scheduler()
    waiting = iter(jobs)
    running: dict[Generation, tuple[str, int, int]] = {}
    try:
        while True:
            queued = len(running) - scheduler.activity.running
            for prompt, number in islice(waiting, QUEUED - queued):
                digest = hashlib.sha256(f"{seeded}/{prompt.id}/{number}".encode()).digest()
                seed = int.from_bytes(digest[:6])
                sampling = SamplingParams(temperature, seed=seed)
                request = decoder.request(prompt.instruction, rules, sampling)
                running[scheduler.add(request)] = prompt.id, number, seed
            if not running:
                return
            scheduler.step()
            for one in list(running):
                if (answer := one.result()) is not None:
                    yield Sample(
                        *running.pop(one),
                        prompt_ids=answer.layout.tokens[: answer.trace.prompt_tokens],
                        segments=answer.segments,
                        end=answer.end,
                        annotated=answer.annotated,
                        plain_tokens=decoder.plain_tokens(answer.text),
                        critical_path=answer.critical_path,
                        truncated=answer.truncated,
                    )
    finally:
        scheduler.close()


_KINDS = {kind.__name__: kind for kind in (Run, PromiseRun, ChunkRun, SyncRun)}


def encode_sample(sample: Sample) -> dict[str, Any]:
    segments = [{"kind": type(one).__name__, **asdict(one)} for one in sample.segments]
    return asdict(sample) | {"segments": segments}


def decode_sample(line: dict[str, Any]) -> Sample:
    segments: list[Segment] = []
    for found in line["segments"]:
        values: Any = {key: tuple(one) if key == "ids" else one for key, one in found.items()}
        segments.append(_KINDS[values.pop("kind")](**values))
    return Sample(**line | {"segments": tuple(segments), "prompt_ids": tuple(line["prompt_ids"])})
