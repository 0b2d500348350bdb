"""Parallel decoding that a language model plans itself.

    import pasta_decoding as pasta

    model = pasta.load("balanced")
    answer = model.answer("What are three good ways to learn a new language?")
    print(answer.text, answer.tokens_per_step)

The names below are the stable ones; docs/python.md explains them. They are imported when they are
first used, so that importing the package takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pasta_decoding.answer.events import Closed as Closed
    from pasta_decoding.answer.events import Delta as Delta
    from pasta_decoding.answer.events import Event as Event
    from pasta_decoding.answer.events import Finished as Finished
    from pasta_decoding.answer.events import Opened as Opened
    from pasta_decoding.answer.events import Synced as Synced
    from pasta_decoding.answer.events import Trimmed as Trimmed
    from pasta_decoding.api.hf_generate import generate as generate
    from pasta_decoding.api.model import Model as Model
    from pasta_decoding.api.opening import load as load
    from pasta_decoding.api.streams import Result as Result
    from pasta_decoding.api.streams import Stream as Stream
    from pasta_decoding.api.streams import Thread as Thread
    from pasta_decoding.api.streams import Usage as Usage
    from pasta_decoding.errors import PastaError as PastaError
    from pasta_decoding.lang.tree import Chunk as Chunk
    from pasta_decoding.lang.tree import Span as Span
    from pasta_decoding.lang.tree import Sync as Sync

__version__ = "0.2.0"

_NAMES = {
    "api.hf_generate": ("generate",),
    "api.model": ("Model",),
    "api.opening": ("load",),
    "api.streams": ("Result", "Stream", "Thread", "Usage"),
    "errors": ("PastaError",),
    "lang.tree": ("Chunk", "Span", "Sync"),
    "answer.events": ("Closed", "Delta", "Event", "Finished", "Opened", "Synced", "Trimmed"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, those not imported yet included."""
    return sorted(__all__)
