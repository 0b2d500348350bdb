"""The command `pasta`: read flags, call one function, print.

Exit status: 0 fine, 1 problems found, 2 could not run, 130 interrupted. Only the command on the
command line is imported, so `pasta --help` is fast.
"""

import io
import logging
import os
import re
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
    # A terminal's encoding may lack characters of an answer.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    log = logging.getLogger("pasta_decoding")
    log.addHandler(logging.StreamHandler())
    # `accelerate launch` numbers its processes; only the first one prints.
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.CRITICAL)
    try:
        return _invoke(sys.argv[1:] if arguments is None else arguments)
    except PastaError as error:
        return _fail(f"{error}\n{error.hint}".strip())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except OSError as error:  # a full disk, a folder without write permission
        location = f"{error.filename}: " if error.filename else ""
        return _fail(f"{location}{error.strerror or error}")
    except KeyboardInterrupt:
        print("\npasta: interrupted", file=sys.stderr)
        return 130
    finally:
        log.handlers.clear()


def _fail(reason: str) -> int:
    """Print the reason and return exit status 2.

    If every process of a launch fails, only the main one prints.
    """
    if os.environ.get("RANK", "0") != "0":
        # The launcher ends this process when the main one fails. It prints only if that did not
        # happen in 10 seconds.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
        time.sleep(10)
    print(f"pasta: {reason}", file=sys.stderr)
    return 2


def _invoke(arguments: Sequence[str]) -> int:
    """Parse the command line and run its command. Raises PastaError for a wrong command line."""
    # Newer versions of typer use a copy of click; this is the class of the one in use.
    usage_error: Any = typer.BadParameter.__base__
    command = get_command(make_app(arguments))
    words = list(arguments)
    if " ".join(words) in ("", *GROUPS):  # no command is named
        words.append("--help")
    try:
        with command.make_context("pasta", words) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except usage_error as error:
        command_path = error.ctx.command_path if error.ctx else "pasta"
        message = " ".join(error.format_message().split()).rstrip(".")
        texts = [word for word in words if re.match("--?([^a-zA-Z-]|[^=]* )", word)]
        hint = (
            f"Text that begins with - follows --: {command_path} -- {texts[0]!r}" if texts else ""
        )
        raise PastaError(f"{message}; see {command_path} --help", hint=hint) from error
    return 0


def make_app(arguments: Sequence[str] | None = None) -> typer.Typer:
    """Return the program. It imports the command that `arguments` name, or all for None."""
    settings: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}
    description = "Learned asynchronous decoding: one answer, written by several threads at once."
    app = typer.Typer(help=description, **settings)
    app.callback()(_common)
    groups = {"": app}
    for group, group_help in GROUPS.items():
        groups[group] = typer.Typer(help=group_help, **settings)
        app.add_typer(groups[group], name=group)
    selected = None if arguments is None else _command_name(arguments)
    for full_name, (path, command_help) in COMMANDS.items():
        group, _, name = full_name.rpartition(" ")
        if selected is None or selected == full_name:
            module, _, function_name = path.partition(":")
            function = getattr(import_module(f"pasta_decoding.cli.{module}"), function_name)
            groups[group].command(name, epilog=getattr(function, "epilog", None))(function)
        else:
            groups[group].command(name, help=command_help)(_not_imported)
    return app


def _command_name(arguments: Sequence[str]) -> str:
    """Return the first words that are no options: a command, or a group and its command."""
    words = [word for word in arguments if not word.startswith("-")]
    has_group = bool(words) and words[0] in GROUPS
    return " ".join(words[:2] if has_group else words[:1])


def _not_imported() -> None:
    """Stand in for a command that is listed in the help but does not run."""


def _print_version(is_set: bool) -> None:
    if is_set:
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
    # Libraries use deprecated names of each other, which a user cannot change. When peft 0.21 does
    # so, the warning comes from transformers 5.23.
    for library in ("accelerate", "peft", "torch", "transformers"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{library}(\.|$)")


def run() -> None:
    """Run the console script `pasta`.

    One of several processes ends without the interpreter's shutdown. Gloo's threads may still hold
    tensors then, and the process would abort (pytorch/pytorch#179291). The launcher would kill the
    other processes and report a failure.
    """
    status = main()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
