"""Helpers of several commands: the user's cache, lines and bars on standard error, lanes."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from pasta_decoding.answer.events import Closed, Delta, Event, Finished, Opened, Synced
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.models.bases import default_cache
from pasta_decoding.models.catalog import find_base
from pasta_decoding.models.pretrained import load_tokenizer

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")

say = logging.getLogger("pasta_decoding.cli").info
"""Prints a line for the user, on standard error."""
bar = partial(tqdm, leave=False, disable=None)


def cache_folder() -> Path:
    return default_cache(os.environ)


def token_counter(model: Path | None = None) -> Callable[[str], int]:
    """Return a function that counts tokens with the tokenizer of `model`.

    None takes the default base model.
    """
    tokenizer = load_tokenizer(find_base(model, cache_folder()))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


class Lanes:
    """The threads of one answer as rich draws them: topic, state, and the end of the text."""

    def __init__(self) -> None:
        self._titles = {MAIN: "main"}
        self._states: dict[int, str] = {}
        self._texts: defaultdict[int, str] = defaultdict(str)

    def feed(self, event: Event) -> None:
        """Take the next event of the answer."""
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
        """Draw a line for each thread; of too many, only the main thread and the newest chunks."""
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
