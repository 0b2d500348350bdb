"""What every annotator is, and the job that takes a file of plain rows through one.

An annotator takes plain rows and yields annotated ones, each as soon as it is done. A job keeps
them as lines of `OUT.partial`, behind a header that holds its settings, so that nothing finished is
lost or done twice. In the end OUT is written in the order of the input.
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
"""A longer response stays plain."""


@dataclass(frozen=True, slots=True)
class AnnotatedRow:
    """What became of one row.

    row:      the response in the text form; the plain one if `rejected` says why.
    rejected: why the annotation was not taken; None if it was.
    cost:     what it took, in units named by their keys (`requests`, `prompt_tokens`, ...).
    """

    row: Row
    rejected: str | None = None
    cost: Mapping[str, float] = field(default_factory=dict)


Annotate = Callable[[Iterable[Row]], Iterator[AnnotatedRow]]
"""An annotator: one result a plain row, in whatever order they are done.

Taking the tags out again gives the responses exactly.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a response, `[start, end)`, that can be written by itself.

    topic: what its promise says; None for a promise without a topic.
    """

    start: int
    end: int
    topic: str | None = None


FindParts = Callable[[str], Iterable[Part]]
"""A rule: the parts of a plain response in order. `pasta annotate --with module:function`."""


def reject(row: Row, reason: str, cost: Mapping[str, float] | None = None) -> AnnotatedRow:
    """Return a plain row as it stays: in the text form, in which literal tags are escaped."""
    text = text_form((Span(row.response),) if row.response else ())
    return AnnotatedRow(replace(row, response=text), reason, cost or {})


def by_rule(
    find_parts: FindParts, count_tokens: Callable[[str], int], rows: Iterable[Row]
) -> Iterator[AnnotatedRow]:
    """Annotate by a rule. Raises PastaError for parts that are none."""
    for row in rows:
        tree = finish_tree(tuple(_promised(row, find_parts(row.response))), count_tokens)
        yield AnnotatedRow(replace(row, response=text_form(tree)))


def finish_tree(tree: Tree, count_tokens: Callable[[str], int]) -> Tree:
    """Return `tree` with the markup that opens its chunks in the main thread, lengths counted."""
    nodes = list(lift_markup(tree))
    for index, node in enumerate(nodes):
        if isinstance(node, Chunk):
            nodes[index] = replace(node, tokens=valid_tokens(max(1, count_tokens(node.text))))
    return tuple(nodes)


def _promised(row: Row, parts: Iterable[Part]) -> Iterator[Node]:
    """Yield the response with its parts as chunks of no known length, the rest as main text."""
    text, at = row.response, 0
    for part in parts:
        if not at <= part.start < part.end <= len(text):
            raise PastaError(
                f"row {row.id!r}: the part {part.start}:{part.end} is empty, overlaps the one "
                f"before it, or ends behind the response"
            )
        if part.topic != valid_topic(part.topic):
            raise PastaError(f"row {row.id!r}: {part.topic!r} is no topic")
        if part.start > at:
            yield Span(text[at : part.start])
        yield Chunk(part.topic, DEFAULT_TOKENS, text[part.start : part.end])
        at = part.end
    if at < len(text):
        yield Span(text[at:])


def run_job(
    rows: Sequence[Row],
    annotate: Annotate,
    count_tokens: Callable[[str], int],
    out: Path,
    settings: Mapping[str, Any],
    tick: Callable[[int], object] = lambda _: None,
) -> list[AnnotatedRow]:
    """Annotate the rows that are not in the journal yet, write OUT, and return all in order.

    settings: what the outcome depends on, as JSON holds it. Raises PastaError if the journal was
    written with others. `tick` hears how many rows are done now, those of an earlier run first.
    """
    if not out.parent.is_dir():  # before anything is paid for
        raise PastaError(f"cannot write {out}: No such file or directory")
    journal = out.with_name(f"{out.name}.partial")  # the finished rows until all are there
    done = _read_journal(journal, settings, {row.id: row for row in rows})
    tick(len(done))
    missing = [row for row in rows if row.id not in done]
    for one in _screened(missing, annotate, count_tokens):
        line = {"id": one.row.id, "response": one.row.response}
        append_line(journal, line | {"rejected": one.rejected, "cost": dict(one.cost)})
        done[one.row.id] = one
        tick(1)
    in_order = [done[row.id] for row in rows]
    write_rows(out, [annotated.row for annotated in in_order])
    journal.unlink()
    return in_order


def _screened(
    rows: Iterable[Row], annotate: Annotate, count_tokens: Callable[[str], int]
) -> Iterator[AnnotatedRow]:
    """Keep from an annotator what it is not for: responses without text, and huge ones."""
    fit: list[Row] = []
    for row in rows:
        if not row.response.strip():
            yield reject(row, "empty response")
        elif count_tokens(row.response) > MAX_TOKENS:
            yield reject(row, f"more than {MAX_TOKENS} tokens")
        else:
            fit.append(row)
    yield from annotate(fit)


def _read_journal(
    path: Path, settings: Mapping[str, Any], rows: Mapping[str, Row]
) -> dict[str, AnnotatedRow]:
    """Return the finished results of `rows` by id; begin the journal if there is none."""
    hint = f"Remove it to start again: rm {path}"
    lines = read_lines(path, resume=True, hint=hint)
    if not lines:
        append_line(path, {"settings": dict(settings)})
        return {}
    try:
        refuse_other_settings(path, dict(lines[0]["settings"]), settings, hint=hint)
        return {
            one["id"]: AnnotatedRow(
                replace(rows[one["id"]], response=one["response"]), one["rejected"], one["cost"]
            )
            for one in lines[1:]
            if one["id"] in rows
        }
    except (KeyError, TypeError, ValueError) as error:
        raise PastaError(f"{path} is not a journal of annotations: {error!r}", hint=hint) from error
