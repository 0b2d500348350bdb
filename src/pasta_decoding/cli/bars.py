"""Progress bars on standard error, which move with each piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def progress(labels: Sequence[str], total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar a label, with the time that is left; hand out what moves one bar by one."""
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
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bars:
        tasks = {label: bars.add_task(label, total=total) for label in labels}
        yield lambda label: bars.advance(tasks[label])


def drawn(items: Sequence[Item], doing: str) -> Iterable[Item]:
    """Yield the items, and draw on standard error how far they are."""
    from rich.console import Console
    from rich.progress import track

    return track(items, doing, console=Console(stderr=True), transient=True)
