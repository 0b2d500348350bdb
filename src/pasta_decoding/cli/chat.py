"""The command `chat`: several turns, each answered in parallel."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated

import typer

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.cli.console import say, with_default
from pasta_decoding.cli.options import System, command
from pasta_decoding.cli.run import FEW_OF_ANSWER, FEW_OF_ENGINE, answer_shown, opened, opening
from pasta_decoding.errors import PastaError

HELP = """/new    forget what was said
/show   draw the threads while they write, or stop drawing them
/quit   leave, as Ctrl-D does
Ctrl-C stops an answer; that turn is forgotten."""


@command('pasta chat --system "Answer in two sentences."', "pasta chat --engine torch")
def chat(
    system: System = None,
    *,
    generation: Annotated[GenerationConfig, FEW_OF_ANSWER],
    engine: Annotated[EngineConfig, FEW_OF_ENGINE],
) -> None:
    """Talk with the model; each answer sees what was said before it."""
    history, show = opening(system), False
    with opened(with_default(engine)) as model:
        say("Ctrl-C stops an answer, Ctrl-D leaves, /help names the commands.")
        while (line := read_line()) not in (None, "/quit"):
            if line == "/new":
                history = opening(system)
            elif line == "/show":
                show = not show
            elif line and line.startswith("/"):
                say(HELP)
            elif line:
                asked = [*history, {"role": "user", "content": line}]
                try:
                    text = answer_shown(model, asked, generation, show=show).result.text
                    history = [*asked, {"role": "assistant", "content": text}]
                except KeyboardInterrupt:
                    say("\nstopped; that turn is forgotten")
                except PastaError as error:
                    say(f"pasta: {error}; /new begins anew")


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
