"""The command `chat`: several turns, each answered in parallel."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.cli.console import say
from pasta_decoding.cli.options import System, Without, command
from pasta_decoding.cli.run import answer_shown, opened, opening
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.api.model import Model

HELP = """/new    forget what was said
/show   draw the threads while they write, or stop drawing them
/quit   leave, as Ctrl-D does
Ctrl-C stops an answer; that turn is forgotten."""

History = list[dict[str, str]]

FEW_OF_ANSWER = Without({"top_p", "eagerness", "seed"})
FEW_OF_ENGINE = Without({"join", "max_model_len", "cache_tokens", "threads", "device"})


@command('pasta chat --system "Answer in two sentences."', "pasta chat --engine torch")
def chat(
    system: System = None,
    *,
    generation: Annotated[GenerationConfig, FEW_OF_ANSWER],
    engine: Annotated[EngineConfig, FEW_OF_ENGINE],
) -> None:
    """Talk with the model; each answer sees what was said before it."""
    with opened(engine) as model:
        talk(model, generation, system)


def talk(model: Model, config: GenerationConfig, system: str | None) -> None:
    """Take lines until there are no more, and answer each."""
    history, show = opening(system), False
    say("Ctrl-C stops an answer, Ctrl-D leaves, /help names the commands.")
    while (line := read_line()) not in (None, "/quit"):
        match line:
            case "/new":
                history = opening(system)
            case "/show":
                show = not show
            case str() if line.startswith("/"):
                say(HELP)
            case str() if line:
                history = turn(model, config, history, line, show=show)


def turn(
    model: Model, config: GenerationConfig, history: History, line: str, *, show: bool
) -> History:
    """Answer a line; return the conversation with both, or as it was if there is no answer."""
    asked = [*history, {"role": "user", "content": line}]
    try:
        text = answer_shown(model, asked, config, show=show).result.text
    except KeyboardInterrupt:
        say("\nstopped; that turn is forgotten")
        return history
    except PastaError as error:
        say(f"pasta: {error}; /new begins anew")
        return history
    return [*asked, {"role": "assistant", "content": text}]


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
