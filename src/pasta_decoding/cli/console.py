"""What commands share: the user's environment, and lines for the user on standard error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pasta_decoding.api.config import EngineConfig
    from pasta_decoding.api.model import AnyDecoder

Item = TypeVar("Item")

say = logging.getLogger("pasta_decoding.cli").info
"""Reports to the user, on standard error."""


def cache_folder() -> Path:
    """Return the user's cache; $PASTA_CACHE moves it."""
    from pasta_decoding.models.bases import default_cache

    return default_cache(os.environ)


def base_folder(model: Path | None) -> Path:
    """Return the folder of the base model of --model: a folder, a name on the hub, or left out."""
    from pasta_decoding.models.pull import model_folder

    return model_folder(model, cache_folder())


def opened_decoder(engine: EngineConfig) -> AnyDecoder:
    """Open a checkpoint with the user's cache, and with $PASTA_REMOTE_KEY as the servers' key."""
    from pasta_decoding.api.opening import open_decoder

    key = os.environ.get("PASTA_REMOTE_KEY")
    return open_decoder(replace(engine, api_key=key), cache_folder())


def is_main() -> bool:
    """Is this the process that speaks? `accelerate launch` starts several, and numbers them."""
    return os.environ.get("RANK", "0") == "0"


def token_counter(model: Path | None = None) -> Callable[[str], int]:
    """Return a function that counts tokens as a base model does; the default one if left out."""
    from pasta_decoding.models.load import load_tokenizer
    from pasta_decoding.models.pull import model_folder

    tokenizer = load_tokenizer(model_folder(model, cache_folder(), gguf=True))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


@contextmanager
def progress(labels: Sequence[str], total: int) -> Iterator[Callable[[str], None]]:
    """Draw a bar a label on standard error; hand out what moves one bar by one."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        tasks = {label: bars.add_task(label, total=total) for label in labels}
        yield lambda label: bars.advance(tasks[label])


def drawn(items: Sequence[Item], doing: str) -> Iterable[Item]:
    """Yield the items, and draw on standard error how far they are."""
    with progress([doing], len(items)) as tick:
        for item in items:
            yield item
            tick(doing)
