"""The command `pasta`: read flags, call one function, print.

Exit status: 0 fine, 1 problems found, 2 could not run, 130 interrupted. Only the command that is
asked for is imported, so `pasta --help` costs nothing.
"""

import io
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from pasta_decoding import __version__
from pasta_decoding.errors import PastaError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("run:run", "Answer a question; threads write independent parts at the same time."),
    "chat": ("run:chat", "Chat with the model; each answer sees the conversation before it."),
    "compare": ("run:compare", "Answer in parallel and sequentially, side by side."),
    "serve": ("serve:serve", "Serve OpenAI's clients, and a page that shows the threads."),
    "models": ("models:models", "List known models, adapters and the files of the cache."),
    "pull": ("models:pull", "Download a known base model into the cache, once."),
    "export": ("models:export", "Write base model and adapter as one."),
    "lint": ("data:lint", "Report every broken annotation, as a compiler does."),
    "annotate": ("annotate:annotate", "Annotate responses with promises, chunks and syncs."),
    "data build": ("data:build", "Make a training set."),
    "data report": ("data:report", "Describe a training set."),
    "train sft": ("train:sft", "Stage 1: supervised fine-tuning on annotated responses."),
    "train preference": ("train:preference", "Stage 2: train for speed and quality."),
    "eval generate": ("eval:generate", "Answer prompts by several methods; keep records."),
    "eval report": ("eval:report", "Compare the methods on one page."),
}
"""`module:function` in this package, and the line of `pasta --help`."""

GROUPS: Mapping[str, str] = {
    "data": "Build a training set, or describe one.",
    "train": "Teach a model the language.",
    "eval": "Compare methods by speed and quality.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; no user's mistake ends in a traceback."""
    _quiet_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may not hold every character
        sys.stdout.reconfigure(errors="backslashreplace")
    log = logging.getLogger("pasta_decoding")
    log.addHandler(logging.StreamHandler())
    # Of the processes that `accelerate launch` starts and numbers, one speaks.
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.CRITICAL)
    try:
        return _invoke(sys.argv[1:] if arguments is None else arguments)
    except PastaError as error:
        return _told(f"{error}\n{error.hint}".strip())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:  # a full disk, a folder that may not be written
        where = f"{error.filename}: " if error.filename else ""
        return _told(f"{where}{error.strerror or error}")
    except KeyboardInterrupt:
        print("\npasta: interrupted", file=sys.stderr)
        return 130
    finally:
        log.handlers.clear()


def _told(reason: str) -> int:
    """Print why nothing came of it, and return 2. Of several processes the main one speaks."""
    if os.environ.get("RANK", "0") != "0":
        # The launcher ends this one as soon as the main one fails as well, and it alone may fail.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
        time.sleep(10)
    print(f"pasta: {reason}", file=sys.stderr)
    return 2


def _invoke(arguments: Sequence[str]) -> int:
    """Parse the command line and run its command. Raises PastaError for a wrong command line."""
    # By its version, typer uses click or a copy of it inside; this is the right one's class.
    usage_error: Any = typer.BadParameter.__base__
    command = get_command(make_app(arguments))
    help_asked = ["--help"] if " ".join(arguments) in ("", *GROUPS) else []
    try:
        with command.make_context("pasta", [*arguments, *help_asked]) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except usage_error as error:
        where = error.ctx.command_path if error.ctx else "pasta"
        message = " ".join(error.format_message().split()).rstrip(".")
        raise PastaError(f"{message}; see {where} --help") from error
    return 0


def make_app(arguments: Sequence[str] | None = None) -> typer.Typer:
    """Return the program, with the command that `arguments` name; with all commands for None."""
    words = [word for word in arguments or () if not word.startswith("-")]
    asked = " ".join(words[: 2 if words[:1] and words[0] in GROUPS else 1])
    settings: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}
    about = "Learned asynchronous decoding: one answer, written by several threads at once."
    app = typer.Typer(help=about, **settings)
    app.callback()(_common)
    groups = {"": app}
    for name, about in GROUPS.items():
        groups[name] = typer.Typer(help=about, **settings)
        app.add_typer(groups[name], name=name)
    for name, (place, about) in COMMANDS.items():
        group, _, own = name.rpartition(" ")
        if arguments is None or name == asked:
            module, _, function = place.partition(":")
            found = getattr(import_module(f"pasta_decoding.cli.{module}"), function)
            groups[group].command(own, epilog=getattr(found, "epilog", None))(found)
        else:
            groups[group].command(own, help=about)(_not_imported)
    return app


def _not_imported() -> None:
    """Stand in for a command that was not asked for."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pasta {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Options of `pasta` itself."""


def _quiet_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # Libraries call each other by deprecated names; a user can do nothing about it. When peft 0.21
    # does so, the warning comes from transformers 5.23.
    for library in ("accelerate", "peft", "torch", "transformers"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{library}(\.|$)")


def run() -> None:
    """The console script.

    One of several processes does not take the interpreter down. Gloo's threads may still hold
    tensors then, which aborts the process (pytorch/pytorch#179291), and the launcher kills the
    others and calls what they did a failure.
    """
    status = main()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
