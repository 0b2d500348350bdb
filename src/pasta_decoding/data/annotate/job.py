"""A file of plain rows through an annotator: nothing finished is ever lost or done twice.

Finished rows are kept as lines of `OUT.partial`, behind a header that holds the settings. A job
with the same settings goes on there; in the end OUT is written in the order of the input.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

from pasta_decoding.data.annotate.base import Annotated, Annotator, reject
from pasta_decoding.data.dataset import Row, write_rows
from pasta_decoding.data.lines import append_line, parse_lines, refuse_other_settings
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.measures import geometric_mean, ideal_speedup
from pasta_decoding.lang.tree import has_chunk, in_text_form, read

Settings = Mapping[str, Any]
"""What the outcome depends on, as JSON holds it."""


@dataclass(frozen=True, slots=True)
class Screened:
    """Keeps from an annotator what it is not for: responses without text, and huge ones.

    max_tokens: of a response that is annotated.
    keep:       what is annotated already stays as it is.
    """

    annotator: Annotator
    count_tokens: Callable[[str], int]
    max_tokens: int
    keep: bool = False

    def annotate(self, rows: Iterable[Row]) -> Iterator[Annotated]:
        """Yield one result a row, those that are kept back first."""
        fit: list[Row] = []
        for row in rows:
            if self.keep and in_text_form(row.response):
                yield Annotated(row)
            elif not row.response.strip():
                yield reject(row, "empty response")
            elif self.count_tokens(row.response) > self.max_tokens:
                yield reject(row, f"more than {self.max_tokens} tokens")
            else:
                fit.append(row)
        yield from self.annotator.annotate(fit)


def run_job(
    rows: Sequence[Row],
    annotator: Annotator,
    out: Path,
    settings: Settings,
    *,
    tick: Callable[[Annotated], None] = lambda _done: None,
) -> list[Annotated]:
    """Annotate the rows that are not in the journal yet, write OUT, and return all in order.

    `tick` hears of every row, those of an earlier run included. Raises PastaError if the journal
    was written with other settings.
    """
    if not out.parent.is_dir():  # before anything is paid for
        raise PastaError(f"cannot write {out}: No such file or directory")
    journal = journal_path(out)
    done = read_journal(journal, settings, {row.id: row for row in rows})
    for known in done.values():
        tick(known)
    for annotated in annotator.annotate([row for row in rows if row.id not in done]):
        append_line(journal, _line(annotated))
        done[annotated.row.id] = annotated
        tick(annotated)
    in_order = [done[row.id] for row in rows]
    write_rows(out, [annotated.row for annotated in in_order])
    journal.unlink()
    return in_order


def journal_path(out: Path) -> Path:
    """Return where the finished rows of a job are until all are."""
    return out.with_name(f"{out.name}.partial")


def read_journal(path: Path, settings: Settings, rows: Mapping[str, Row]) -> dict[str, Annotated]:
    """Return the finished results by id, those of `rows` only; begin the journal if there is none.

    Raises PastaError if it was written with other settings, or is none.
    """
    hint = "Remove the file to start again."
    begun = False

    def parse(line: dict[str, Any]) -> Annotated | None:
        nonlocal begun
        if not begun:
            hint = "Give the settings it was begun with, or remove the file to start again."
            refuse_other_settings(path, dict(line["settings"]), settings, hint=hint)
            begun = True
            return None
        row = rows.get(line["id"])
        if row is None:
            return None
        return Annotated(replace(row, response=line["response"]), line["rejected"], line["cost"])

    found = parse_lines(path, parse, what="a line of an annotation", hint=hint, resume=True)
    if not begun:
        append_line(path, {"settings": dict(settings)})
    return {one.row.id: one for one in found if one is not None}


def _line(done: Annotated) -> dict[str, Any]:
    """Return what the journal keeps of a result."""
    return {
        "id": done.row.id,
        "response": done.row.response,
        "rejected": done.rejected,
        "cost": dict(done.cost),
    }


def report(done: Sequence[Annotated], count_tokens: Callable[[str], int]) -> dict[str, Any]:
    """Return the figures of a job: what became of the rows, why not, and at what cost.

    The ideal speedups are geometric means: over all rows, and over the `promised` ones.
    """
    trees = [read(one.row.response) for one in done]
    speedups = [ideal_speedup(tree, count_tokens) for tree in trees]
    promised = [has_chunk(tree) for tree in trees]
    cost: defaultdict[str, float] = defaultdict(float)
    for one in done:
        for name, amount in one.cost.items():
            cost[name] += amount
    return {
        "rows": len(done),
        "promised": sum(promised),
        "rejected": dict(Counter(one.rejected for one in done if one.rejected).most_common()),
        "cost": dict(cost),
        "ideal_speedup": geometric_mean(speedups),
        "ideal_speedup_promised": geometric_mean(compress(speedups, promised)),
    }
