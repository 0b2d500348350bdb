"""The interface of annotators, and the job that annotates a file of plain rows.

An annotator takes plain rows and yields annotated ones, each as soon as it is done. A job appends
them to its journal, the file `OUT.partial`, so that no row is lost or annotated twice. The first
line of the journal holds the job's settings. When all rows are done, the job writes OUT in the
order of the input.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import append_line, read_lines, refuse_other_settings
from pasta_decoding.data.rows import Row, write_rows
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.markup import lift_markup
from pasta_decoding.lang.tags import DEFAULT_TOKENS
from pasta_decoding.lang.tree import Chunk, Node, Span, Tree, text_form, valid_tokens, valid_topic

MAX_TOKENS = 4096
"""Tokens of a response; longer ones stay plain."""


@dataclass(frozen=True, slots=True)
class AnnotatedRow:
    """The result of an annotator for one row.

    row:      the row with the annotated response in text form; with the plain one if rejected.
    rejected: why there is no annotation; None if there is one.
    cost:     amounts by name: `requests`, `prompt_tokens` and others.
    """

    row: Row
    rejected: str | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


Annotate = Callable[[Iterable[Row]], Iterator[AnnotatedRow]]
"""An annotator: yields one result for each plain row, in any order.

Without its tags, an annotated response is exactly the plain response.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a response, `[start, end)` in characters, that can be written by itself.

    topic: the topic of its promise; None for a promise without a topic.
    """

    start: int
    end: int
    topic: str | None = None


FindParts = Callable[[str], Iterable[Part]]
"""A rule: returns the parts of a plain response in order. `pasta annotate --with` names one."""


def reject(row: Row, reason: str, cost: Mapping[str, float] | None = None) -> AnnotatedRow:
    """Return the result for a row that stays plain. Its text form escapes literal tags."""
    text = text_form((Span(row.response),) if row.response else ())
    return AnnotatedRow(replace(row, response=text), reason, cost or {})


def by_rule(
    find_parts: FindParts, count_tokens: Callable[[str], int], rows: Iterable[Row]
) -> Iterator[AnnotatedRow]:
    """Annotate by a rule. Raises PastaError for empty or overlapping parts and invalid topics."""
    for row in rows:
        tree = finish_tree(tuple(_promised(row, find_parts(row.response))), count_tokens)
        yield AnnotatedRow(replace(row, response=text_form(tree)))


def finish_tree(tree: Tree, count_tokens: Callable[[str], int]) -> Tree:
    """Return a tree whose promises have counted lengths.

    Markup that opens a chunk is moved to the main thread.
    """
    nodes = list(lift_markup(tree))
    for index, node in enumerate(nodes):
        if isinstance(node, Chunk):
            nodes[index] = replace(node, tokens=valid_tokens(max(1, count_tokens(node.text))))
    return tuple(nodes)


def _promised(row: Row, parts: Iterable[Part]) -> Iterator[Node]:
    """Yield the response with its parts as chunks, whose lengths are not counted yet."""
    text = row.response
    position = 0
    for part in parts:
        if not position <= part.start < part.end <= len(text):
            raise PastaError(
                f"row {row.id!r}: the part {part.start}:{part.end} is empty, overlaps the one "
                f"before it, or ends behind the response"
            )
        if part.topic != valid_topic(part.topic):
            raise PastaError(f"row {row.id!r}: {part.topic!r} is no topic")
        if part.start > position:
            yield Span(text[position : part.start])
        yield Chunk(part.topic, DEFAULT_TOKENS, text[part.start : part.end])
        position = part.end
    if position < len(text):
        yield Span(text[position:])


def run_job(
    rows: Sequence[Row],
    annotate: Annotate,
    count_tokens: Callable[[str], int],
    out: Path,
    settings: Mapping[str, Any],
    tick: Callable[[int], object] = lambda _: None,
) -> list[AnnotatedRow]:
    """Annotate the rows that are not in the journal, write OUT, and return all results in order.

    settings: everything on which the result depends, in types of JSON.
    tick:     gets the number of rows done since its last call; first, those of an earlier run.

    Raises PastaError if the journal was written with other settings.
    """
    if not out.parent.is_dir():  # an endpoint may cost money: fail before the first request
        raise PastaError(f"cannot write {out}: No such file or directory")
    journal = out.with_name(f"{out.name}.partial")
    done = _read_journal(journal, settings, {row.id: row for row in rows})
    tick(len(done))
    missing = [row for row in rows if row.id not in done]
    for annotated in _annotate_suitable(missing, annotate, count_tokens):
        line = {
            "id": annotated.row.id,
            "response": annotated.row.response,
            "rejected": annotated.rejected,
            "cost": dict(annotated.cost),
        }
        append_line(journal, line)
        done[annotated.row.id] = annotated
        tick(1)
    in_order = [done[row.id] for row in rows]
    write_rows(out, [annotated.row for annotated in in_order])
    journal.unlink()
    return in_order


def _annotate_suitable(
    rows: Iterable[Row], annotate: Annotate, count_tokens: Callable[[str], int]
) -> Iterator[AnnotatedRow]:
    """Annotate rows; reject those without text, and the long ones, without the annotator."""
    suitable: list[Row] = []
    for row in rows:
        if not row.response.strip():
            yield reject(row, "empty response")
        elif count_tokens(row.response) > MAX_TOKENS:
            yield reject(row, f"more than {MAX_TOKENS} tokens")
        else:
            suitable.append(row)
    yield from annotate(suitable)


def _read_journal(
    path: Path, settings: Mapping[str, Any], rows: Mapping[str, Row]
) -> dict[str, AnnotatedRow]:
    """Return the results for `rows` in a journal, by id; begin the journal if there is none."""
    hint = f"Remove it to start again: rm {path}"
    lines = read_lines(path, resume=True, hint=hint)
    if not lines:
        append_line(path, {"settings": dict(settings)})
        return {}
    try:
        refuse_other_settings(path, dict(lines[0]["settings"]), settings, hint=hint)
        results = {}
        for line in lines[1:]:
            if row := rows.get(line["id"]):
                annotated = replace(row, response=line["response"])
                results[row.id] = AnnotatedRow(annotated, line["rejected"], line["cost"])
        return results
    except (KeyError, TypeError, ValueError) as error:
        raise PastaError(f"{path} is not a journal of annotations: {error!r}", hint=hint) from error
