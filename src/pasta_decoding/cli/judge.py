"""Commands on judges: `judge train`, `judge eval`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.cli.files import say
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.eval.judge.base import Judge, Pair
    from pasta_decoding.eval.judge.evaluate import Figures, SourceReport

Pairs = Annotated[
    list[Path] | None,
    typer.Option(help="JSONL (.gz): prompt, response_a, response_b, label; may be repeated."),
]
Damaged = Annotated[
    bool, typer.Option(help="Add pairs of an answer and the same one damaged on purpose.")
]
AlpacaEval = Annotated[
    Path | None, typer.Option(help="Folder with AlpacaEval's outputs and annotations.")
]


def train(
    out: Annotated[Path, typer.Option(help="The judge, one JSON file.")],
    pairs: Pairs = None,
    alpaca_eval: AlpacaEval = None,
    damaged: Damaged = True,
) -> None:
    """Fit the local judge to preferences, three quarters of the prompts; the rest is held out."""
    from pasta_decoding.eval.judge.fit import fit, measure
    from pasta_decoding.eval.judge.local import save_judge

    if not out.parent.is_dir():
        raise PastaError(f"cannot write {out}: No such file or directory")
    read = read_all(pairs or [], alpaca_eval, damaged=damaged)
    found = measure(read, track)
    judge = fit(found, found.fold_P != 0)
    save_judge(out, judge)
    told = f"{sum(judge.trained_on.values())} pairs, {len(judge.prompts)} prompts"
    say(f"{out}: {told}, ridge {judge.ridge:g}, slope {judge.slope:.2f}")


def evaluate(
    pairs: Pairs = None,
    alpaca_eval: AlpacaEval = None,
    unseen: Annotated[
        list[Path] | None,
        typer.Option(help="As --pairs, but no judge is trained on them; may be repeated."),
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(
            help="A trained judge; if left out, one for each fold is trained on the rest."
        ),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Ask this OpenAI-compatible endpoint instead.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The endpoint's model.")] = None,
    verdicts: Annotated[
        Path, typer.Option(help="Keeps the endpoint's verdicts; the same command goes on there.")
    ] = Path("verdicts.jsonl"),
    logprobs: Annotated[
        bool, typer.Option(help="Read the first token's probabilities if the endpoint has them.")
    ] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Pairs of each source.")] = None,
    damaged: Damaged = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
) -> None:
    """Compare a judge with length alone on prompts that it has not seen, source by source.

    Without --judge and --base-url the local judge itself is examined: one is trained for each of
    four folds of the prompts, on the other three.
    """
    from pasta_decoding.eval.judge import evaluate as figures

    read = at_most(limit, read_all(pairs or [], alpaca_eval, unseen or [], damaged=damaged))
    if base_url is not None:
        if model is None:
            raise PastaError("an endpoint needs --model", hint="Give its name.")
        asked = ask_endpoint(read, base_url, model, verdicts, logprobs=logprobs)
    elif judge is not None:
        asked = ask_file(read, judge)
    else:
        asked = ask_folds(read, unseen or [])
    reports = figures.evaluate(*asked)
    if as_json:
        found = [asdict(one) | {"usable_for_training": one.usable_for_training} for one in reports]
        typer.echo(json.dumps({"sources": found, "usable_for_training": usable(reports)}))
    else:
        show(reports)


Asked = tuple[list["Pair"], Sequence[float | None], Sequence[float | None]]
"""Pairs whose prompts are new to the judge, its preferences, and those at equal length."""


def ask_endpoint(
    read: list[Pair], base_url: str, model: str, verdicts: Path, *, logprobs: bool
) -> Asked:
    """Ask the endpoint; calibrate what it says."""
    from pasta_decoding.endpoint import Endpoint
    from pasta_decoding.eval.judge.fit import cross_calibrated
    from pasta_decoding.eval.judge.llm import LlmJudge

    with progress("asking", 2 * len(read)) as tick:
        judge = LlmJudge(Endpoint(base_url, model), verdicts, logprobs=logprobs, tick=tick)
        said = prefer(judge, read)
    for reason, times in judge.failures.most_common():
        say(f"no verdict ({times} times): {reason}")
    calibrated, slope = cross_calibrated(read, said)
    say(f"slope of the calibration: {slope:.2f}")
    return read, calibrated, calibrated


def ask_file(read: list[Pair], path: Path) -> Asked:
    """Ask a trained judge about the prompts that are new to it."""
    from pasta_decoding.eval.judge.local import load_judge

    judge = load_judge(path)
    new = [pair for pair in read if not judge.has_seen(pair.prompt)]
    say(f"{len(read) - len(new)} of {len(read)} pairs left out: {path} has seen their prompts")
    if not new:
        raise PastaError("no pair is left", hint="Give pairs on other prompts.")
    return new, prefer(judge, new), prefer(judge.equal_length(), new)


def ask_folds(read: list[Pair], unseen: list[Path]) -> Asked:
    """Train a judge for each fold on the others, and ask it."""
    import numpy as np

    from pasta_decoding.eval.judge.fit import cross_fitted, measure
    from pasta_decoding.eval.judge.pairs import source_name

    sources = {source_name(path) for path in unseen}
    chosen_P = np.array([pair.source not in sources for pair in read])
    whole, equal = cross_fitted(measure(read, track), chosen_P)
    new = [place for place, preference in enumerate(whole) if preference is not None]
    if len(new) < len(read):
        say(f"{len(read) - len(new)} pairs left out: other folds spell their prompts another way")
    return [read[at] for at in new], [whole[at] for at in new], [equal[at] for at in new]


def prefer(judge: Judge, pairs: Sequence[Pair]) -> list[float | None]:
    """Ask the judge about pairs."""
    prompts, a, b = ([getattr(pair, name) for pair in pairs] for name in ("prompt", "a", "b"))
    return judge.prefer(prompts, a, b)


def read_all(
    paths: list[Path], folder: Path | None, unseen: Sequence[Path] = (), *, damaged: bool
) -> list[Pair]:
    """Read all the pairs that the user pointed to; damage answers of those to train on."""
    from pasta_decoding.eval.judge.damage import damaged_pairs
    from pasta_decoding.eval.judge.pairs import read_alpaca_eval, read_pairs

    read = [pair for path in paths for pair in read_pairs(path)]
    if folder is not None:
        read += read_alpaca_eval(folder)
    if damaged:
        read += list(damaged_pairs(read))
    read += [pair for path in unseen for pair in read_pairs(path)]
    if not read:
        raise PastaError("no pairs to judge", hint="Give --pairs FILE or --alpaca-eval FOLDER.")
    return read


def at_most(limit: int | None, pairs: list[Pair]) -> list[Pair]:
    """Return `limit` pairs of each source, always the same ones; all of them without a limit."""
    from pasta_decoding.eval.judge.base import fingerprint

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
    """May the judge drive training? Only if it may by every source."""
    return all(report.usable_for_training for report in reports)


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
        typer.echo(f"{line}  {'usable' if one.usable_for_training else 'not usable'}{missing}")
    typer.echo(f"usable for training by every source: {'yes' if usable(reports) else 'no'}")


def columns(figures: Figures | None) -> str:
    """Return the columns of one kind of pairs."""
    if figures is None:
        return f"{'0':>7}{'':39}"
    gain = f"{figures.gain.value:+.3f} [{figures.gain.low:+.3f},{figures.gain.high:+.3f}]"
    return (
        f"{figures.pairs:7}{figures.floor:8.3f}{figures.accuracy.value:7.3f} {gain:>22}".ljust(44)
        + "  "
    )


def track(answers: Sequence[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Hand the answers on, and show how far it is."""
    from rich.console import Console
    from rich.progress import track

    return track(answers, "measuring", console=Console(stderr=True), transient=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error, and hand out what moves it."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
