"""What one sees of a training run, and who else is told."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.cli.console import say
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.training.progress import Progress, Show

LINE_EVERY_S = 60.0


class Tracker(StrEnum):
    """Who is told the losses of a run while it goes."""

    none = "none"
    tensorboard = "tensorboard"
    wandb = "wandb"


ReportTo = Annotated[
    list[Tracker] | None,
    typer.Option(help="Log to this tracker, too; may be repeated. Nothing leaves without it."),
]


def trackers(report_to: list[Tracker] | None) -> list[str]:
    """Return the trackers to log to; refuse one that is not installed."""
    wanted = [one.value for one in report_to or [] if one is not Tracker.none]
    for name in wanted:
        if find_spec(name) is None:
            raise PastaError(f"{name} is not installed", hint=f"pip install {name}")
    return wanted


@contextmanager
def goes_on() -> Iterator[None]:
    """Say of an interruption that the same command goes on."""
    from pasta_decoding.training.progress import GOES_ON

    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(GOES_ON) from None


def drawn_progress(doing: str) -> AbstractContextManager[Show]:
    """Return what draws a run: a bar on a terminal, else a line a minute."""
    return _bar(doing) if sys.stderr.isatty() else _lines(doing)


@contextmanager
def _bar(doing: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}")
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(doing, total=None, said="")
        yield lambda at: bars.update(
            task, total=at.all_tokens, completed=at.tokens, said=standing(at)
        )


@contextmanager
def _lines(doing: str) -> Iterator[Show]:
    told_s = time.monotonic()

    def show(at: Progress) -> None:
        nonlocal told_s
        last = at.step == at.steps and at.tokens == at.all_tokens
        if last or time.monotonic() - told_s >= LINE_EVERY_S:
            told_s = time.monotonic()
            say(f"{doing}: {standing(at)}")

    yield show


def standing(at: Progress) -> str:
    """Return where a run stands: steps, losses, pace, and the time that is left."""
    parts = [f"step {at.step}/{at.steps}"]
    if at.loss is not None:
        parts.append(f"loss {at.loss:.3f}")
    if at.held_out is not None:
        parts.append(f"held out {at.held_out:.3f}")
    if at.left_s is not None:
        left = timedelta(seconds=round(at.left_s))
        parts += [f"{at.tokens_per_s:.0f} tokens/s", f"{left} left"]
    return ", ".join(parts)
