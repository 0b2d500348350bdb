"""`pasta bench answers`: what parallel decoding buys on a set of prompts, failures included."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from pasta_decoding.errors import PastaError
from pasta_decoding.eval.bare import StepTime
from pasta_decoding.eval.machine import commit, machine
from pasta_decoding.eval.timing import Timing, time_answer
from pasta_decoding.lang.check import check
from pasta_decoding.lang.layout import ChunkRun, PromiseRun
from pasta_decoding.lang.measures import geometric_mean, own_speedup, repeated_chunks
from pasta_decoding.lang.tree import read, show, strip
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.events import ordered
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt's answer in figures; `error` instead of them if the request failed.

    promises: of every chunk that ended by itself, the bucket promised and the tokens written.
    near_promises: those whose tokens fall into that bucket or into one next to it.
    shown_equals_text: the streamed pieces add up to the answer's text, and its text form reads
        back to the same.
    sequential_*: the same weights with promises banned; None where that was left out.
    """

    prompt: str
    error: str | None = None
    text: str = ""
    annotated: str = ""
    plain_tokens: int = 0
    critical_path: int = 0
    chunks: int = 0
    syncs: int = 0
    fed_tokens: int = 0
    interventions: int = 0
    repeated_chunks: int = 0
    truncated_chunks: int = 0
    promises: Sequence[tuple[int, int]] = ()
    near_promises: int = 0
    hit_limit: bool = False
    well_formed: bool = True
    shown_equals_text: bool = True
    wall_s: float = 0.0
    sequential_tokens: int | None = None
    sequential_hit_limit: bool | None = None
    sequential_wall_s: float | None = None
    timing: Timing | None = None

    @property
    def own_speedup(self) -> float:
        """Plain tokens / critical path."""
        return own_speedup(self.plain_tokens, self.critical_path)


def _record(decoder: Decoder, prompt: str, answers: Sequence[Answer | PastaError]) -> Record:
    """Make the record of a prompt's parallel answer and, if it is there, its sequential one."""
    for answer in answers:
        if isinstance(answer, PastaError):
            return Record(prompt, error=str(answer))
    parallel, *sequential = (answer for answer in answers if isinstance(answer, Answer))
    record = _parallel_record(decoder, prompt, parallel)
    for answer in sequential:
        record = replace(
            record,
            sequential_tokens=decoder.plain_tokens(answer.text),
            sequential_hit_limit=answer.hit_limit,
            sequential_wall_s=answer.seconds,
        )
    return record


def _timed(decoder: Decoder, record: Record, answer: Answer, bare: StepTime) -> Record:
    """Add the timing of a replay; the engine is warm, it has just answered."""
    prompt_tokens = answer.trace.prompt_tokens
    prompt = answer.layout.tokens[:prompt_tokens]
    try:
        timing = time_answer(decoder, prompt, answer.segments, answer.text, bare)
    except PastaError as error:
        return Record(record.prompt, error=str(error))
    return replace(record, timing=timing)


def _parallel_record(decoder: Decoder, prompt: str, answer: Answer) -> Record:
    annotated, text = answer.annotated, answer.text
    problems = check(annotated, topic_required=decoder.topic)
    promises = _promises(answer)
    is_near = decoder.vocabulary.binding.is_near
    return Record(
        prompt,
        text=text,
        annotated=annotated,
        plain_tokens=decoder.plain_tokens(text),
        critical_path=answer.critical_path,
        chunks=answer.chunks,
        syncs=annotated.count("<sync/>"),
        fed_tokens=answer.fed_tokens,
        interventions=answer.overruled,
        repeated_chunks=repeated_chunks(answer.tree),
        truncated_chunks=answer.truncated_chunks,
        promises=promises,
        near_promises=sum(is_near(promised, tokens) for promised, tokens in promises),
        hit_limit=answer.hit_limit,
        well_formed=not problems and show(read(annotated)) == annotated,
        shown_equals_text="".join(ordered(answer.events)) == text == strip(read(annotated)),
        wall_s=answer.seconds,
    )


def _promises(answer: Answer) -> tuple[tuple[int, int], ...]:
    return tuple(
        (promise.promised, len(chunk.ids) - 1)  # ASYNC_OPEN is not its text
        for promise, chunk in pairwise(answer.segments)
        if isinstance(promise, PromiseRun) and isinstance(chunk, ChunkRun) and chunk.closed
    )


