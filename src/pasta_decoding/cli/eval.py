"""Commands that compare methods: `eval generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.cli.bars import counting
from pasta_decoding.cli.console import cache_folder, say
from pasta_decoding.cli.methods import (
    GREEDY,
    THEIRS,
    Chosen,
    Name,
    check_labels,
    check_servers,
    choose,
    make_method,
)
from pasta_decoding.cli.options import MaxTokens, Without, command
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.plan import Plan

if TYPE_CHECKING:
    from pasta_decoding.evaluation.generate import Entrant
    from pasta_decoding.evaluation.records import Record
    from pasta_decoding.runtime.decoder import Decoder

_ANSWER = GenerationConfig()

Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")]
Method = Annotated[
    list[str],
    typer.Option(
        help="sequential, pasta, sot (Skeleton-of-Thought), apar, or what transformers' own "
        "generate does: transformers (plain), lookup (prompt lookup). =ADAPTER behind it names "
        "the adapter, =none the base model alone (not pasta, apar). May be repeated."
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--max-concurrency", "--at-once", min=1, help="Prompts answered together; else 16."
    ),
]


@command()
def generate(
    prompts: Annotated[
        Path,
        typer.Option(help="JSONL (.gz) with an `instruction` a line, or AlpacaEval's JSON list."),
    ],
    out: Annotated[
        Path, typer.Option(help="A run folder a method goes here; the same command resumes.")
    ],
    method: Method,
    limit: Limit = None,
    max_tokens: MaxTokens = _ANSWER.max_tokens,
    max_concurrency: Concurrency = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="How freely tokens are drawn; 0 takes the likeliest.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens that make up this probability.")
    ] = 1.0,
    timing: Annotated[
        bool,
        typer.Option(
            "--timing", help="One answer at a time, the methods prompt by prompt in mixed order."
        ),
    ] = False,
    *,
    plan: Plan,
    loading: Annotated[EngineConfig, Without({"adapter"})],
) -> None:
    """Answer prompts by several methods on one engine, and keep a record of each answer.

    Each method's folder gets its settings, a record a prompt, and model_outputs.json, which the
    alpaca_eval package reads.
    """
    from pasta_decoding.data.questions import read_questions
    from pasta_decoding.evaluation.generate import generate as answer_all

    plan = settled(plan, max_concurrency, timing=timing)
    chosen = choose_all(method, loading, timing=timing)
    questions = read_questions(prompts)[:limit]
    settings = {"max_tokens": max_tokens} | described(plan, prompts, len(questions))
    settings["sampling"] = sampled(temperature, top_p, plan.seed)
    entrants = make_entrants(chosen, loading, settings, all_in_memory=timing)
    with progress([one.label for one in chosen], len(questions)) as tick:
        found = answer_all(entrants, questions, out, plan, tick)
    for label, records in found.items():
        show(label, records)


def settled(plan: Plan, max_concurrency: int | None, *, timing: bool) -> Plan:
    """Return the plan with one number for each thing. Refuses flags that contradict each other."""
    if timing and max_concurrency not in (None, 1):
        raise PastaError(
            "answers that are written together cannot be timed",
            hint="Leave out --max-concurrency, or --timing.",
        )
    if plan.repeats is not None and not timing:
        raise PastaError("--repeats is for --timing", hint="Leave it out, or add --timing.")
    if timing:
        return replace(plan, max_concurrency=1, repeats=plan.repeats or 3)
    return replace(plan, max_concurrency=max_concurrency or plan.max_concurrency)


def choose_all(methods: Sequence[str], loading: EngineConfig, *, timing: bool) -> list[Chosen]:
    """Read every --method. Refuses those that do not go together, or not on servers."""
    chosen = [choose(text) for text in methods]
    check_labels(chosen)
    if loading.is_remote:
        check_servers(chosen, timing=timing)
    return chosen


def described(plan: Plan, prompts: Path, number: int) -> dict[str, Any]:
    """Return what answers depend on whatever the method, as run.json has it."""
    from pasta_decoding.cli.annotate import digest
    from pasta_decoding.evaluation.machine import machine

    timing = plan.repeats is not None
    settings = {
        "max_seconds": plan.max_seconds,
        "prompts": {"file": prompts.name, "sha256": digest(prompts), "number": number},
        "seed": plan.seed,
        "timing": timing,
        "repeats": plan.repeats,
        "max_concurrency": plan.max_concurrency,
    }
    # Seconds of two machines are not of one run.
    return settings | ({"machine": machine()} if timing else {})


def sampled(temperature: float, top_p: float, seed: int) -> str | dict[str, float]:
    """Return how tokens are chosen, as run.json has it. Raises PastaError for what cannot be."""
    config = GenerationConfig(temperature=temperature, top_p=top_p, seed=seed)
    if config.sampling().greedy:
        return GREEDY
    return {"temperature": temperature, "top_p": top_p, "seed": seed}


def make_entrants(
    chosen: Sequence[Chosen],
    loading: EngineConfig,
    settings: dict[str, Any],
    *,
    all_in_memory: bool,
) -> list[Entrant]:
    """Return the methods, ready to be loaded; those with one adapter share a decoder.

    all_in_memory: keep every decoder loaded; else only the last one.
    """
    from pasta_decoding.api.opening import open_decoder
    from pasta_decoding.evaluation.generate import Entrant

    if loading.model is not None and loading.model.suffix == ".gguf":
        raise PastaError(
            "a GGUF file holds one adapter, and methods differ in theirs",
            hint="Give --model the folder of the base model.",
        )

    @lru_cache(maxsize=None if all_in_memory else 1)
    def decoder(adapter: str, engine: str) -> Decoder:
        return open_decoder(replace(loading.of(adapter), engine=engine), cache_folder())

    def entrant(one: Chosen) -> Entrant:
        engine = "torch" if one.name in THEIRS else loading.engine
        own = describe(replace(loading.of(one.adapter), engine=engine))
        own["method"] = one.name.value
        if one.name in THEIRS:
            own["engine"] = "transformers"
        if one.name is Name.transformers:
            own["method"] = "sequential"  # which it is: the baseline on an engine of its own
        return Entrant(
            one.label,
            own | settings,
            partial(make_method, one, lambda: decoder(one.adapter, engine), settings),
        )

    return [entrant(one) for one in chosen]


def describe(loading: EngineConfig) -> dict[str, Any]:
    """Return what is decoded on what, as run.json has it."""
    from pasta_decoding.api.opening import ENGINES, choose_engine, find
    from pasta_decoding.models.bases import DEFAULT_MODEL
    from pasta_decoding.models.load import adapter_digest

    checkpoint = find(loading, cache_folder())
    engine, folder = choose_engine(checkpoint), checkpoint.adapter
    adapter = folder and {"name": loading.adapter, "sha256": adapter_digest(folder)}
    return {
        "adapter": adapter,
        "model": DEFAULT_MODEL if loading.model is None else str(loading.model),
        "engine": engine,
        "file_type": ENGINES[engine].dtype(checkpoint),
        "context": loading.cache_tokens,
        "threads": loading.threads,
        "device": loading.device,
        # Unless it is named, the adapter's digest tells it.
        "join": loading.join and loading.join.value,
    }


@contextmanager
def progress(labels: Sequence[str], total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar a method on standard error, and hand out what moves one."""
    with counting() as bars:
        tasks = {label: bars.add_task(label, total=total) for label in labels}
        yield lambda label: bars.advance(tasks[label])


def show(label: str, records: Sequence[Record]) -> None:
    """Print a line on one method, and name what failed."""
    from pasta_decoding.lang.measures import geometric_mean

    done = [record for record in records if record.error is None]
    failures = len(records) - len(done)
    line = f"{label}: {len(records)} prompts, {failures} failed"
    if done:
        tokens = sum(record.plain_tokens for record in done) / len(done)
        speedup = geometric_mean(record.own_speedup for record in done)
        line += f", {tokens:.0f} tokens on average, own speedup {speedup:.2f}"
    typer.echo(line)
    for record in records:
        if record.error is not None:
            say(f"failed: {record.instruction[:60]!r}: {record.error}")
