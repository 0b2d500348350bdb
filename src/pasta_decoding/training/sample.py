"""Answers of one checkpoint to many prompts, kept with their token ids.

A kept answer is laid out for training from the very ids that were sampled: text that is tokenised
again may be cut elsewhere, and would then be another sequence with another probability.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from accelerate.utils import gather_object

from pasta_decoding.answer.request import Rules, SamplingParams
from pasta_decoding.data.lines import append_line, read_lines
from pasta_decoding.data.rows import Question
from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.lang.layout import ChunkRun, PromiseRun, Segment
from pasta_decoding.scheduling.asking import DecodingTask, ask, run_all
from pasta_decoding.scheduling.decoder import Decoder
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.loop import processes, share_of
from pasta_decoding.training.run import tracked

SampleKey = tuple[str, int]
JsonLine = dict[str, Any]
QUEUED = 16
"""Answers beyond those that fit the engine's cache, so that it is always full."""


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


def sample_answers(
    load: Callable[[], AbstractContextManager[Decoder]],
    prompts: Sequence[Question],
    path: Path,
    *,
    name: str,
    count: int,
    rules: Rules,
    config: PreferenceConfig,
) -> list[Sample]:
    """Return `count` answers a prompt, in order; those not yet in `path` are sampled.

    Each is appended as soon as it ends, so a run that was stopped goes on. If there is something to
    sample, all processes call `load`.
    name: the seed of an answer is a pure function of (seed, name, prompt, number), below 2^48.
    """
    questions = {prompt.id: prompt for prompt in prompts}
    asked = [(prompt.id, number) for prompt in prompts for number in range(count)]

    def sample(decoder: Decoder, scheduler: Any, prompt: str, number: int) -> DecodingTask[Sample]:
        digest = hashlib.sha256(f"{config.seed}/{name}/{prompt}/{number}".encode()).digest()
        seed = int.from_bytes(digest[:6])
        sampling = SamplingParams(config.temperature, seed=seed)
        request = decoder.request(questions[prompt].instruction, rules, sampling)
        [answer] = yield from ask(scheduler, [request])
        return Sample(
            prompt,
            number,
            seed,
            prompt_ids=request.prompt,
            segments=answer.segments,
            end=answer.end,
            annotated=answer.annotated,
            plain_tokens=decoder.plain_tokens(answer.text),
            critical_path=answer.critical_path,
            truncated=answer.truncated,
        )

    def sampled(missing: Sequence[SampleKey]) -> Iterator[JsonLine]:
        fitting = config.cache_tokens // rules.max_tokens
        with load() as decoder, closing(decoder.scheduler()) as scheduler:
            asking = (sample(decoder, scheduler, *key) for key in missing)
            coming = run_all(scheduler, asking, fitting + QUEUED)
            yield from map(encode_sample, tracked(coming, f"sampling {name}", len(missing)))

    return list(map(decode_sample, grown(path, asked, sampled)))


def grown(
    path: Path,
    asked: Sequence[SampleKey],
    make: Callable[[Sequence[SampleKey]], Iterable[JsonLine]],
) -> list[JsonLine]:
    """Return a line for each prompt and number asked; those not yet in the file are made.

    The processes share them out; all but the main one append to files of their own.
    """
    number = processes().process_index
    added: list[JsonLine] = []
    own = path.with_stem(f"{path.stem}-{number}") if number else path
    read_lines(own, resume=True)  # without what a kill has torn
    files = path.parent.glob(f"{path.stem}*{path.suffix}")
    lines = {(line["prompt"], line["number"]): line for one in files for line in read_lines(one)}
    missing = gather_object([key for key in share_of(asked) if key not in lines])
    for line in make(share_of(missing)) if missing else ():
        append_line(own, line)
        added.append(line)
    lines |= {(line["prompt"], line["number"]): line for line in gather_object(added)}
    return [lines[key] for key in asked]


_KINDS = {kind.__name__: kind for kind in get_args(Segment)}


def encode_sample(sample: Sample) -> dict[str, Any]:
    segments = [{"kind": type(one).__name__, **asdict(one)} for one in sample.segments]
    return asdict(sample) | {"segments": segments}


def decode_sample(line: dict[str, Any]) -> Sample:
    segments: list[Segment] = []
    for found in line["segments"]:
        values: Any = {key: tuple(one) if key == "ids" else one for key, one in found.items()}
        segments.append(_KINDS[values.pop("kind")](**values))
    return Sample(**line | {"segments": tuple(segments), "prompt_ids": tuple(line["prompt_ids"])})