def bench(
    decoder: Decoder,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    sequential: int | None,
    timed: int,
    bare: StepTime,
    out: Path | None,
    tick: Callable[[Record], None],
    at_once: int = 1,
) -> list[Record]:
    """Bench every prompt; also time a replay of the first `timed`.

    The first `sequential` are answered sequentially, too; None means all of them. With
    `at_once` > 1 several are answered together: seconds are then those of a shared engine.

    With `out`, records are kept there line by line, and a stopped run goes on where it was.
    """
    records = _known(out)
    for prompt in prompts:
        if prompt in records:
            tick(records[prompt])
    waiting = [
        Question(prompt, place < timed, sequential is None or place < sequential)
        for place, prompt in enumerate(prompts)
        if prompt not in records
    ]
    for question, answers in _answered(decoder, waiting, max_tokens, at_once):
        record = _record(decoder, question.prompt, answers)
        if question.is_timed and isinstance(answers[0], Answer) and record.text:
            record = _timed(decoder, record, answers[0], bare)
        if out is not None:
            with out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        records[question.prompt] = record
        tick(record)
    return [records[prompt] for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what is to be measured of it."""

    prompt: str
    is_timed: bool
    is_compared: bool


def _answered(
    decoder: Decoder, questions: Sequence[Question], max_tokens: int, at_once: int
) -> Iterator[tuple[Question, list[Answer | PastaError]]]:
    """Answer all questions, those to be compared a second time without promises."""
    places = [
        (number, parallel)
        for number, question in enumerate(questions)
        for parallel in ([True, False] if question.is_compared else [True])
    ]

    def request(number: int, *, parallel: bool) -> Request | PastaError:
        try:
            rules = Rules(max_tokens=max_tokens, parallel=parallel)
            return decoder.request(questions[number].prompt, rules, Sampling())
        except PastaError as error:
            return error

    requests = (request(number, parallel=parallel) for number, parallel in places)
    found: defaultdict[int, dict[bool, Answer | PastaError]] = defaultdict(dict)
    for place, answer in decoder.answer_many(requests, at_once=at_once):
        number, parallel = places[place]
        found[number][parallel] = answer
        if len(found[number]) == 1 + questions[number].is_compared:
            yield questions[number], [found[number][mode] for mode in sorted(found[number])[::-1]]
            del found[number]


def _known(out: Path | None) -> dict[str, Record]:
    if out is None or not out.exists():
        return {}
    return {record.prompt: record for record in read_records(out)}


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file. Raises PastaError for a line that is none."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            fields = json.loads(line)
            timing = fields.pop("timing")
            yield Record(**fields, timing=Timing(**timing) if timing else None)
        except (ValueError, TypeError, KeyError) as error:
            message = f"{path}:{number}: not a record of this bench: {error}"
            raise PastaError(message, hint="Choose another --records file.") from error


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Return the figures of a bench; a failed request counts in `failures` and nowhere else."""
    done = [record for record in records if record.error is None]
    promised = [record for record in done if record.chunks]
    compared = [record for record in done if record.sequential_tokens is not None]
    timed = [record.timing for record in done if record.timing is not None]
    chunks = sum(record.chunks for record in done)
    return {
        "answers": len(records),
        "failures": len(records) - len(done),
        "malformed": sum(not (r.well_formed and r.shown_equals_text) for r in done),
        "with_promise": _share(len(promised), len(done)),
        "own_speedup": geometric_mean(record.own_speedup for record in done),
        "own_speedup_with_promise": geometric_mean(record.own_speedup for record in promised),
        "replay_speedup": geometric_mean(timing.replay_speedup for timing in timed),
        "interpreter_efficiency": geometric_mean(t.interpreter_efficiency for t in timed),
        "timed": len(timed),
        "interventions": sum(record.interventions for record in done),
        "interventions_per_token": _share(
            sum(record.interventions for record in done), sum(record.fed_tokens for record in done)
        ),
        "chunks": chunks,
        "syncs": sum(record.syncs for record in done),
        "repeated_chunks": _share(sum(record.repeated_chunks for record in done), chunks),
        "truncated_chunks": _share(sum(record.truncated_chunks for record in done), chunks),
        "near_promises": _share(
            sum(record.near_promises for record in done),
            sum(len(record.promises) for record in done),
        ),
        "hit_limit": _share(sum(record.hit_limit for record in done), len(done)),
        "plain_tokens_mean": _mean([record.plain_tokens for record in done]),
        "compared": len(compared),
        "compared_hit_limit": _share(sum(r.hit_limit for r in compared), len(compared)),
        "sequential_hit_limit": _share(
            sum(bool(r.sequential_hit_limit) for r in compared), len(compared)
        ),
        "sequential_tokens_mean": _mean([r.sequential_tokens or 0 for r in compared]),
        "machine": machine(),
        "commit": commit(),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[int]) -> float | None:
    return fmean(values) if values else None
