"""The command `chat`: several turns, each answered in parallel."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.cli.console import say
from pasta_decoding.cli.options import Without, command
from pasta_decoding.cli.run import Show, System, answer_shown, opened
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.api.model import Model

HELP = """/new    forget what was said
/show   draw the threads while they write, or stop drawing them
/quit   leave, as Ctrl-D does
Ctrl-C stops an answer; that turn is forgotten."""


_RARE = Without({"top_p", "top_k", "repetition_penalty", "max_seconds", "eagerness"})
_FEW = Without({"join", "max_model_len", "cache_tokens", "threads", "device"})


@command('pasta chat --system "Answer in two sentences."', "pasta chat --show --engine torch")
def chat(
    system: System = None,
    show: Show = False,
    *,
    generation: Annotated[GenerationConfig, _RARE],
    engine: Annotated[EngineConfig, _FEW],
) -> None:
    """Talk with the model; each answer sees what was said before it."""
    with opened(engine) as model:
        Chat(model, generation, system=system, show=show).run()


class Chat:
    """One conversation at a terminal, or over a pipe: a line a turn.

    history: what the model is shown of it: roles and clean texts, no tags.
    """

    def __init__(
        self, model: Model, config: GenerationConfig, *, system: str | None, show: bool
    ) -> None:
        self._model, self._config, self._show = model, config, show
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.history = list(self._opening)

    def run(self) -> None:
        """Take lines until there are no more."""
        say("Ctrl-C stops an answer, Ctrl-D leaves, /help names the commands.")
        while (line := read_line()) not in (None, "/quit"):
            assert line is not None, "the loop ends there"
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._turn(line)

    def _command(self, line: str) -> None:
        if line == "/new":
            self.history = list(self._opening)
        elif line == "/show":
            self._show = not self._show
        else:
            say(HELP)

    def _turn(self, line: str) -> None:
        """Answer a line. What cannot be answered, or is stopped, leaves no trace in the history."""
        asked = [*self.history, {"role": "user", "content": line}]
        try:
            result, _ = answer_shown(self._model, asked, self._config, show=self._show)
        except KeyboardInterrupt:
            say("\nstopped; that turn is forgotten")
        except PastaError as error:
            say(f"pasta: {error}; /new begins anew")
        else:
            self.history = [*asked, {"role": "assistant", "content": result.text}]


def read_line() -> str | None:
    """Return the next line without the space around it; None at the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401 (`input` takes its editing and history from it)
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt).strip()
        except EOFError:
            if prompt:
                typer.echo()
            return None
        except KeyboardInterrupt:
            typer.echo()
        except UnicodeDecodeError as error:
            say(f"pasta: that line is not UTF-8 (byte {error.start})")
