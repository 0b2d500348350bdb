"""Commands that measure: `bench answers`, `bench annotations`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.bars import drawn, progress
from pasta_decoding.cli.files import base_folder, cache_folder, place, say
from pasta_decoding.cli.options import AsJson, Base, DefaultModel, MaxTokens, with_options
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pasta_decoding.data.dataset import Row
    from pasta_decoding.evaluation.bare import BareTimes
    from pasta_decoding.evaluation.bench_answers import Examined
    from pasta_decoding.evaluation.records import Record
    from pasta_decoding.lang.tree import Tree
    from pasta_decoding.runtime.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Amount:
    """How many prompts are answered, in which ways."""

    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first so many.")] = None
    sequential: Annotated[
        int | None, typer.Option(min=0, help="Answer only the first so many sequentially, too.")
    ] = None
    timed: Annotated[
        int | None,
        typer.Option(min=0, help="Time a replay of the first so many: 20, of servers none."),
    ] = None
    max_concurrency: Annotated[
        int,
        typer.Option(
            "--max-concurrency",
            "--at-once",
            min=1,
            help="Answers written together: sooner done, but not timed.",
        ),
    ] = 1


@with_options
def answers(
    prompts: Annotated[Path, typer.Option(help="JSONL (.gz) with an `instruction` a line.")],
    max_tokens: MaxTokens = 400,
    records: Annotated[
        Path | None, typer.Option(help="Keep a line a prompt here; the same command resumes.")
    ] = None,
    as_json: AsJson = False,
    *,
    amount: Amount,
    loading: EngineConfig,
) -> None:
    """Answer prompts in parallel and sequentially; report speedups and what goes wrong."""
    from pasta_decoding.api.opening import open_decoder
    from pasta_decoding.cli.eval import describe
    from pasta_decoding.data.questions import read_questions
    from pasta_decoding.evaluation.bench_answers import Bench, bench, summary

    number_timed = number_to_time(amount, loading)
    questions = read_questions(prompts)[: amount.limit]
    decoder = open_decoder(loading, place())
    plan = Bench(
        decoder,
        max_tokens,
        compared=frozenset(question.id for question in questions[: amount.sequential]),
        timed=frozenset(question.id for question in questions[:number_timed]),
        bare=bare_times(decoder) if number_timed else None,
    )
    with progress("answering", len(questions)) as tick:
        together = amount.max_concurrency
        found = bench(
            plan,
            questions,
            settings=describe(loading) | {"max_tokens": max_tokens},
            out=records,
            tick=tick,
            max_concurrency=together,
        )
    figures = summary(found) | {"engine": decoder.name}
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        show_figures(figures, found)


def number_to_time(amount: Amount, loading: EngineConfig) -> int:
    """Return how many answers are replayed and timed. Raises PastaError where none can be."""
    if loading.is_remote:
        if amount.timed:
            raise PastaError("servers cannot replay an answer", hint="Leave out --timed.")
        return 0
    if amount.max_concurrency > 1 and amount.timed != 0:
        raise PastaError(
            "answers that are written together cannot be timed",
            hint="Give --timed 0, or leave --max-concurrency out.",
        )
    return 20 if amount.timed is None else amount.timed


def bare_times(decoder: Decoder) -> BareTimes:
    """Return what times the engine's bare calls. Raises PastaError where there is no such call."""
    from pasta_decoding.evaluation.bare import BareTimes, bare_call
    from pasta_decoding.runtime.local import LocalDecoder

    assert isinstance(decoder, LocalDecoder), "answers of servers are not timed"
    if decoder.joining is Joining.text:
        raise PastaError(
            "what a text join feeds again has no bare call to be compared with",
            hint="Give --timed 0, or --join kv.",
        )
    return BareTimes(bare_call(decoder.engine))


def show_figures(figures: dict[str, Any], examined: list[Examined]) -> None:
    """Print the figures as lines, and name what failed."""
    for name, value in figures.items():
        typer.echo(f"{name:26} {shown(value)}")
    for record in (one.record for one in examined):
        if record.error:
            say(f"failed: {record.instruction[:60]!r}: {record.error}")


def shown(value: Any) -> str:
    """Return a figure, or figures by name, with three decimals."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) or "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def compare(
    first: Annotated[Path, typer.Argument(help="Records of `bench answers`.")],
    second: Annotated[Path, typer.Argument(help="Records of the same prompts.")],
    baseline: Annotated[
        str | None, typer.Option(help="Adapter under which answers are rated (nats a token).")
    ] = None,
    model: DefaultModel = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints prompt by prompt, with paired bootstrap intervals.

    With --baseline also by quality: minus nats per token of the plain answer under that model,
    minus a penalty for repetition.
    """
    from pasta_decoding.evaluation.bench_answers import read_examined
    from pasta_decoding.evaluation.compare import compare as compare_records
    from pasta_decoding.evaluation.compare import paired

    if not (first.is_file() and second.is_file()):
        missing = second if first.is_file() else first
        raise PastaError(f"{missing}: no such file", hint="`bench answers --records` writes one.")
    pairs = paired(*([one.record for one in read_examined(path)] for path in (first, second)))
    quality = rate_pairs(pairs, baseline, model) if baseline else None
    figures = compare_records(pairs, quality)
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, found in figures.items():
        typer.echo(f"{name:24} {found if isinstance(found, int) else _change(found)}")


