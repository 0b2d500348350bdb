"""A file of plain rows through an annotator: nothing finished is ever lost or done twice.

Finished rows are kept as lines of `OUT.partial`, behind a header that holds the settings. A job
with the same settings goes on there; in the end OUT is written in the order of the input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from pasta_decoding.data.annotate.base import Annotate, Annotated, reject
from pasta_decoding.data.lines import append_line, parse_lines, refuse_other_settings
from pasta_decoding.data.rows import Row, write_rows
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.measures import geometric_mean, ideal_speedup
from pasta_decoding.lang.tree import has_chunk, read

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
    for annotated in _screened(missing, annotate, count_tokens):
        row = annotated.row
        line = {"id": row.id, "response": row.response, "rejected": annotated.rejected}
        append_line(journal, line | {"cost": dict(annotated.cost)})
        done[row.id] = annotated
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
    begun = False

    def parse(line: dict[str, Any]) -> Annotated | None:
        nonlocal begun
        if not begun:
            refuse_other_settings(path, dict(line["settings"]), settings, hint=hint)
            begun = True
            return None
        if (row := rows.get(line["id"])) is None:
            return None
        return Annotated(replace(row, response=line["response"]), line["rejected"], line["cost"])

    found = parse_lines(path, parse, what="a line of an annotation", hint=hint, resume=True)
    if not begun:
        append_line(path, {"settings": dict(settings)})
    return {one.row.id: one for one in found if one is not None}


def report(done: Sequence[Annotated], count_tokens: Callable[[str], int]) -> dict[str, Any]:
    """Return the figures of a job: what became of the rows, why not, and at what cost.

    The ideal speedups are geometric means: over all rows, and over the `promised` ones.
    """
    trees = [read(one.row.response) for one in done]
    speedups = [ideal_speedup(tree, count_tokens) for tree in trees]
    promised = [has_chunk(tree) for tree in trees]
    cost: Counter[str] = Counter()
    for one in done:
        cost.update(one.cost)
    return {
        "rows": len(done),
        "promised": sum(promised),
        "rejected": dict(Counter(one.rejected for one in done if one.rejected).most_common()),
        "cost": dict(cost),
        "ideal_speedup": geometric_mean(speedups),
        "ideal_speedup_promised": geometric_mean(compress(speedups, promised)),
    }
