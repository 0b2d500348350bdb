"""All commands of `pasta`: what they are called, and where they live.

Only the command that is asked for is imported, so `pasta --help` costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from pasta_decoding import __version__

COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("run:run", "Answer a question; independent parts are written side by side."),
    "chat": ("chat:chat", "Talk with the model; each answer sees what was said before it."),
    "compare": ("compare:compare", "Answer in parallel and sequentially, side by side."),
    "serve": ("serve:serve", "Serve OpenAI's clients, and a page that shows the threads."),
    "models": ("models:models", "List known models, adapters and what the cache holds."),
    "pull": ("models:pull", "Fetch a known base model into the cache, once."),
    "export": ("models:export", "Write base model and adapter as one."),
    "lint": ("lint:lint", "Report every broken annotation, as a compiler does."),
    "annotate": ("annotate:annotate", "Annotate responses with promises, chunks and syncs."),
    "data build": ("data:build", "Make a training set."),
    "data report": ("data:report", "Describe a training set."),
    "train sft": ("train:sft", "Stage 1: supervised fine-tuning on annotated responses."),
    "train preference": ("train:preference", "Stage 2: prefer fast and good answers."),
    "eval generate": ("eval:generate", "Answer prompts by several methods; keep records."),
    "eval report": ("eval:report", "Compare the methods on one page."),
}
"""`module:function` in this package, and the line of `pasta --help`."""

GROUPS: Mapping[str, str] = {
    "data": "Build a training set, or describe one.",
    "train": "Teach a model the language.",
    "eval": "Compare methods by speed and quality.",
}

_SETTINGS: Mapping[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
}


def make_app(arguments: Sequence[str] | None = None) -> typer.Typer:
    """Return the program, with the command that `arguments` name; with all commands for None."""
    words = [word for word in arguments or () if not word.startswith("-")]
    asked = " ".join(words[: 2 if words[:1] and words[0] in GROUPS else 1])
    app = typer.Typer(
        help="Learned asynchronous decoding: one answer, written by several threads at once.",
        **_SETTINGS,
    )
    app.callback()(common)
    groups = {"": app}
    for name, about in GROUPS.items():
        groups[name] = typer.Typer(help=about, **_SETTINGS)
        app.add_typer(groups[name], name=name)
    for name, (place, about) in COMMANDS.items():
        group, _, own = name.rpartition(" ")
        if arguments is None or name == asked:
            module, _, function = place.partition(":")
            found = getattr(import_module(f"pasta_decoding.cli.{module}"), function)
            epilog = getattr(found, "epilog", None)
            groups[group].command(own, short_help=about, epilog=epilog)(found)
        else:
            groups[group].command(own, help=about)(_not_imported)
    return app


def _not_imported() -> None:
    """Stand in for a command that was not asked for."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pasta {__version__}")
        raise typer.Exit


def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Options of `pasta` itself."""
