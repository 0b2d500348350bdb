"""Commands on rows: `lint`, `data build` and `data report`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pasta_decoding.cli.console import bar, say, token_counter
from pasta_decoding.cli.options import AsJson, ModelOption, command
from pasta_decoding.data.build import SelectionLimits, measure_rows, select_rows
from pasta_decoding.data.rows import numbered_rows, read_prompts, read_rows, write_rows
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.lang.check import WARNINGS, Problem, check, warn


@command("pasta lint answer.txt", "pasta lint --no-topic rows.jsonl.gz")
def lint(
    files: Annotated[
        list[Path], typer.Argument(help="JSONL (.gz) with annotated rows, or texts of a response.")
    ],
    no_topic: Annotated[bool, typer.Option("--no-topic", help="Accept missing topics.")] = False,
) -> None:
    """Report every broken annotation as `file:line:column: rule: message`, as a compiler does.

    A warning alone leaves the exit status 0.
    In JSONL files the line is the row's, and the column counts characters of its response.
    """
    status = 0
    for path in files:
        holds_rows = ".jsonl" in path.suffixes[-2:]
        lint_file = _lint_rows if holds_rows else _lint_text
        for is_error, line in lint_file(path, topic_required=not no_topic):
            typer.echo(line)
            if is_error:
                status = 1
    raise typer.Exit(status)


def _lint_text(path: Path, *, topic_required: bool) -> Iterator[tuple[bool, str]]:
    """Yield, for each problem, whether it is an error (else a warning), and its line."""
    with errors_as(f"{path} is not UTF-8", UnicodeDecodeError):
        text = path.read_bytes().decode("utf-8")
    for problem in _problems(text, topic_required=topic_required):
        yield _described(f"{path}:{problem.line}:{problem.column}", problem)


def _lint_rows(path: Path, *, topic_required: bool) -> Iterator[tuple[bool, str]]:
    """Yield the same for each row of a JSONL file. A row that cannot be read is an error."""
    for number, row in numbered_rows(path):
        if isinstance(row, PastaError):
            yield True, str(row)
            continue
        lines = row.response.split("\n")
        for problem in _problems(row.response, topic_required=topic_required):
            chars_before_line = sum(len(line) + 1 for line in lines[: problem.line - 1])
            column = chars_before_line + problem.column
            yield _described(f"{path}:{number}:{column}", problem)


def _problems(text: str, *, topic_required: bool) -> list[Problem]:
    problems = [*check(text, topic_required=topic_required), *warn(text)]
    return sorted(problems, key=lambda problem: (problem.line, problem.column))


def _described(location: str, problem: Problem) -> tuple[bool, str]:
    is_error = problem.rule not in WARNINGS
    severity = "" if is_error else "warning: "
    return is_error, f"{location}: {severity}{problem.rule}: {problem.message}"


@command()
def build(
    sources: Annotated[list[Path], typer.Argument(help="JSONL (.gz) files, plain or annotated.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The JSONL (.gz) to write.")],
    limits: SelectionLimits,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="Leave out rows that resemble a prompt of this JSONL.")
    ] = None,
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Choose rows for training: filter, drop duplicates and evaluation prompts."""
    count_tokens = token_counter(model)
    prompts = [prompt for path in exclude or [] for prompt in read_prompts(path)]
    rows = list(read_rows(*sources))
    selected, dropped = select_rows(bar(rows, "reading"), limits, count_tokens, prompts)
    if not selected:
        raise PastaError(
            f"no row of {len(rows)} is left: {dict(dropped)}",
            hint="Loosen the filter that dropped most; nothing was written.",
        )
    write_rows(out, selected)
    figures = measure_rows(bar(selected, "measuring"), count_tokens)
    print_measures({"read": len(rows), "dropped": dict(dropped.most_common()), **figures}, as_json)


@command()
def report(
    source: Annotated[Path, typer.Argument(help="JSONL (.gz), plain or annotated.")],
    model: ModelOption = None,
    as_json: AsJson = False,
) -> None:
    """Report rows, lengths, chunks and ideal speedup of a training set."""
    rows = bar(list(read_rows(source)), "measuring")
    print_measures(measure_rows(rows, token_counter(model)), as_json)


def print_measures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table of all sources, and why rows were left out."""
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    table = Table("source", "rows", "with chunk", "chunks", "syncs", "tokens", "ideal speedup")
    for name, source in [*figures["sources"].items(), ("all", figures)]:
        tokens = source["plain_tokens"] or {"p10": 0, "p50": 0, "p90": 0}
        lengths = f"{tokens['p10']:.0f} / {tokens['p50']:.0f} / {tokens['p90']:.0f}"
        counts = [str(source[key]) for key in ("rows", "with_chunk", "chunks", "syncs")]
        table.add_row(name or "-", *counts, lengths, str(source["ideal_speedup"]))
    Console().print(table)
    for reason, rows in figures.get("dropped", {}).items():
        say(f"left out: {rows:6d} {reason}")
