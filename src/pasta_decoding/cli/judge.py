"""The commands under `judge`: pairs for people, and what an endpoint's judgement is worth."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.cli.bars import progress
from pasta_decoding.cli.console import say
from pasta_decoding.cli.keys import UNNAMED, named
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.evaluation.judge.base import Judge, JudgedPair
    from pasta_decoding.evaluation.judge.evaluate import JudgeFigures, SourceReport

Pairs = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL (.gz): prompt, response_a, response_b, label; may be repeated."),
]
AlpacaEval = Annotated[
    Path | None, typer.Option(help="Folder with AlpacaEval's outputs and annotations.")
]


def pairs(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of `eval generate`, or the folder around them.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="JSONL: prompt, response_a, response_b, label.")
    ],
    baseline: Annotated[
        Path | None, typer.Option(help="The run to compare with; the sequential one if left out.")
    ] = None,
    both_orders: Annotated[
        bool,
        typer.Option(
            "--both-orders", help="Each pair twice, so that being first is worth nothing."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Decides the order of the pairs and in them.")] = 0,
) -> None:
    """Write answers beside the baseline's for people to judge, without a word on who wrote which.

    Whoever judges writes a, b or tie in the place of each null; `eval rate --judged` reads that.
    Equal and empty answers are not in it.
    """
    from pasta_decoding.data.lines import write_lines
    from pasta_decoding.evaluation.judge.readers import blind
    from pasta_decoding.evaluation.rate import pairs_to_judge
    from pasta_decoding.evaluation.runs import beside_baseline

    if out.suffix == ".gz":
        raise PastaError(f"{out} is for people to write in", hint="Leave the .gz out.")
    if out.exists():
        hint = "Somebody may have judged some of it; move it away, or give another name."
        raise PastaError(f"{out} is there already", hint=hint)
    reference, found = beside_baseline(runs, baseline)
    asked = [
        (record.instruction, record.text, base.text)
        for run in found
        if run.folder.resolve() != reference.folder.resolve()
        for record, base in pairs_to_judge(run, reference)
    ]
    if not asked:
        raise PastaError("no two answers to compare", hint="Give a run besides the baseline.")
    lines = blind(asked, both_orders=both_orders, seed=seed)
    write_lines(out, lines)
    say(f"{len(lines)} pairs")


def evaluate(
    base_url: Annotated[str, typer.Option(help="The OpenAI-compatible endpoint that judges.")],
    model: Annotated[str, typer.Option(help="The endpoint's model.")],
    pairs: Pairs = None,
    alpaca_eval: AlpacaEval = None,
    verdicts: Annotated[
        Path, typer.Option(help="Keeps the endpoint's verdicts; the same command goes on there.")
    ] = Path("verdicts.jsonl"),
    logprobs: Annotated[
        bool, typer.Option(help="Read the first token's probabilities if the endpoint has them.")
    ] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Pairs of each source.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
) -> None:
    """Compare a judge with what length alone would say, source by source."""
    from pasta_decoding.evaluation.judge import evaluate as figures

    read = at_most(limit, read_all(pairs or [], alpaca_eval))
    said = ask_endpoint(read, base_url, model, verdicts, logprobs=logprobs)
    reports = figures.evaluate(read, said)
    if as_json:
        found = [asdict(one) | {"usable": one.usable} for one in reports]
        typer.echo(json.dumps({"sources": found, "usable": usable(reports)}))
    else:
        show(reports)


def ask_endpoint(
    read: list[JudgedPair], base_url: str, model: str, verdicts: Path, *, logprobs: bool
) -> list[float | None]:
    """Return the endpoint's preferences; None where it gave no verdict."""
    from pasta_decoding.evaluation.judge.llm import LlmJudge

    endpoint = named(UNNAMED, base_url, model)
    with progress("asking", 2 * len(read)) as tick:
        judge = LlmJudge(endpoint, verdicts, logprobs=logprobs, tick=tick)
        said = prefer(judge, read)
    for reason, times in judge.failures.most_common():
        say(f"no verdict ({times} times): {reason}")
    return said


def prefer(judge: Judge, pairs: Sequence[JudgedPair]) -> list[float | None]:
    """Ask the judge about pairs."""
    prompts, a, b = ([getattr(pair, name) for pair in pairs] for name in ("prompt", "a", "b"))
    return judge.prefer(prompts, a, b)


def read_all(paths: list[Path], folder: Path | None) -> list[JudgedPair]:
    """Read all the pairs that the user pointed to."""
    from pasta_decoding.evaluation.judge.pairs import read_alpaca_eval, read_pairs

    read = [pair for path in paths for pair in read_pairs(path)]
    if folder is not None:
        read += read_alpaca_eval(folder)
    if not read:
        raise PastaError("no pairs to judge", hint="Give --pairs FILE or --alpaca-eval FOLDER.")
    return read


def at_most(limit: int | None, pairs: list[JudgedPair]) -> list[JudgedPair]:
    """Return `limit` pairs of each source, always the same ones; all of them without a limit."""
    from pasta_decoding.evaluation.judge.base import fingerprint

    if limit is None:
        return pairs
    kept: Counter[str] = Counter()
    chosen = []
    for pair in sorted(pairs, key=lambda pair: fingerprint(f"{pair.prompt}\n{pair.a}\n{pair.b}")):
        kept[pair.source] += 1
        if kept[pair.source] <= limit:
            chosen.append(pair)
    return chosen


def usable(reports: Sequence[SourceReport]) -> bool:
    """Is the judge worth more than length? Only if it is by every source."""
    return all(report.usable for report in reports)


def show(reports: Sequence[SourceReport]) -> None:
    """Print a line a source, and the verdict."""
    typer.echo(
        f"{'':36}{'all pairs':>42}{'':4}{'similar length':>42}\n"
        f"{'source':36}" + 2 * f"{'pairs':>7}{'length':>8}{'judge':>7}{'gain':>20}{'':4}" + "  ECE"
    )
    for one in reports:
        error = "" if one.calibration_error is None else f"{one.calibration_error:.3f}"
        line = f"{one.source:36}{columns(one.every)}{columns(one.similar)}{error:>5}"
        missing = f"  {one.missing:.1%} missing" if one.missing else ""
        typer.echo(f"{line}  {'usable' if one.usable else 'not usable'}{missing}")
    typer.echo(f"usable by every source: {'yes' if usable(reports) else 'no'}")


def columns(figures: JudgeFigures | None) -> str:
    """Return the columns of one kind of pairs."""
    if figures is None:
        return f"{'0':>7}{'':39}"
    gain = f"{figures.gain.value:+.3f} [{figures.gain.low:+.3f},{figures.gain.high:+.3f}]"
    return (
        f"{figures.pairs:7}{figures.floor:8.3f}{figures.accuracy.value:7.3f} {gain:>22}".ljust(44)
        + "  "
    )
