"""Commands on training sets: `data build` and `data report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pasta_decoding.cli.console import drawn, say, token_counter
from pasta_decoding.cli.options import AsJson, Base, command
from pasta_decoding.data.build import Wanted
from pasta_decoding.errors import PastaError


@command()
def build(
    sources: Annotated[list[Path], typer.Argument(help="JSONL (.gz) files, plain or annotated.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The JSONL (.gz) to write.")],
    wanted: Wanted,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="Leave out rows that resemble a prompt of this evaluation set (JSONL)."),
    ] = None,
    model: Base = None,
    as_json: AsJson = False,
) -> None:
    """Choose rows for training: filter, drop duplicates and evaluation prompts."""
    from pasta_decoding.data.build import choose
    from pasta_decoding.data.report import measure_rows
    from pasta_decoding.data.rows import read_prompts, read_rows, write_rows

    count_tokens = token_counter(model)
    prompts = [prompt for path in exclude or [] for prompt in read_prompts(path)]
    rows = list(read_rows(*sources))
    kept, dropped = choose(drawn(rows, "reading"), wanted, count_tokens, prompts)
    if not kept:
        raise PastaError(
            f"no row of {len(rows)} is left: {dict(dropped)}",
            hint="Loosen the filter that dropped most; nothing was written.",
        )
    write_rows(out, kept)
    figures = measure_rows(drawn(kept, "measuring"), count_tokens)
    show({"read": len(rows), "dropped": dict(dropped.most_common()), **figures}, as_json)


@command()
def report(
    source: Annotated[Path, typer.Argument(help="JSONL (.gz), plain or annotated.")],
    model: Base = None,
    as_json: AsJson = False,
) -> None:
    """Report rows, lengths, chunks and ideal speedup of a training set."""
    from pasta_decoding.data.report import measure_rows
    from pasta_decoding.data.rows import read_rows

    rows = drawn(list(read_rows(source)), "measuring")
    show(measure_rows(rows, token_counter(model)), as_json)


def show(figures: dict[str, Any], as_json: bool) -> None:
    """Print the figures of a set, as JSON or as a table of its sources."""
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("source", "rows", "with chunk", "chunks", "syncs", "tokens", "ideal speedup")
    for name, one in [*figures["sources"].items(), ("all", figures)]:
        tokens = one["plain_tokens"] or {"p10": 0, "p50": 0, "p90": 0}
        lengths = f"{tokens['p10']:.0f} / {tokens['p50']:.0f} / {tokens['p90']:.0f}"
        counts = [str(one[key]) for key in ("rows", "with_chunk", "chunks", "syncs")]
        table.add_row(name or "-", *counts, lengths, str(one["ideal_speedup"]))
    Console().print(table)
    if figures["literal_tags"]:
        say(f"kept, with tags that are text, escaped: {figures['literal_tags']}")
    for reason, number in figures.get("dropped", {}).items():
        say(f"left out: {number:6d} {reason}")
