"""The command `lint`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pasta_decoding.cli.options import command
from pasta_decoding.errors import PastaError


@command("pasta lint answer.txt", "pasta lint --no-topic rows.jsonl.gz")
def lint(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="JSONL (.gz) with annotated rows, or text files with one response each."
        ),
    ],
    no_topic: Annotated[bool, typer.Option("--no-topic", help="Promises need no topic.")] = False,
) -> None:
    """Report every broken annotation as `file:line:column: rule: message`, as a compiler does.

    In JSONL files the line is the row's, and the column counts characters of its response.
    """
    status = 0
    for path in files:
        for line in problems(path, topic=not no_topic):
            typer.echo(f"{path}:{line}")
            status = 1
    raise typer.Exit(status)


def problems(path: Path, *, topic: bool) -> Iterator[str]:
    """Yield what is wrong in a file, from the line's number on. A line that is no row is wrong."""
    from pasta_decoding.data.rows import numbered_rows
    from pasta_decoding.lang.check import check

    if ".jsonl" not in path.suffixes[-2:]:
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise PastaError(f"{path}: byte {error.start} is not UTF-8") from error
        for one in check(text, topic_required=topic):
            yield f"{one.line}:{one.column}: {one.rule}: {one.message}"
        return
    broken: list[str] = []
    rows = numbered_rows(
        path, on_problem=lambda error: broken.append(str(error).removeprefix(f"{path}:"))
    )
    for number, row in rows:
        yield from broken
        broken.clear()
        lines = row.response.split("\n")
        for one in check(row.response, topic_required=topic):
            column = sum(len(line) + 1 for line in lines[: one.line - 1]) + one.column
            yield f"{number}:{column}: {one.rule}: {one.message}"
    yield from broken
