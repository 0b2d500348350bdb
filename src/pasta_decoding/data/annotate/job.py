"""A file of plain rows through an annotator: nothing finished is ever lost or done twice.

Finished rows are kept as lines of `OUT.partial`, behind a header that holds the settings. A job
with the same settings goes on there; in the end OUT is written in the order of the input.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

from pasta_decoding.data.annotate.base import Annotated, Annotator, reject
from pasta_decoding.data.dataset import Row, write_rows
from pasta_decoding.data.lines import differing
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
    journal = Journal(journal_path(out), settings)
    done = journal.read({row.id: row for row in rows})
    for known in done.values():
        tick(known)
    with journal:
        for annotated in annotator.annotate([row for row in rows if row.id not in done]):
            journal.write(annotated)
            done[annotated.row.id] = annotated
            tick(annotated)
    in_order = [done[row.id] for row in rows]
    write_rows(out, [annotated.row for annotated in in_order])
    journal.path.unlink()
    return in_order


def journal_path(out: Path) -> Path:
    """Return where the finished rows of a job are until all are."""
    return out.with_name(f"{out.name}.partial")


class Journal:
    """The finished rows of a job on disk, one JSON line each behind the settings' line."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self._settings = dict(settings)
        self._whole_bytes = 0

    def read(self, rows: Mapping[str, Row]) -> dict[str, Annotated]:
        """Return the results by id, those of `rows` only; {} if there is no journal yet.

        A line that a kill left unfinished is not one, and is overwritten later.
        """
        if not self.path.exists():
            return {}
        contents = self.path.read_bytes()
        whole = contents[: contents.rfind(b"\n") + 1]
        self._whole_bytes = len(whole)
        header, *lines = whole.splitlines() or [b""]
        if header:
            self._compare(header)
        found = (self._entry(line, number, rows) for number, line in enumerate(lines, start=2))
        return {one.row.id: one for one in found if one is not None}

    def __enter__(self) -> Journal:
        """Open it for writing behind what was read; a new one begins with the settings."""
        self._file = self.path.open("ab")
        self._file.truncate(self._whole_bytes)
        if not self._whole_bytes:
            self._line({"settings": self._settings})
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.close()

    def write(self, done: Annotated) -> None:
        """Keep one result; when this returns, a kill cannot lose it any more."""
        self._line(
            {
                "id": done.row.id,
                "response": done.row.response,
                "rejected": done.rejected,
                "cost": dict(done.cost),
            }
        )

    def _line(self, found: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(found).encode() + b"\n")
        self._file.flush()

    def _compare(self, header: bytes) -> None:
        try:
            before = dict(json.loads(header)["settings"])
        except (ValueError, TypeError, LookupError) as error:
            raise self._broken(1, error) from error
        now = json.loads(json.dumps(self._settings))
        if keys := differing(before, now):
            changes = ", ".join(f"{key} ({before.get(key)} -> {now.get(key)})" for key in keys)
            raise PastaError(
                f"{self.path} was begun with other settings: {changes}",
                hint="Give the settings it was begun with, or remove the file to start again.",
            )

    def _entry(self, line: bytes, number: int, rows: Mapping[str, Row]) -> Annotated | None:
        try:
            found = json.loads(line)
            row = rows.get(found["id"])
            if row is None:
                return None
            whole = replace(row, response=found["response"])
            return Annotated(whole, found["rejected"], found["cost"])
        except (ValueError, TypeError, LookupError) as error:
            raise self._broken(number, error) from error

    def _broken(self, number: int, error: Exception) -> PastaError:
        message = f"{self.path}:{number}: not a line of an annotation: {error}"
        return PastaError(message, hint="Remove the file to start again.")


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
