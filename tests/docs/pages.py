"""The pages for users, taken apart: their blocks, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from pasta_decoding.cli import make_app

app = make_app()
ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)
_PASTA = re.compile(r"^(?:accelerate launch .* -m pasta_decoding|pasta) (.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences. `line`: where its text begins in the page, from 1."""

    language: str
    text: str
    line: int


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str | None = None) -> list[Block]:
    text = text_of(page)
    fences = _FENCE.finditer(text)
    found = [Block(one[1], one[2], text.count("\n", 0, one.start(2)) + 1) for one in fences]
    return [block for block in found if language in (None, block.language)]


def spans(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", text_of(page)))


def commands(page: str) -> Iterator[list[str]]:
    """Yield the arguments of each line that calls pasta in the page's shell blocks."""
    for block in blocks(page, "sh"):
        for line in _PASTA.findall(block.text.replace("\\\n", " ")):
            yield shlex.split(line, comments=True)


def leaves(command: Any = None, words: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return every command that does something, by its words, such as `("train", "sft")`."""
    command = get_command(app) if command is None else command
    if not hasattr(command, "commands"):
        return {words: command}
    below = (leaves(one, (*words, name)) for name, one in command.commands.items())
    return {name: leaf for found in below for name, leaf in found.items()}


def options() -> set[str]:
    parameters = [one for leaf in leaves().values() for one in leaf.params]
    return {name for one in parameters for name in (*one.opts, *one.secondary_opts)}


def parse(arguments: list[str]) -> None:
    """Parse a command line and do nothing. Raises what `pasta` raises."""
    command = get_command(app)
    for leaf in leaves(command).values():
        leaf.callback = lambda **_values: None
    with command.make_context("pasta", list(arguments)) as context:
        command.invoke(context)
