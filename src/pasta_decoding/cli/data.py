"""Commands on training sets: `data build`, `data report`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.cli.files import say, token_counter
from pasta_decoding.data.build import Wanted
from pasta_decoding.errors import PastaError, install_command

if TYPE_CHECKING:
    from pasta_decoding.data.dataset import Row


class SplitPart(StrEnum):
    """Which rows, by the hash of their id."""

    all = "all"
    train = "train"
    held_out = "held-out"


_DEFAULT = Wanted()
_PART = SplitPart(_DEFAULT.split)

Tokenizer = Annotated[
    Path | None,
    typer.Option("--model", help="Folder of the base model; the embedded one if left out."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


def build(
    sources: Annotated[list[Path], typer.Argument(help="JSONL (.gz) files, plain or annotated.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The JSONL (.gz) to write.")],
    split: Annotated[
        SplitPart, typer.Option(help="train leaves out the quarter of ids that is for judging.")
    ] = _PART,
    question: Annotated[
        str | None,
        typer.Option(help="Pattern whose group becomes the instruction, wherever it is found."),
    ] = _DEFAULT.question,
    shorten_to: Annotated[
        int | None, typer.Option(min=1, help="Shorten longer responses, part by part.")
    ] = _DEFAULT.shorten_to,
    min_tokens: Annotated[
        int, typer.Option(min=0, help="Leave out shorter responses, counted without tags.")
    ] = _DEFAULT.min_tokens,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out longer responses, counted without tags.")
    ] = _DEFAULT.max_tokens,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out longer prompts.")
    ] = _DEFAULT.max_prompt_tokens,
    max_total_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Leave out prompts that are longer together with their response."),
    ] = _DEFAULT.max_total_tokens,
    min_chunks: Annotated[
        int, typer.Option(min=0, help="Leave out responses with fewer chunks.")
    ] = _DEFAULT.min_chunks,
    min_chunk_tokens: Annotated[
        int, typer.Option(min=0, help="Do not count shorter chunks.")
    ] = _DEFAULT.min_chunk_tokens,
    named_topics: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Let at least this share of chunks begin with their topic."
        ),
    ] = _DEFAULT.named_topics,
    language: Annotated[
        str | None, typer.Option(help="Keep one language only, by its ISO 639-1 code such as en.")
    ] = _DEFAULT.language,
    code: Annotated[bool, typer.Option(help="Keep responses with code in them.")] = _DEFAULT.code,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="Leave out what resembles the prompts of this JSONL (evaluation)."),
    ] = None,
    per_prompt: Annotated[
        int | None, typer.Option(min=1, help="Keep so many responses of one prompt.")
    ] = _DEFAULT.per_prompt,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Keep so many rows in all.")
    ] = _DEFAULT.limit,
    seed: Annotated[
        int, typer.Option(min=0, help="Shuffles the rows, and so decides what a limit keeps.")
    ] = _DEFAULT.seed,
    model: Tokenizer = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Name broken lines and keep the rest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Choose rows for training: filter, shorten, drop duplicates and evaluation prompts."""
    from pasta_decoding.data.build import Builder
    from pasta_decoding.data.contamination import Contamination
    from pasta_decoding.data.dataset import read_prompts, write_rows
    from pasta_decoding.data.report import measure_rows

    check_pattern(question)
    wanted = Wanted(
        split=split.value,
        question=question,
        shorten_to=shorten_to,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_total_tokens=max_total_tokens,
        min_chunks=min_chunks,
        min_chunk_tokens=min_chunk_tokens,
        named_topics=named_topics,
        language=language,
        code=code,
        per_prompt=per_prompt,
        limit=limit,
        seed=seed,
    )
    detect = language_detector() if language else lambda _text: ""
    count_tokens = token_counter(model)
    prompts = (prompt for path in exclude or [] for prompt in read_prompts(path))
    builder = Builder(wanted, count_tokens, detect, Contamination(prompts))
    rows = read_all(sources, keep_going=keep_going)
    kept = list(builder.build(with_bar(rows, "reading")))
    if not kept:
        raise PastaError(
            f"no row of {len(rows)} is left: {dict(builder.dropped)}",
            hint="Loosen the filter that dropped most; nothing was written.",
        )
    write_rows(out, kept)
    figures = measure_rows(with_bar(kept, "measuring"), count_tokens)
    show({"read": len(rows), "dropped": dict(builder.dropped.most_common()), **figures}, as_json)


def report(
    source: Annotated[Path, typer.Argument(help="JSONL (.gz) files, plain or annotated.")],
    model: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """Say what a training set is made of: rows, lengths, parts, ideal speedup."""
    from pasta_decoding.data.dataset import read_rows
    from pasta_decoding.data.report import measure_rows

    rows = with_bar(list(read_rows(source)), "measuring")
    show(measure_rows(rows, token_counter(model)), as_json)


def check_pattern(pattern: str | None) -> None:
    """Refuse a pattern that cannot be compiled or has no group."""
    try:
        groups = re.compile(pattern or "()").groups
    except re.error as error:
        raise PastaError(f"--question is not a pattern: {error}") from error
    if groups != 1:
        raise PastaError(
            f"--question has {groups} groups, not one",
            hint="Put round brackets around the part that is the instruction.",
        )


def language_detector() -> Callable[[str], str]:
    """Return a function from a text to the ISO 639-1 code of its language."""
    try:
        import py3langid
    except ImportError as error:
        raise PastaError(
            "--language needs py3langid", hint=f"Install it: {install_command('data')}"
        ) from error
    return lambda text: str(py3langid.classify(text)[0])


def read_all(sources: Sequence[Path], *, keep_going: bool) -> list[Row]:
    """Return the rows of all files; an id may be used once, unless it only says what the row says.

    Where two files have the same row without an id, it is a duplicate like any other.
    """
    from pasta_decoding.data.dataset import derived_id, read_rows

    on_problem = (lambda problem: say(f"skipped {problem}")) if keep_going else None
    found: dict[str, Path] = {}
    rows = []
    for path in sources:
        for row in read_rows(path, on_problem=on_problem):
            if row.id in found and row.id != derived_id(row):
                raise PastaError(
                    f"id {row.id!r} is in {found[row.id]} and in {path}",
                    hint="Give every row its own id, or leave one of the files out.",
                )
            found[row.id] = path
            rows.append(row)
    return rows


def with_bar(rows: Sequence[Row], doing: str) -> Iterator[Row]:
    """Yield the rows and draw how far they are."""
    from rich.console import Console
    from rich.progress import track

    yield from track(rows, doing, console=Console(stderr=True), transient=True)


def show(figures: dict[str, Any], as_json: bool) -> None:
    """Print the figures of a set, as JSON or as a table of its sources."""
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("source", "rows", "with chunk", "chunks", "syncs", "tokens", "ideal speedup")
    sources: Iterable[tuple[str, dict[str, Any]]] = figures["sources"].items()
    for name, one in [*sources, ("all", figures)]:
        tokens = one["plain_tokens"] or {"p10": 0, "p50": 0, "p90": 0}
        lengths = f"{tokens['p10']:.0f} / {tokens['p50']:.0f} / {tokens['p90']:.0f}"
        counts = [str(one[key]) for key in ("rows", "with_chunk", "chunks", "syncs")]
        table.add_row(name or "-", *counts, lengths, str(one["ideal_speedup"]))
    Console().print(table)
    if figures["literal_tags"]:
        say(f"kept, with tags that are text, escaped: {figures['literal_tags']}")
    for reason, number in figures.get("dropped", {}).items():
        say(f"left out: {number:6d} {reason}")
