"""The command `lint`, and what all commands share: files, folders, and telling the user."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from pasta_decoding.errors import PastaError


def cache_folder() -> Path:
    """Return the user's cache; $PASTA_CACHE moves it."""
    from pasta_decoding.models.bases import default_cache

    return default_cache(os.environ)


def base_folder(model: Path | None) -> Path:
    """Return the folder of the base model of --model: a folder, a name on the hub, or left out."""
    from pasta_decoding.models.pull import model_folder

    return model_folder(model, cache_folder())


def is_main() -> bool:
    """Is this the process that speaks? `accelerate launch` starts several, and numbers them."""
    return os.environ.get("RANK", "0") == "0"


say = logging.getLogger("pasta_decoding.cli").info
"""Reports to the user, on standard error."""


def lint(
    files: Annotated[
        list[Path],
        typer.Argument(help="JSONL (.gz) with annotated rows, or text files, a response each."),
    ],
    no_topic: Annotated[bool, typer.Option("--no-topic", help="Promises need no topic.")] = False,
) -> None:
    """Report every broken annotation as `file:line:column: rule: message`, as a compiler does.

    Of a row the line is its own in the file, and the column counts the characters of its response.
    """
    found = 0
    for path in files:
        problems = row_problems if ".jsonl" in path.suffixes[-2:] else text_problems
        for line in problems(path, topic_required=not no_topic):
            found += 1
            typer.echo(f"{path}:{line}")
    raise typer.Exit(1 if found else 0)


def text_problems(path: Path, *, topic_required: bool) -> Iterator[str]:
    """Yield what is wrong with the one response that a text file is, from the line's number on."""
    from pasta_decoding.lang.check import check

    for one in check(read_text(path), topic_required=topic_required):
        yield f"{one.line}:{one.column}: {one.rule}: {one.message}"


def row_problems(path: Path, *, topic_required: bool) -> Iterator[str]:
    """Yield the same of the rows of a JSONL file; lines that are no rows are problems, too."""
    from pasta_decoding.data.dataset import numbered_rows
    from pasta_decoding.lang.check import check

    broken: list[str] = []
    rows = numbered_rows(path, on_problem=lambda error: broken.append(str(error)))
    for number, row in rows:
        yield from _without_path(broken, path)
        lines = row.response.split("\n")
        for one in check(row.response, topic_required=topic_required):
            column = sum(len(line) + 1 for line in lines[: one.line - 1]) + one.column
            yield f"{number}:{column}: {one.rule}: {one.message}"
    yield from _without_path(broken, path)


def _without_path(broken: list[str], path: Path) -> Iterator[str]:
    while broken:
        yield broken.pop(0).removeprefix(f"{path}:")


def read_text(path: Path) -> str:
    """Return a text file, line ends as they are. Raises PastaError if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise PastaError(f"{path}: {error.strerror}", hint="Give a readable file.") from error
    except UnicodeDecodeError as error:
        message = f"{path}: byte {error.start} is not UTF-8"
        raise PastaError(message, hint="Save the file as UTF-8.") from error


def token_counter(model: Path | None = None) -> Callable[[str], int]:
    """Return a function that counts tokens as a base model does; the default one if left out."""
    from pasta_decoding.models.load import load_tokenizer

    tokenizer = load_tokenizer(base_folder(model))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
