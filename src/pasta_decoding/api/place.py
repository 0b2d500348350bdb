"""Where files are kept, and who is told how it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Tell = Callable[[str], None]
"""Is told, in a line each, what takes time and what is worse than it could be."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where files are kept, and who is told how it goes."""

    cache: Path
    tell: Tell
