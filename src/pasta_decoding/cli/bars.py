"""Progress bars on standard error, which move with each piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

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
