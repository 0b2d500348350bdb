"""Commands that compare methods: `eval generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.api.settings import EngineName
from pasta_decoding.cli.decode import MaxTokens
from pasta_decoding.cli.engine import Loading, with_loading
from pasta_decoding.cli.files import say
from pasta_decoding.errors import PastaError
from pasta_decoding.models.loading import DEFAULT_ADAPTER, NO_ADAPTER

if TYPE_CHECKING:
    from pasta_decoding.evaluation.generate import Entrant
    from pasta_decoding.evaluation.methods.base import Method
    from pasta_decoding.evaluation.records import Record
    from pasta_decoding.runtime.decoder import Decoder


class Name(StrEnum):
    """The methods."""

    sequential = "sequential"
    pasta = "pasta"
    sot = "sot"
    apar = "apar"


DEFAULT_ADAPTERS = {
    Name.sequential: "sequential",
    Name.pasta: DEFAULT_ADAPTER,
    Name.sot: "sequential",
    Name.apar: "apar",
}
TRAINED = (Name.pasta, Name.apar)


@dataclass(frozen=True, slots=True)
class Chosen:
    """One --method: its name and adapter, and the label of its run folder."""

    name: Name
    adapter: str
    label: str


@partial(with_loading, without={"adapter"})
def generate(
    prompts: Annotated[
        Path,
        typer.Option(help="JSONL (.gz) with an `instruction` a line, or AlpacaEval's JSON list."),
    ],
    out: Annotated[
        Path, typer.Option(help="A run folder a method goes here; the same command resumes.")
    ],
    method: Annotated[
        list[str],
        typer.Option(
            help="sequential, pasta, sot (Skeleton-of-Thought) or apar; =ADAPTER behind it names "
            "the adapter, =none the base model alone (sequential and sot). May be repeated."
        ),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = (
        None
    ),
    max_tokens: MaxTokens = 512,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency", "--at-once", min=1, help="Prompts answered together; else 16."
        ),
    ] = None,
    timing: Annotated[
        bool,
        typer.Option(
            "--timing", help="One answer at a time, the methods prompt by prompt in mixed order."
        ),
    ] = False,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Turns with --timing, 3 if left out; medians count.")
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(min=1, help="An answer that takes longer has failed.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Shuffles the order that --timing takes.")] = 0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask again where a request failed before.")
    ] = False,
    *,
    loading: Loading,
) -> None:
    """Answer prompts by several methods on one engine, and keep a record of each answer.

    Each method's folder gets its settings, a record a prompt, and model_outputs.json, which the
    alpaca_eval package reads.
    """
    from pasta_decoding.cli.annotate import digest
    from pasta_decoding.evaluation.generate import Plan
    from pasta_decoding.evaluation.generate import generate as answer_all
    from pasta_decoding.evaluation.machine import machine
    from pasta_decoding.evaluation.questions import read_questions

    check_flags(max_concurrency, repeats, timing=timing)
    chosen = [choose(text) for text in method]
    check_labels(chosen)
    if loading.settings.is_remote:
        check_servers(chosen, timing=timing)
    questions = read_questions(prompts)[:limit]
    plan = Plan(
        1 if timing else max_concurrency or 16,
        (repeats or 3) if timing else None,
        max_seconds,
        seed,
        retry_failed,
    )
    settings = {
        "max_tokens": max_tokens,
        "max_seconds": max_seconds,
        "prompts": {"file": prompts.name, "sha256": digest(prompts), "number": len(questions)},
        "sampling": "greedy",
        "seed": seed,
        "timing": timing,
        "repeats": plan.repeats,
        "max_concurrency": plan.max_concurrency,
    }
    if timing:
        settings["machine"] = machine()  # seconds of two machines are not of one run
    entrants = make_entrants(chosen, loading, settings, all_in_memory=timing)
    with progress([one.label for one in chosen], len(questions)) as tick:
        found = answer_all(entrants, questions, out, plan, tick)
    for label, records in found.items():
        show(label, records)


def check_flags(max_concurrency: int | None, repeats: int | None, *, timing: bool) -> None:
    """Refuse flags that contradict each other."""
    if timing and max_concurrency not in (None, 1):
        raise PastaError(
            "answers that are written together cannot be timed",
            hint="Leave out --max-concurrency, or --timing.",
        )
    if repeats is not None and not timing:
        raise PastaError("--repeats is for --timing", hint="Leave it out, or add --timing.")


def check_servers(chosen: Sequence[Chosen], *, timing: bool) -> None:
    """Refuse what servers cannot do."""
    if timing:
        raise PastaError(
            "--timing is for an engine in this process",
            hint="Leave it out; bench/serve_load.py measures servers under load.",
        )
    if any(one.name is Name.sot for one in chosen):
        raise PastaError(
            "sot ends answers where their text says so, which servers cannot",
            hint="Leave out --method sot, or --engine remote.",
        )
    adapters = sorted({one.adapter for one in chosen})
    if len(adapters) > 1:
        raise PastaError(
            f"the servers have one checkpoint, and methods differ in theirs: {', '.join(adapters)}",
            hint="Name what is served: --method pasta=FOLDER --method sequential=FOLDER. What "
            "other servers have is for another run into the same --out.",
        )


def choose(text: str) -> Chosen:
    """Read one --method."""
    name, given, adapter = text.partition("=")
    if name not in list(Name) or (given and not adapter):
        raise PastaError(
            f"--method {text!r} is none of {', '.join(Name)}",
            hint="An adapter may follow, as in pasta=balanced.",
        )
    if not given:
        return Chosen(Name(name), DEFAULT_ADAPTERS[Name(name)], name)
    if adapter == NO_ADAPTER and name in TRAINED:
        raise PastaError(f"{name} needs an adapter", hint="Only sequential and sot do without.")
    return Chosen(Name(name), adapter, f"{name}-{Path(adapter).name}")


def check_labels(chosen: Sequence[Chosen]) -> None:
    """Refuse two methods with one folder."""
    labels = [one.label for one in chosen]
    for label in labels:
        if labels.count(label) > 1:
            raise PastaError(
                f"--method is given twice for the folder {label!r}",
                hint="Take one out, or rename an adapter's folder.",
            )


def make_entrants(
    chosen: Sequence[Chosen], loading: Loading, settings: dict[str, Any], *, all_in_memory: bool
) -> list[Entrant]:
    """Return the methods, ready to be loaded; those with one adapter share a decoder.

    all_in_memory: keep every decoder loaded; else only the last one.
    """
    from pasta_decoding.evaluation.generate import Entrant

    if loading.model is not None and loading.model.suffix == ".gguf":
        raise PastaError(
            "a GGUF file holds one adapter, and methods differ in theirs",
            hint="Give --model the folder of the base model.",
        )

    @lru_cache(maxsize=None if all_in_memory else 1)
    def decoder(adapter: str) -> Decoder:
        return loading.of(adapter).decoder()

    def entrant(one: Chosen) -> Entrant:
        own = {"method": one.name.value, **describe(loading.of(one.adapter))}
        max_tokens: int = settings["max_tokens"]
        load = partial(make_method, one, decoder, max_tokens)
        return Entrant(one.label, own | settings, load)

    return [entrant(one) for one in chosen]


def describe(loading: Loading) -> dict[str, Any]:
    """Return what is decoded on what, as run.json has it."""
    from pasta_decoding.models import embedded
    from pasta_decoding.models.loading import adapter_digest

    base, folder = loading.folders()
    engine, number_format = EngineName.remote, None
    if not loading.settings.is_remote:
        engine, number_format = loading.computing(base, folder)
    adapter = folder and {"name": loading.adapter, "sha256": adapter_digest(folder)}
    return {
        "adapter": adapter,
        "model": embedded.NAME if loading.model is None else str(loading.model),
        "engine": engine.value,
        "file_type": number_format,
        "context": loading.context,
        "threads": loading.threads,
        "device": loading.device,
        # Unless it is named, the adapter's digest tells it.
        "join": loading.join and loading.join.value,
    }


def make_method(one: Chosen, decoder: Callable[[str], Decoder], max_tokens: int) -> Method:
    """Load a method's model."""
    from pasta_decoding.evaluation.methods.own import Own
    from pasta_decoding.evaluation.methods.skeleton import Skeleton
    from pasta_decoding.runtime.local import LocalDecoder

    if one.name is Name.sot:
        local = decoder(one.adapter)
        assert isinstance(local, LocalDecoder), "refused before"
        return Skeleton(local, max_tokens)
    return Own(decoder(one.adapter), max_tokens, parallel=one.name in TRAINED)


@contextmanager
def progress(labels: Sequence[str], total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar a method on standard error, and hand out what moves one."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
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
