"""The threads of one answer, drawn as lanes in the terminal while they write."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.events import Closed, Delta, Event, Finished, Opened, Synced

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


@dataclass
class _Lane:
    title: str
    state: str = "writing"
    text: list[str] = field(default_factory=list)


class Lanes:
    """A rich renderable: one row a thread, with its topic, its state and the end of its text."""

    def __init__(self) -> None:
        self._lanes = {MAIN: _Lane("main")}

    def feed(self, event: Event) -> None:
        """Take one live event."""
        match event:
            case Opened(thread, topic, tokens):
                self._lanes[thread] = _Lane(f"{topic or 'chunk'} ~{tokens}")
            case Delta(thread, text):
                self._lanes[thread].text.append(text)
            case Closed(thread, truncated):
                self._lanes[thread].state = "cut off" if truncated else "done"
            case Synced(threads):
                for thread in threads:
                    self._lanes[thread].state = "joined"
            case Finished(truncated):
                self._lanes[MAIN].state = "cut off" if truncated else "done"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw what fits: the newest chunks when there are more lanes than lines."""
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, max_width=28)
        table.add_column(no_wrap=True, width=8)
        table.add_column(no_wrap=True)
        room = max(20, options.max_width - 42)
        chunks = [thread for thread in self._lanes if thread != MAIN]
        for thread in [MAIN, *chunks[-max(1, console.height - 3) :]]:
            lane = self._lanes[thread]
            style = "bold" if thread == MAIN else COLOURS[thread % len(COLOURS)]
            tail = "".join(lane.text).replace("\n", " ")[-room:]
            table.add_row(Text(lane.title, style), Text(lane.state, "dim"), Text(tail))
        yield table
