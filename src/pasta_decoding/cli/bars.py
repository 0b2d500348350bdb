"""Progress bars on standard error, which move with each piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Item = TypeVar("Item")


def counting() -> Progress:
    """Return a bar that says how many are done, of how many, and how long the rest will take."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True)
    return Progress(*columns, *times, console=Console(stderr=True), transient=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar, and hand out what moves it."""
    with counting() as bars:
        task = bars.add_task(what, total=total)
        yield lambda: bars.advance(task)


def drawn(items: Iterable[Item], doing: str, total: int | None = None) -> Iterable[Item]:
    """Yield the items, and draw on standard error how far they are."""
    from rich.console import Console
    from rich.progress import track

    return track(items, doing, total=total, console=Console(stderr=True), transient=True)


class RowsBar:
    """A bar over rows some of which are worked on together: it moves within them, too.

    Show it as a context. `completed` never falls: what was done within rows is a part of theirs.
    """

    def __init__(self, what: str, rows: int) -> None:
        self._what, self._rows = what, rows
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._whole = 0
        self._within = 0.0

    @property
    def completed(self) -> float:
        """Rows that are done, and the share that is of others."""
        return min(self._whole + self._within, self._rows)

    def __enter__(self) -> RowsBar:
        self._bars = counting().__enter__()
        self._task = self._bars.add_task(self._what, total=self._rows)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def row(self) -> None:
        """A row is done; some of it may have been noted before."""
        self._whole += 1
        self._within = max(0.0, self._within - 1)
        self._draw()

    def part(self, share: float) -> None:
        """Work on a row that is not done has come on by this share of it, altogether below 1."""
        self._within += share
        self._draw()

    def _draw(self) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=self.completed)