def _change(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    kind = "ratio" if "ratio" in found else "difference"
    change = {key: value for key, value in found[kind].items() if key != "excludes_no_change"}
    return f"{found['first']:.3f} -> {found['second']:.3f}   {kind} {_cell(**change)}"


def rate_pairs(
    pairs: Sequence[tuple[Record, Record]], baseline: str, model: Path | None
) -> dict[str, Sequence[float]]:
    """Return the quality of both answers to each prompt, under the sequential baseline."""
    from pasta_decoding.evaluation.rating import likelihood_rate, load_nll
    from pasta_decoding.models.bases import model_dir
    from pasta_decoding.models.load import default_device, find_adapter, native_dtype
    from pasta_decoding.training.score import score_layouts

    base, device = model or model_dir(cache_folder()), default_device()
    dtype = native_dtype(device)
    nll = load_nll(base, find_adapter(baseline), score_layouts, dtype=dtype, device=device)
    rate = likelihood_rate(nll)
    return {
        first.instruction: rate(first.instruction, [first.text, second.text])
        for first, second in drawn(pairs, "rating")
        if first.text and second.text
    }


def compare_annotations(
    gold: Annotated[Path, typer.Argument(help="JSONL (.gz) with annotations thought right.")],
    annotated: Annotated[Path, typer.Argument(help="JSONL (.gz), the same responses.")],
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only the quarter that nothing is trained on.")
    ] = False,
    nats: Annotated[
        bool, typer.Option("--nats", help="Also what hiding chunks costs the base model; slow.")
    ] = False,
    model: Base = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far annotations agree with others of the same responses, found by their id.

    The layout rule (list items, else paragraphs) is measured on the same rows, for scale. With
    --nats also the price: what a token of a chunk costs more with its siblings hidden, under the
    base model. It has its own line for the careful annotation, too.
    """
    from pasta_decoding.data.dataset import is_held_out, read_rows

    right = [row for row in read_rows(gold) if is_held_out(row.id) or not held_out]
    rows, found = measured(right, list(read_rows(annotated)), model, nats=nats)
    figures = {"rows": rows, "missing": len(right) - rows}
    if as_json:
        typer.echo(json.dumps(figures | found))
    else:
        show_figures(figures, [])
        show_agreement(found)


def measured(
    right: list[Row], given: list[Row], model: Path | None, *, nats: bool
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return how many responses are compared, and the figures of each annotation of them."""
    from pasta_decoding.evaluation.agreement import agreement, layout_rule, match

    pairs = match(right, given)
    token_ends = token_end_finder()
    trees = {
        "annotation": [tree for _, tree in pairs],
        "layout_rule": [layout_rule(tree) for tree, _ in pairs],
    }
    golden = [tree for tree, _ in pairs]
    found = {
        name: asdict(agreement(list(zip(golden, own, strict=True)), token_ends))
        for name, own in trees.items()
    }
    if nats:
        ids = {row.id for row in given}
        matched = [row for row in right if row.id in ids]
        for name, cost in hiding_nats_of(matched, trees | {"gold": golden}, model).items():
            found.setdefault(name, {})["hiding_nats"] = cost
    return len(pairs), found


def hiding_nats_of(
    rows: Sequence[Row], annotations: Mapping[str, Sequence[Tree]], model: Path | None
) -> dict[str, dict[str, float]]:
    """Return what hiding costs in several annotations of the same rows, with intervals."""
    from pasta_decoding.data.annotate.hiding import hiding_costs
    from pasta_decoding.evaluation.agreement import hiding_nats
    from pasta_decoding.lang.tree import show
    from pasta_decoding.training.reader import base_reader

    reader, _ = base_reader(base_folder(model))
    found = {}
    for name, trees in annotations.items():
        written = [replace(row, response=show(tree)) for row, tree in zip(rows, trees, strict=True)]
        costs = hiding_costs(reader, written)
        found[name] = asdict(hiding_nats(list(drawn(costs, name, total=len(rows)))))
    return found


def show_agreement(columns: dict[str, dict[str, Any]]) -> None:
    """Print a line a measure and a column an annotation, with 95 % intervals."""
    typer.echo(" " * 26 + "".join(f" {name:24}" for name in columns).rstrip())
    for measure in columns["annotation"]:
        cells = [
            _cell(**column[measure]) if measure in column else "" for column in columns.values()
        ]
        typer.echo(f"{measure:26}" + "".join(f" {cell:24}" for cell in cells).rstrip())


def _cell(value: float | None, low: float | None, high: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def token_end_finder() -> Callable[[str], Sequence[int]]:
    """Return a function that tells where the tokens of a text end."""
    from pasta_decoding.models.bases import model_dir
    from pasta_decoding.models.load import load_tokenizer

    tokenizer = load_tokenizer(model_dir(cache_folder()))

    def token_ends(text: str) -> Sequence[int]:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [end for _start, end in found["offset_mapping"]]

    return token_ends
