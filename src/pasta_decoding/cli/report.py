"""The command `eval report`: everything that is known of some runs, as tables and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.cli.console import say
from pasta_decoding.errors import require
from pasta_decoding.files import written_whole

if TYPE_CHECKING:
    from pasta_decoding.evaluation.report.build import Report


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of `eval generate`, or the folder around them.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")] = Path("report"),
    common: Annotated[
        bool,
        typer.Option("--common", help="Only the prompts that all runs have, and say how many."),
    ] = False,
) -> None:
    """Compare runs with the first sequential one: index.html, report.json, CSV files, pictures.

    Speedups and qualities come with 95 % intervals, failures inside. Everything is made from the
    run folders; nothing is computed by a model.
    """
    from pasta_decoding.evaluation.report.build import build
    from pasta_decoding.evaluation.runs import find_runs

    require("matplotlib", extra="plot", doing="drawing a report")
    found = build(find_runs(runs), common=common)
    write(found, out)
    say(found.judge)
    typer.echo(out / "index.html")


def write(found: Report, out: Path) -> None:
    """Write all files of a report, each of them whole."""
    from pasta_decoding.data.lines import write_text
    from pasta_decoding.evaluation.report.build import numbers, prompts_csv, runs_csv
    from pasta_decoding.evaluation.report.drawing import as_png
    from pasta_decoding.evaluation.report.page import render
    from pasta_decoding.evaluation.report.plots import plots

    write_text(out / "index.html", render(found))
    write_text(out / "report.json", json.dumps(numbers(found), ensure_ascii=False, indent=1) + "\n")
    write_text(out / "runs.csv", runs_csv(found))
    write_text(out / "prompts.csv", prompts_csv(found))
    for name, plot in plots(found).items():
        if (picture := as_png(plot, found)) is not None:
            with written_whole(out / f"{name}.png") as partial:
                partial.write_bytes(picture)
