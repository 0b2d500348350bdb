"""How `pasta eval generate` runs its methods; nothing here needs numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option


@dataclass(frozen=True, slots=True)
class Plan:
    """How all methods are run.

    max_concurrency: prompts that a method answers together.
    repeats:     turns of every prompt and method where they are timed; None: they are not.
    max_seconds: one that takes longer counts as this long.
    """

    max_concurrency: int = 16
    repeats: Annotated[
        int | None, Option(min=1, help="Turns with --timing, 3 if left out; medians count.")
    ] = None
    max_seconds: Annotated[float, Option(min=1, help="An answer that takes longer has failed.")] = (
        600.0
    )
    seed: Annotated[int, Option(min=0, help="Draws tokens, and the order that --timing takes.")] = 0
    retry_failed: Annotated[
        bool, Option("--retry-failed", help="Ask again where a request failed before.")
    ] = False
