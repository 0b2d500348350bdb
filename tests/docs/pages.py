"""The pages for users, taken apart: their blocks, and the commands that a shell makes of them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from pasta_decoding.cli.app import make_app

app = make_app()
ROOT = Path(__file__).parents[2]
PROGRAMS = ("pasta", "pip", "make", "vllm", "accelerate", "python", "pytest", "open-webui")
END = "\x01"
STUB = f"""#!/bin/bash
printf '%s\\0' "$(basename "$0")" "$@" {END} >> "$CALLS"
"""
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)

Call = list[str]
"""A program's name and its arguments."""


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences. `line`: where its text begins in the page, from 1."""

    language: str
    text: str
    line: int


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str | None = None) -> list[Block]:
    """Return the page's blocks in order, of one language if it is given."""
    text = text_of(page)
    found = [
        Block(one[1], one[2], text.count("\n", 0, one.start(2)) + 1)
        for one in _FENCE.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def spans(page: str) -> list[str]:
    """Return what stands in backticks in the page's prose and tables."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", text_of(page)))


def calls(page: str, folder: Path) -> list[Call]:
    """Return what the page's shell blocks call, in order; the programs themselves do not run.

    bash takes the blocks as one script, with all variables and loops in them, in `folder`.
    """
    _install_stubs(folder)
    script = "\n".join(["set -eu", *(block.text for block in blocks(page, "sh")), "wait"])
    log = folder / "calls"
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(log)}
    subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=True)
    return [call.strip("\0").split("\0") for call in log.read_text().split(END) if call != "\0"]


def _install_stubs(folder: Path) -> None:
    """Put programs into `folder` that only write down how they were called."""
    other = folder / ".venv-vllm" / "bin"
    other.mkdir(parents=True)
    for path in [*(folder / name for name in PROGRAMS), other / "python"]:
        path.write_text(STUB)
        path.chmod(0o755)


def pasta_arguments(found: list[Call]) -> Iterator[list[str]]:
    """Yield the arguments of each call of pasta, whoever starts it."""
    for program, *arguments in found:
        if program == "accelerate":
            yield arguments[arguments.index("pasta_decoding") + 1 :]
        if program == "pasta":
            yield arguments


def leaves(command: Any = None, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return every command that does something, by its words, such as `("train", "sft")`."""
    command = get_command(app) if command is None else command
    if not hasattr(command, "commands"):
        return {words: command}
    below = (leaves(one, (*words, name)) for name, one in command.commands.items())
    return {name: leaf for found in below for name, leaf in found.items()}


def options() -> set[str]:
    """Return every option of every command, as it is typed."""
    parameters = [one for leaf in leaves().values() for one in leaf.params]
    return {name for one in parameters for name in (*one.opts, *one.secondary_opts)}


def parse(arguments: list[str]) -> None:
    """Parse a command line as `pasta` does, and do nothing. Raises what it raises.

    One that ends in `...` need not be whole.
    """
    command = get_command(app)
    for leaf in leaves(command).values():
        leaf.callback = lambda **_values: None
    told = [one for one in arguments if one != "..."]
    try:
        with command.make_context("pasta", told) as context:
            command.invoke(context)
    except typer.BadParameter as error:
        if told == arguments or type(error).__name__ != "MissingParameter":
            raise
