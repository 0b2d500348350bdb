"""Records: one line of JSON an answer, and the run folder that holds them.

A request that failed has a record with its `error` and zeros, so that it counts in every figure.

A run folder holds one method's answers to one set of prompts:

run.json:           the settings, and where it ran.
records.jsonl:      a line an answer, in the order in which they ended; a prompt's newest counts.
model_outputs.json: all answers in AlpacaEval's format, in the order of the prompts; at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import append_line, parse_lines, refuse_other_settings, write_text
from pasta_decoding.data.rows import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.machine import commit, machine, versions
from pasta_decoding.lang.layout import ChunkRun, PromiseRun
from pasta_decoding.lang.measures import repeated_chunks, tokens_per_step
from pasta_decoding.lang.tree import Sync
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder

SETTINGS, RECORDS, OUTPUTS = "run.json", "records.jsonl", "model_outputs.json"


@dataclass(frozen=True, slots=True)
class Record:
    """One answer of one method in figures.

    id:            the question's.
    error:         why there is no answer; None if there is one.
    annotated:     the text in the text form; parts that were written side by side are chunks.
    critical_path: forward steps after the first prefill at unlimited width. A later prefill is one
                   such step, since what came before it had to be known.
    fed_tokens:    tokens that were written and fed, tags and discarded drafts included.
    prompt_tokens: tokens of all prompts; a beginning that several share counts once.
    promises:      of every chunk that ended by itself, the bucket promised and the tokens written.
    near_promises: those whose tokens fall into that bucket or into one next to it.
    hit_limit:     whether the token budget of the whole answer ended something.
    fallback:      whether the method gave up and answered as the sequential one does.
    seconds:       of the whole request, the queue included; of a failed one, its time-out.
    first_token_s: until the first token was chosen, whatever it was.
    repeats:       seconds of each turn, if there were several; `seconds` is their median.
    turns:         names the turns that methods took on this prompt, each alone on the engine: only
                   seconds of the same turns may be compared. None if it was not timed.
    """

    id: str
    instruction: str
    dataset: str | None = None
    error: str | None = None
    text: str = ""
    annotated: str = ""
    plain_tokens: int = 0
    critical_path: int = 0
    fed_tokens: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    syncs: int = 0
    interventions: int = 0
    repeated_chunks: int = 0
    truncated_chunks: int = 0
    hit_limit: bool = False
    promises: Sequence[tuple[int, int]] = ()
    near_promises: int = 0
    fallback: bool = False
    seconds: float = 0.0
    first_token_s: float | None = None
    repeats: Sequence[float] = ()
    turns: str | None = None

    @property
    def tokens_per_step(self) -> float:
        """Plain tokens / critical path."""
        return tokens_per_step(self.plain_tokens, self.critical_path)


def record_of(decoder: Decoder, question: Question, answer: Answer) -> Record:
    """Return the record of an answer that one request wrote."""
    promises = promises_of(answer)
    is_near, trace = decoder.vocabulary.control.is_near, answer.trace
    return Record(
        question.id,
        question.instruction,
        question.dataset,
        text=answer.text,
        annotated=answer.annotated,
        plain_tokens=decoder.plain_tokens(answer.text),
        critical_path=answer.critical_path,
        fed_tokens=answer.fed_tokens,
        # Servers do not say what their caches held: the prompt's own tokens.
        prompt_tokens=trace.prompt_tokens,
        chunks=answer.chunks,
        syncs=sum(isinstance(node, Sync) for node in answer.tree),
        interventions=answer.interventions,
        repeated_chunks=repeated_chunks(answer.tree),
        truncated_chunks=answer.truncated_chunks,
        hit_limit=answer.hit_limit,
        promises=promises,
        near_promises=sum(is_near(promised, tokens) for promised, tokens in promises),
        seconds=answer.seconds,
        first_token_s=answer.first_token_s,
    )


def failed(question: Question, error: str) -> Record:
    """Return the record of a request that has no answer."""
    return Record(question.id, question.instruction, question.dataset, error=error)


def promises_of(answer: Answer) -> tuple[tuple[int, int], ...]:
    """Return what was promised and what was written, of every chunk that ended by itself."""
    return tuple(
        (promise.promised, len(chunk.ids) - 1)  # ASYNC_OPEN is not its text
        for promise, chunk in pairwise(answer.segments)
        if isinstance(promise, PromiseRun) and isinstance(chunk, ChunkRun) and chunk.closed
    )


# Files


def from_line(line: dict[str, Any]) -> Record:
    """Return the record of a line. Raises ValueError, TypeError or KeyError."""
    record = Record(**line)
    return replace(
        record,
        promises=tuple((promised, tokens) for promised, tokens in record.promises),
        repeats=tuple(record.repeats),
    )


def read_records(path: Path, *, resume: bool = False) -> list[Record]:
    """Return the records of a file; a last line that a kill left unfinished is not one.

    resume: the file is to grow on, so such a line is cut away. Raises PastaError for others.
    """
    return parse_lines(path, from_line, what="a record of an evaluation", hint="", resume=resume)


Settings = Mapping[str, Any]
"""What the answers depend on, as JSON holds it."""


class RunFolder:
    """Opens or begins a folder. Raises PastaError if it was begun with other settings.

    retry_failed: forget the requests that failed, and count them in run.json.
    """

    def __init__(self, path: Path, settings: Settings, *, retry_failed: bool = False) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        here = {"machine": machine(), "commit": commit(), "versions": versions()}
        before = self._before()
        if before is None:
            run = {**settings, **here, "resumed": []}
        else:
            known = {name: before.get(name) for name in settings}
            hint = "Give the settings it was begun with, or another --out."
            refuse_other_settings(path, known, settings, hint=hint)
            found = read_records(self.path / RECORDS, resume=True)
            self.records = {record.id: record for record in found}
            run = _resumed(before, here)
            failed = [key for key, record in self.records.items() if record.error is not None]
            if retry_failed and failed:
                run["retried"] = before.get("retried", 0) + len(failed)
                for key in failed:
                    del self.records[key]
        write_text(self.path / SETTINGS, json.dumps(run, indent=2, ensure_ascii=False) + "\n")

    def missing(self, questions: Sequence[Question]) -> list[Question]:
        """Return the questions that have no record yet."""
        return [question for question in questions if question.id not in self.records]

    def append(self, record: Record) -> None:
        """Keep a record; when this returns, a kill cannot lose it any more."""
        append_line(self.path / RECORDS, asdict(record))
        self.records[record.id] = record

    def finish(self, questions: Sequence[Question]) -> list[Record]:
        """Write the answers in AlpacaEval's format, whole; return the records in order."""
        records = [self.records[question.id] for question in questions]
        outputs = [model_output(record, self.path.name) for record in records]
        text = json.dumps(outputs, indent=2, ensure_ascii=False) + "\n"
        write_text(self.path / OUTPUTS, text)
        return records

    def _before(self) -> dict[str, Any] | None:
        """Return the settings that an earlier command wrote; None if there are none."""
        settings = self.path / SETTINGS
        if not settings.exists():
            if (self.path / RECORDS).exists():
                raise PastaError(f"{self.path} holds records without a {SETTINGS}")
            return None
        try:
            return dict(json.loads(settings.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise PastaError(f"{settings} is broken: {error}") from error


def _resumed(before: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Return run.json of a run that goes on here; other code or machines are added to it."""
    places = [{key: before.get(key) for key in here}, *before.get("resumed", [])]
    return before if places[-1] == here else before | {"resumed": [*places[1:], here]}


def model_output(record: Record, generator: str) -> dict[str, str]:
    """Return one answer as AlpacaEval wants it; a failed request has answered nothing."""
    output = {"instruction": record.instruction, "output": record.text, "generator": generator}
    return output if record.dataset is None else {"dataset": record.dataset, **output}
