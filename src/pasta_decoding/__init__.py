"""Parallel decoding that a language model plans itself.

    import pasta_decoding as pasta

    model = pasta.load("balanced")
    answer = model.answer("What are three good ways to learn a new language?")
    print(answer.text, answer.tokens_per_step)

The names below are the stable ones; docs/python.md explains them. They are imported when they are
first used, so that importing the package takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pasta_decoding.api.hf_generate import generate
    from pasta_decoding.api.model import Model
    from pasta_decoding.api.opening import load
    from pasta_decoding.api.streams import Result, Stream, Thread, Usage
    from pasta_decoding.errors import PastaError
    from pasta_decoding.lang.tree import Chunk, Span, Sync
    from pasta_decoding.runtime.events import (
        Closed,
        Delta,
        Event,
        Finished,
        Opened,
        Synced,
        Trimmed,
    )

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "Closed",
    "Delta",
    "Event",
    "Finished",
    "Model",
    "Opened",
    "PastaError",
    "Result",
    "Span",
    "Stream",
    "Sync",
    "Synced",
    "Thread",
    "Trimmed",
    "Usage",
    "__version__",
    "generate",
    "load",
]

_HOMES = {
    "pasta_decoding.api.hf_generate": ("generate",),
    "pasta_decoding.api.opening": ("load",),
    "pasta_decoding.api.model": ("Model",),
    "pasta_decoding.api.streams": ("Result", "Stream", "Thread", "Usage"),
    "pasta_decoding.errors": ("PastaError",),
    "pasta_decoding.lang.tree": ("Chunk", "Span", "Sync"),
    "pasta_decoding.runtime.events": (
        "Closed",
        "Delta",
        "Event",
        "Finished",
        "Opened",
        "Synced",
        "Trimmed",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives."""
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, those not imported yet included."""
    return sorted(__all__)
