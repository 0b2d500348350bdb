"""What commands share: the user's environment, lines and bars on standard error, and lanes."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.events import Closed, Delta, Event, Finished, Opened, Synced

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from pasta_decoding.api.config import EngineConfig
    from pasta_decoding.api.model import AnyDecoder

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")

say = logging.getLogger("pasta_decoding.cli").info
"""Reports to the user, on standard error."""


def cache_folder() -> Path:
    """Return the user's cache; $PASTA_CACHE moves it."""
    from pasta_decoding.models.bases import default_cache

    return default_cache(os.environ)


def with_default(engine: EngineConfig) -> EngineConfig:
    """Return the config with this machine's default adapter, where nothing else is asked for."""
    from pasta_decoding.api.checkpoints import default_adapter

    named = (engine.adapter or engine.model or engine.device) is not None
    if named or engine.engine not in ("auto", "fast"):
        return engine
    return replace(engine, adapter=default_adapter(cache_folder(), os.environ))


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


def bar(doing: str, items: Iterable[Any] | None = None, total: int | None = None) -> Any:
    """Return a bar on standard error that goes on with the items, or by `update`."""
    from tqdm import tqdm

    return tqdm(items, doing, total, leave=False, disable=None)  # None: without a terminal


class Lanes:
    """The threads of one answer as rich draws them: topic, state, and the end of the text."""

    def __init__(self) -> None:
        self._titles = {MAIN: "main"}
        self._states: dict[int, str] = {}
        self._texts: defaultdict[int, str] = defaultdict(str)

    def feed(self, event: Event) -> None:
        """Take one live event."""
        match event:
            case Opened(thread, topic, tokens):
                self._titles[thread] = f"{topic or 'chunk'} ~{tokens}"
            case Delta(thread, text):
                self._texts[thread] += text
            case Closed(thread, truncated):
                self._states[thread] = "cut off" if truncated else "done"
            case Synced(threads):
                self._states |= dict.fromkeys(threads, "joined")
            case Finished(truncated):
                self._states[MAIN] = "cut off" if truncated else "done"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw what fits: the newest chunks when there are more lanes than lines."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, max_width=28)
        table.add_column(no_wrap=True, width=8)
        table.add_column(no_wrap=True)
        room = max(20, options.max_width - 42)
        chunks = [thread for thread in self._titles if thread != MAIN]
        for thread in [MAIN, *chunks[-max(1, console.height - 3) :]]:
            style = "bold" if thread == MAIN else COLOURS[thread % len(COLOURS)]
            state = Text(self._states.get(thread, "writing"), "dim")
            tail = self._texts[thread].replace("\n", " ")[-room:]
            table.add_row(Text(self._titles[thread], style), state, Text(tail))
        yield table
