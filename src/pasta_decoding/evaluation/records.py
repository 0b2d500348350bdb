"""What is known of one prompt's answer: the line that every figure of an evaluation is made from.

A request that failed has a record too, with `error` and nothing but zeros behind it, so that it
counts in every figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import parse_lines
from pasta_decoding.data.questions import Question
from pasta_decoding.lang.layout import ChunkRun, Layout, PromiseRun
from pasta_decoding.lang.measures import own_speedup, repeated_chunks
from pasta_decoding.lang.tree import Sync
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.events import Ordered
from pasta_decoding.runtime.trace import Trace


@dataclass(frozen=True, slots=True)
class Record:
    """One answer of one method in figures.

    id:            the question's.
    error:         why there is no answer; None if there is one.
    annotated:     the text in the text form; parts that were written side by side are chunks.
    critical_path: forward steps after the first prefill at unlimited width. A later prefill is one
                   such step, since what came before it had to be known.
    fed_tokens:    tokens that were written and fed, tags and discarded drafts included.
    prompt_tokens: tokens of all prefills, each as often as it was computed.
    widths:        live threads -> of how many of the critical path's steps.
    promises:      of every chunk that ended by itself, the bucket promised and the tokens written.
    near_promises: those whose tokens fall into that bucket or into one next to it.
    hit_limit:     whether the token budget of the whole answer ended something.
    fallback:      whether the method gave up and answered as the sequential one does.
    seconds:       of the whole request, the queue included; of a failed one, its time-out.
    first_token_s: until the first token was chosen, whatever it was.
    first_text_s, last_text_s: until text was first and last added to what a person can read from
                   the beginning on without a gap; None if there was none.
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
    widths: Mapping[int, int] = field(default_factory=dict)
    interventions: int = 0
    repeated_chunks: int = 0
    truncated_chunks: int = 0
    hit_limit: bool = False
    promises: Sequence[tuple[int, int]] = ()
    near_promises: int = 0
    fallback: bool = False
    seconds: float = 0.0
    first_token_s: float | None = None
    first_text_s: float | None = None
    last_text_s: float | None = None
    repeats: Sequence[float] = ()
    turns: str | None = None

    @property
    def own_speedup(self) -> float:
        """Plain tokens / critical path."""
        return own_speedup(self.plain_tokens, self.critical_path)


def record_of(decoder: Decoder, question: Question, answer: Answer) -> Record:
    """Return the record of an answer that one request wrote."""
    promises = promises_of(answer)
    is_near = decoder.vocabulary.control.is_near
    first_text_s, last_text_s = text_times(answer)
    return Record(
        question.id,
        question.instruction,
        question.dataset,
        text=answer.text,
        annotated=answer.annotated,
        plain_tokens=decoder.plain_tokens(answer.text),
        critical_path=answer.critical_path,
        fed_tokens=answer.fed_tokens,
        prompt_tokens=prompt_tokens_of(answer.trace),
        chunks=answer.chunks,
        syncs=sum(isinstance(node, Sync) for node in answer.tree),
        widths=widths_of(answer.layouts),
        interventions=answer.interventions,
        repeated_chunks=repeated_chunks(answer.tree),
        truncated_chunks=answer.truncated_chunks,
        hit_limit=answer.hit_limit,
        promises=promises,
        near_promises=sum(is_near(promised, tokens) for promised, tokens in promises),
        seconds=answer.seconds,
        first_token_s=answer.first_token_s,
        first_text_s=first_text_s,
        last_text_s=last_text_s,
    )


def prompt_tokens_of(trace: Trace) -> int:
    """Return the tokens of all prefills; of servers, whose caches are theirs, the prompt's own."""
    return trace.prefilled_tokens if trace.sent is None else trace.prompt_tokens


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


def widths_of(layouts: Sequence[Layout]) -> dict[int, int]:
    """Return how many steps have how many live threads, at unlimited width."""
    pairs = {pair for row in layouts for pair in zip(row.step, row.thread, strict=True)}
    live = Counter(step for step, _thread in pairs)
    return dict(sorted(Counter(width for step, width in live.items() if step).items()))


def text_times(answer: Answer) -> tuple[float | None, float | None]:
    """Return when text could first and last be added to what a person reads in reading order."""
    reading = Ordered()
    times = [
        seconds
        for event, seconds in zip(answer.events, answer.event_s, strict=True)
        if reading.feed(event).strip()
    ]
    return (times[0], times[-1]) if times else (None, None)


# Files


def to_line(record: Record) -> dict[str, Any]:
    """Return what JSON keeps of a record."""
    return asdict(record)


def from_line(line: dict[str, Any]) -> Record:
    """Return the record that `to_line` wrote. Raises ValueError, TypeError or KeyError."""
    record = Record(**line)
    return replace(
        record,
        widths={int(width): steps for width, steps in record.widths.items()},
        promises=tuple((promised, tokens) for promised, tokens in record.promises),
        repeats=tuple(record.repeats),
    )


def read_records(path: Path, *, resume: bool = False) -> list[Record]:
    """Return the records of a file; a last line that a kill left unfinished is not one.

    resume: the file is to grow on, so such a line is cut away. Raises PastaError for others.
    """
    hint = "Choose another folder, or remove the file to start again."
    what = "a record of an evaluation"
    return parse_lines(path, from_line, what=what, hint=hint, resume=resume)
