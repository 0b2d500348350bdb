"""Commands that measure: `bench answers`, `bench annotations`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.cli.annotate import load_tokenizer
from pasta_decoding.cli.decode import MaxTokens
from pasta_decoding.cli.engine import Loading, with_loading
from pasta_decoding.cli.files import say
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pasta_decoding.eval.agreement import Agreement
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


def compare_annotations(
    gold: Annotated[Path, typer.Argument(help="JSONL (.gz) with annotations thought right.")],
    annotated: Annotated[Path, typer.Argument(help="JSONL (.gz), the same responses.")],
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only the quarter that nothing is trained on.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
) -> None:
    """Measure how far annotations agree with others of the same responses, found by their id.

    The layout rule (list items, else paragraphs) is measured on the same rows, for scale.
    """
    from pasta_decoding.data.dataset import read_rows
    from pasta_decoding.eval.agreement import agreement, is_held_out, layout_rule, match

    right = [row for row in read_rows(gold) if is_held_out(row.id) or not held_out]
    pairs = match(right, read_rows(annotated))
    token_ends = token_end_finder()
    found = {
        "annotation": agreement(pairs, token_ends),
        "layout_rule": agreement([(tree, layout_rule(tree)) for tree, _ in pairs], token_ends),
    }
    figures = {"rows": len(pairs), "missing": len(right) - len(pairs)}
    if as_json:
        typer.echo(json.dumps(figures | {name: asdict(one) for name, one in found.items()}))
    else:
        show_figures(figures, [])
        show_agreement(found)


def show_agreement(found: dict[str, Agreement]) -> None:
    """Print a line a measure and a column an annotation, with 95 % intervals."""
    columns = {name: asdict(one) for name, one in found.items()}
    typer.echo(" " * 26 + "".join(f" {name:24}" for name in columns).rstrip())
    for measure in columns["annotation"]:
        cells = [_cell(**column[measure]) for column in columns.values()]
        typer.echo(f"{measure:26}" + "".join(f" {cell:24}" for cell in cells).rstrip())


def _cell(value: float | None, low: float | None, high: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def token_end_finder() -> Callable[[str], Sequence[int]]:
    """Return a function that tells where the tokens of a text end."""
    tokenizer = load_tokenizer()

    def token_ends(text: str) -> Sequence[int]:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [end for _start, end in found["offset_mapping"]]

    return token_ends
