"""Commands that measure: `bench answers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.cli.decode import MaxTokens
from pasta_decoding.cli.engine import Loading, with_loading
from pasta_decoding.cli.files import say
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.eval.bench_answers import Record


@with_loading
def answers(
    prompts: Annotated[Path, typer.Option(help="JSONL (.gz) with an `instruction` a line.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    sequential: Annotated[
        int | None, typer.Option(min=0, help="Answer only the first so many sequentially, too.")
    ] = None,
    timed: Annotated[int, typer.Option(min=0, help="Time a replay of the first so many.")] = 20,
    max_tokens: MaxTokens = 400,
    at_once: Annotated[
        int,
        typer.Option(min=1, help="Answer so many together: sooner done, but not timed."),
    ] = 1,
    records: Annotated[
        Path | None, typer.Option(help="Keep a line a prompt here; the same command resumes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
    *,
    loading: Loading,
) -> None:
    """Answer prompts in parallel and sequentially; report speedups and what goes wrong."""
    from rich.console import Console
    from rich.progress import Progress

    from pasta_decoding.data.dataset import read_prompts
    from pasta_decoding.eval.bare import BareTimes, bare_call
    from pasta_decoding.eval.bench_answers import bench, summary

    if at_once > 1 and timed:
        raise PastaError(
            "answers that are written together cannot be timed",
            hint="Give --timed 0, or leave --at-once out.",
        )
    questions = read_prompts(prompts)[:limit]
    decoder = loading.decoder()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answering", total=len(questions))
        found = bench(
            decoder,
            questions,
            max_tokens=max_tokens,
            sequential=sequential,
            timed=timed,
            bare=BareTimes(bare_call(decoder.engine)),
            out=records,
            tick=lambda _record: progress.advance(task),
            at_once=at_once,
        )
    figures = summary(found) | {"engine": decoder.engine.name}
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        show_figures(figures, found)


def show_figures(figures: dict[str, Any], records: list[Record]) -> None:
    """Print the figures as lines, and name what failed."""
    for name, value in figures.items():
        typer.echo(f"{name:26} {value:.3f}" if isinstance(value, float) else f"{name:26} {value}")
    for record in records:
        if record.error:
            say(f"failed: {record.prompt[:60]!r}: {record.error}")
