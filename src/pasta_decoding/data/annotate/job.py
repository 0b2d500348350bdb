"""A file of plain rows through an annotator: nothing finished is ever lost or done twice.

Finished rows are kept as lines of `OUT.partial`, behind a header that holds the settings. A job
with the same settings goes on there; in the end OUT is written in the order of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pasta_decoding.data.annotate.base import Annotate, Annotated, reject
from pasta_decoding.data.lines import append_line, read_lines, refuse_other_settings
from pasta_decoding.data.rows import Row, write_rows
from pasta_decoding.errors import PastaError

MAX_TOKENS = 4096
"""A longer response stays plain."""


def run_job(
    rows: Sequence[Row],
    annotate: Annotate,
    count_tokens: Callable[[str], int],
    out: Path,
    settings: Mapping[str, Any],
    *,
    tick: Callable[[], None] = lambda: None,
) -> list[Annotated]:
    """Annotate the rows that are not in the journal yet, write OUT, and return all in order.

    settings: what the outcome depends on, as JSON holds it. Raises PastaError if the journal was
    written with others. `tick` hears of every row, those of an earlier run included.
    """
    if not out.parent.is_dir():  # before anything is paid for
        raise PastaError(f"cannot write {out}: No such file or directory")
    journal = journal_path(out)
    done = _read_journal(journal, settings, {row.id: row for row in rows})
    for _ in done:
        tick()
    missing = [row for row in rows if row.id not in done]
    for one in _screened(missing, annotate, count_tokens):
        line = {"id": one.row.id, "response": one.row.response}
        append_line(journal, line | {"rejected": one.rejected, "cost": dict(one.cost)})
        done[one.row.id] = one
        tick()
    in_order = [done[row.id] for row in rows]
    write_rows(out, [annotated.row for annotated in in_order])
    journal.unlink()
    return in_order


def _screened(
    rows: Iterable[Row], annotate: Annotate, count_tokens: Callable[[str], int]
) -> Iterator[Annotated]:
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


def journal_path(out: Path) -> Path:
    """Return where the finished rows of a job are until all are."""
    return out.with_name(f"{out.name}.partial")


def _read_journal(
    path: Path, settings: Mapping[str, Any], rows: Mapping[str, Row]
) -> dict[str, Annotated]:
    """Return the finished results by id, those of `rows` only; begin the journal if there is none.

    Raises PastaError if it was written with other settings, or is none.
    """
    hint = f"Remove it to start again: rm {path}"
    lines = read_lines(path, resume=True, hint=hint)
    if not lines:
        append_line(path, {"settings": dict(settings)})
        return {}
    try:
        refuse_other_settings(path, dict(lines[0]["settings"]), settings, hint=hint)
        return {
            one["id"]: Annotated(
                replace(rows[one["id"]], response=one["response"]), one["rejected"], one["cost"]
            )
            for one in lines[1:]
            if one["id"] in rows
        }
    except (KeyError, TypeError, ValueError) as error:
        raise PastaError(f"{path} is not a journal of annotations: {error!r}", hint=hint) from error
