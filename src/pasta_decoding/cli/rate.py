"""The command `eval rate`: how good the answers of a run are."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.cli.bars import progress
from pasta_decoding.cli.console import base_folder, say
from pasta_decoding.cli.keys import UNNAMED, named
from pasta_decoding.cli.options import command
from pasta_decoding.data.endpoint import Endpoint
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.evaluation.judge.base import Judge, JudgedPair
    from pasta_decoding.evaluation.rate import Nll
    from pasta_decoding.evaluation.runs import MethodRun

VERDICTS = "verdicts.jsonl"


@dataclass(frozen=True, slots=True)
class Asking:
    """Who compares the answers: one of these, or nobody."""

    base_url: Annotated[
        str | None, typer.Option(help="Let this OpenAI-compatible endpoint compare the answers.")
    ] = None
    model: Annotated[str | None, typer.Option(help="The endpoint's model.")] = None
    logprobs: Annotated[
        bool, typer.Option(help="Read the first token's probabilities if the endpoint has them.")
    ] = True
    annotator: Annotated[
        str | None,
        typer.Option(help="Instead: an annotator configuration of the package alpaca_eval."),
    ] = None
    judged: Annotated[
        list[Path] | None,
        typer.Option(
            help="Instead: what people said of the pairs of `judge pairs`; may be repeated."
        ),
    ] = None
    difficulty: Annotated[
        Path | None, typer.Option(help="AlpacaEval's instruction_difficulty.csv; needs --prompts.")
    ] = None
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL (.gz) that tells each instruction's instruction_id.")
    ] = None


@command()
def rate(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of `eval generate`, or the folder around them.")
    ],
    baseline: Annotated[
        Path | None, typer.Option(help="The run to compare with; the sequential one if left out.")
    ] = None,
    likelihood: Annotated[
        bool, typer.Option(help="Rate all texts by nats per token, repetition, missing topics.")
    ] = True,
    adapter: Annotated[
        str, typer.Option(help="The model whose nats these are: a sequential one.")
    ] = "sequential",
    base: Annotated[
        Path | None,
        typer.Option(help="Folder or hub name of its base model; the default one if left out."),
    ] = None,
    *,
    asking: Asking,
    endpoint: Endpoint = UNNAMED,
) -> None:
    """Rate answers against the baseline's: without a judge, and with one where you have one.

    Writes quality.jsonl and annotations.json into the run folders; the same command goes on where
    it was stopped, and asks again where there was no verdict. Keys come from
    PASTA_ENDPOINT_KEY or OPENAI_API_KEY; --annotator takes what alpaca_eval takes.
    """
    from pasta_decoding.evaluation.runs import beside_baseline

    check_asking(asking)
    said, difficulties = read_files(asking)
    reference, rated = beside_baseline(runs, baseline)
    if likelihood:
        rate_all_texts(rated, reference, adapter, base)
    for run in rated:
        if run.folder.resolve() != reference.folder.resolve():
            compare(run, reference, asking, endpoint, said, difficulties)


def check_asking(asking: Asking) -> None:
    """Refuse what does not go together."""
    if sum(map(bool, (asking.base_url, asking.annotator, asking.judged))) > 1:
        raise PastaError("several judges", hint="Give one of --base-url, --annotator and --judged.")
    if (asking.base_url is None) != (asking.model is None):
        raise PastaError("an endpoint is --base-url and --model", hint="Give both.")
    if (asking.difficulty is None) != (asking.prompts is None):
        raise PastaError("difficulties are --difficulty and --prompts", hint="Give both.")


def read_files(asking: Asking) -> tuple[list[JudgedPair], dict[str, float] | None]:
    """Return what people said and how difficult the prompts are, before anything long begins."""
    from pasta_decoding.evaluation.judge.pairs import read_pairs
    from pasta_decoding.evaluation.rate import read_difficulties

    said = [pair for path in asking.judged or () for pair in read_pairs(path)]
    if asking.difficulty and asking.prompts:
        return said, read_difficulties(asking.difficulty, asking.prompts)
    return said, None


def rate_all_texts(
    runs: list[MethodRun], baseline: MethodRun, adapter: str, base: Path | None
) -> None:
    """Rate every answer without a judge."""
    from pasta_decoding.evaluation.rate import rate_texts, remembering

    nll, under = load_likelihood(adapter, base)
    asked_once = remembering(nll)
    with progress("rating", sum(len(run.records) for run in runs)) as tick:
        for run in runs:
            rate_texts(run, baseline, asked_once, under, tick)


def load_likelihood(adapter: str, base: Path | None) -> tuple[Nll, str]:
    """Return what tells the NLL per token of a text, and a name for it."""
    from pasta_decoding.evaluation.rating import load_nll
    from pasta_decoding.models.load import (
        adapter_digest,
        default_device,
        find_adapter,
        native_dtype,
    )
    from pasta_decoding.training.score import score_layouts

    device = default_device()
    dtype, folder = native_dtype(device), find_adapter(adapter)
    nll = load_nll(base_folder(base), folder, score_layouts, dtype=dtype, device=device)
    name = f"{folder.resolve().name} {adapter_digest(folder)}"
    return nll, f"{name} ({base.name if base else 'default'}, {dtype})"


def compare(
    run: MethodRun,
    baseline: MethodRun,
    asking: Asking,
    endpoint: Endpoint,
    said: list[JudgedPair],
    difficulties: dict[str, float] | None,
) -> None:
    """Let whoever there is compare a run's answers with the baseline's."""
    from pasta_decoding.evaluation.rate import annotate, pairs_to_judge

    orders = 2 if asking.base_url else 1
    with progress(f"judging {run.label}", orders * len(pairs_to_judge(run, baseline))) as tick:
        found = open_judge(run, asking, endpoint, said, tick)
        if found is None:
            return
        judge, name, failures = found
        missing = annotate(run, baseline, judge, name, difficulties)
    for reason, times in failures.most_common():
        say(f"{run.label}: no verdict ({times} times): {reason}")
    say(f"{run.label}: {len(run.records) - missing} verdicts of {name}, {missing} missing")


def open_judge(
    run: MethodRun,
    asking: Asking,
    endpoint: Endpoint,
    said: list[JudgedPair],
    tick: Callable[[], None],
) -> tuple[Judge, str, Counter[str]] | None:
    """Return who compares, under which name, and where it counts its failures."""
    if asking.base_url is not None and asking.model is not None:
        from pasta_decoding.evaluation.judge.llm import LlmJudge

        asked = named(endpoint, asking.base_url, asking.model)
        cache = run.folder / VERDICTS
        llm = LlmJudge(asked, cache, logprobs=asking.logprobs, tick=tick)
        return llm, f"{asking.model}, both orders", llm.failures
    if asking.annotator is not None:
        from pasta_decoding.evaluation.alpaca import AlpacaAnnotator

        os.environ.setdefault("TQDM_DISABLE", "1")  # its bars would be drawn over ours
        cache = run.folder / f"alpaca_{VERDICTS}"
        package = AlpacaAnnotator(asking.annotator, cache, retries=endpoint.max_retries, tick=tick)
        return package, Path(asking.annotator).name, package.failures
    if asking.judged:
        from pasta_decoding.evaluation.judge.pairs import source_name
        from pasta_decoding.evaluation.judge.readers import Readers

        return Readers(said, tick=tick), ", ".join(map(source_name, asking.judged)), Counter()
    return None
