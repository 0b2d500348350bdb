"""Answers of one checkpoint to many prompts, stored with their token ids.

Training lays an answer out from the ids that were sampled. If its text were tokenised again, it
might be cut at other characters: another sequence with another probability.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.data.lines import append_line, read_lines
from pasta_decoding.data.rows import Question
from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.lang.layout import ChunkRun, MainRun, PromiseRun, Segment, SyncRun
from pasta_decoding.scheduling.asking import DecodingTask, ask, run_all
from pasta_decoding.scheduling.decoder import Decoder
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.loop import processes, share_of
from pasta_decoding.training.run import tracked

SampleKey = tuple[str, Any]
"""(id of the prompt, number of the answer)"""
JsonLine = dict[str, Any]
"""A JSON object, one line of a JSONL file."""
QUEUED = 16
"""Answers that wait beyond those that fit the engine's cache, so that the cache is always full."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer as it was sampled.

    prompt:        id of the prompt.
    number:        counts the answers to this prompt from 0.
    prompt_ids:    the prompt as the model saw it.
    end:           the token that ended the answer; None if a limit cut it off.
    annotated:     the text form, for people and for measures; training uses the segments.
    plain_tokens:  tokens of the text without tags, tokenised alone.
    critical_path: steps after the prefill.
    truncated:     whether any limit ended a chunk or the answer.
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
        """Return the sample with promises of the length that their chunks have.

        A promise stays as it is if the model did not choose it, or did not end its chunk itself.
        """
        segments = list(self.segments)
        for index, (promise, chunk) in enumerate(pairwise(self.segments)):
            match promise, chunk:
                case PromiseRun(ids, _, forced=0), ChunkRun(body, closed=True):
                    length = control.bucket(len(body) - 1)
                    true_ids = (*ids[:-1], control.promise_close[length])
                    segments[index] = PromiseRun(true_ids, length)
        return replace(self, segments=tuple(segments))


def sample_answers(
    load: Callable[[], AbstractContextManager[Decoder]],
    prompts: Sequence[Question],
    path: Path,
    *,
    name: str,
    count: int,
    rules: Rules,
    temperature: float,
    config: PreferenceConfig,
) -> list[Sample]:
    """Return `count` answers to each prompt, in order; sample those that are not yet in `path`.

    Each answer is appended to `path` as soon as it ends, so an interrupted run can go on. If any
    answer is missing, all processes call `load`.

    name: makes the seeds of this set. An answer's seed is a function of (config.seed, name, prompt,
          number), below 2^48.
    """
    questions = {prompt.id: prompt for prompt in prompts}
    keys = [(prompt.id, number) for prompt in prompts for number in range(count)]

    def sample(
        decoder: Decoder, scheduler: Any, prompt_id: str, number: int
    ) -> DecodingTask[Sample]:
        digest = hashlib.sha256(f"{config.seed}/{name}/{prompt_id}/{number}".encode()).digest()
        seed = int.from_bytes(digest[:6])
        sampling = SamplingParams(temperature, seed=seed)
        sample_rules = replace(rules, eagerness=config.eagerness_of(number))
        request = decoder.request(questions[prompt_id].instruction, sample_rules, sampling)
        [answer] = yield from ask(scheduler, [request])
        return Sample(
            prompt_id,
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

    def sample_missing(missing: Sequence[SampleKey]) -> Iterator[JsonLine]:
        answers_in_cache = config.cache_tokens // rules.max_tokens
        with load() as decoder, closing(decoder.scheduler()) as scheduler:
            tasks = (sample(decoder, scheduler, *key) for key in missing)
            samples = run_all(scheduler, tasks, answers_in_cache + QUEUED)
            for finished in tracked(samples, f"sampling {name}", len(missing)):
                yield encode_sample(finished)

    return [decode_sample(line) for line in grow(path, keys, sample_missing)]


def grow(
    path: Path,
    keys: Sequence[SampleKey],
    make: Callable[[Sequence[SampleKey]], Iterable[JsonLine]],
) -> list[JsonLine]:
    """Return the line of each key, in order; make the lines that the file lacks, and append them.

    The processes share the work. The main one appends to `path`, each other one to a file of its
    own next to it; all these files are read.

    make: yields the lines of the keys that it gets, in any order. All processes call it, or none.
    """
    process_index = processes().process_index
    out = path.with_stem(f"{path.stem}-{process_index}") if process_index else path
    read_lines(out, resume=True)  # this cuts off a line that a kill has torn
    lines: dict[SampleKey, JsonLine] = {}
    for file in path.parent.glob(f"{path.stem}*{path.suffix}"):
        lines |= _by_key(read_lines(file))
    missing = gather_object([key for key in share_of(keys) if key not in lines])
    added: list[JsonLine] = []
    if missing:
        for line in make(share_of(missing)):
            append_line(out, line)
            added.append(line)
    lines |= _by_key(gather_object(added))
    return [lines[key] for key in keys]


def _by_key(lines: Iterable[JsonLine]) -> dict[SampleKey, JsonLine]:
    return {(line["prompt"], line["number"]): line for line in lines}


_SEGMENT_CLASSES: dict[str, Any] = {
    "Run": MainRun,
    "PromiseRun": PromiseRun,
    "ChunkRun": ChunkRun,
    "SyncRun": SyncRun,
}
"""By the kind that files have for them; these words stay when a class is renamed."""
_KINDS = {segment_class: kind for kind, segment_class in _SEGMENT_CLASSES.items()}


def encode_sample(sample: Sample) -> JsonLine:
    """Return a sample as the line of a file; `decode_sample` is the inverse."""
    segments = [{"kind": _KINDS[type(segment)], **asdict(segment)} for segment in sample.segments]
    return asdict(sample) | {"segments": segments}


def decode_sample(line: JsonLine) -> Sample:
    segments: list[Segment] = []
    for record in line["segments"]:
        values = dict(record)
        segment_class = _SEGMENT_CLASSES[values.pop("kind")]
        if "ids" in values:
            values["ids"] = tuple(values["ids"])
        segments.append(segment_class(**values))
    return Sample(**line | {"segments": tuple(segments), "prompt_ids": tuple(line["prompt_ids"])})
