"""The commands `eval generate` and `eval report`."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.api.opening import ENGINES, choose_engine, find_files
from pasta_decoding.cli.console import bar, cache_folder, say
from pasta_decoding.cli.opening import decoder_for
from pasta_decoding.cli.options import HiddenFields, command
from pasta_decoding.data.endpoint import Endpoint, endpoint_key
from pasta_decoding.data.lines import locked
from pasta_decoding.data.rows import read_questions
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.provenance import machine
from pasta_decoding.evaluation.records import Record, find_runs
from pasta_decoding.files import sha256, write_json, write_text
from pasta_decoding.lang.measures import geometric_mean
from pasta_decoding.models.catalog import adapter_digest, base_name, model_beside
from pasta_decoding.scheduling.decoder import Decoder

if TYPE_CHECKING:
    from pasta_decoding.evaluation.generate import Job, Plan
    from pasta_decoding.evaluation.methods import Method, MethodChoice

TIMED_REPEATS = 3
"""With --timing, each method answers a prompt this often; the report takes the median."""


@command(
    "pasta eval generate --prompts prompts.jsonl --out runs --method sequential --method pasta",
    "pasta eval generate --prompts prompts.jsonl --out runs --method hf --method lookup --timing",
)
def generate(
    prompts: Annotated[Path, typer.Option(help="JSONL (.gz) or AlpacaEval's JSON.")],
    out: Annotated[Path, typer.Option(help="Folder of the runs; resumes them.")],
    method: Annotated[
        list[str],
        typer.Option(
            help="pasta, sequential, sot (Skeleton-of-Thought), hf (transformers' generate), lookup"
            " (hf with prompt lookup) or apar; NAME=ADAPTER, NAME=none. Repeatable."
        ),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Prompts at a time (16).")
    ] = None,
    max_seconds: Annotated[
        int, typer.Option(min=1, help="Seconds of silence that fail an answer.")
    ] = 600,
    timing: Annotated[
        bool, typer.Option("--timing", help="One prompt at a time, in 3 turns.")
    ] = False,
    *,
    generation: GenerationConfig,
    engine: Annotated[EngineConfig, HiddenFields({"adapter", "join", "max_model_len"})],
) -> None:
    """Answer prompts by several methods on one engine; keep a record of each answer."""
    from pasta_decoding.evaluation.generate import Plan, answer_all
    from pasta_decoding.evaluation.methods import choose_methods

    if timing and max_concurrency not in (None, 1):
        raise PastaError("--timing answers one prompt at a time: leave out --max-concurrency")
    if timing and engine.is_remote:
        raise PastaError("--timing is for an engine in this process")
    plan = Plan(
        max_concurrency=1 if timing else max_concurrency or 16,
        repeats=TIMED_REPEATS if timing else None,
        max_seconds=max_seconds,
        seed=generation.seed,
    )
    choices = choose_methods(method, engine.model, remote=engine.is_remote)
    questions = read_questions(prompts)[:limit]
    settings = settings_of(plan, generation, prompts, len(questions))
    jobs = jobs_of(choices, engine, generation, settings)
    with locked(out), bar(desc="answering", total=len(choices) * len(questions)) as progress:
        records_by_label = answer_all(jobs, questions, out, plan, progress.update)
    for label, records in records_by_label.items():
        print_summary(label, records)


def settings_of(
    plan: Plan, config: GenerationConfig, prompts: Path, prompt_count: int
) -> dict[str, Any]:
    """Return the settings that answers of all methods depend on, as run.json has them."""
    sampling: Any = "greedy"
    if config.temperature:
        sampling = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": config.seed,
        }
    settings = {
        "max_tokens": config.max_tokens,
        "max_seconds": plan.max_seconds,
        "prompts": {
            "file": prompts.name,
            "sha256": sha256(prompts)[:16],
            "number": prompt_count,
        },
        "sampling": sampling,
        "eagerness": config.eagerness,
        "repeats": plan.repeats,
        "max_concurrency": plan.max_concurrency,
    }
    if plan.repeats:  # a run that measures seconds belongs to one machine
        settings["machine"] = machine()
    return settings


def jobs_of(
    choices: Sequence[MethodChoice],
    engine: EngineConfig,
    config: GenerationConfig,
    settings: dict[str, Any],
) -> list[Job]:
    """Return a job for each method. Methods with the same adapter and engine share a decoder."""
    from pasta_decoding.evaluation.generate import Job
    from pasta_decoding.evaluation.methods import TRANSFORMERS_METHODS, make_method

    decoders: dict[EngineConfig, Decoder] = {}

    def shared_decoder(engine: EngineConfig) -> Decoder:
        if engine not in decoders:
            # Timed methods take turns, so all decoders stay loaded. Others need one at a time.
            if settings["repeats"] is None:
                decoders.clear()
                gc.collect()
            decoders[engine] = decoder_for(engine)
        return decoders[engine]

    def job(choice: MethodChoice) -> Job:
        by_transformers = choice.name in TRANSFORMERS_METHODS
        engine_of_method = replace(
            engine,
            adapter=choice.adapter,
            model=model_beside(choice.adapter, engine.model),
            engine="torch" if by_transformers else engine.engine,
        )
        description = describe(engine_of_method) | settings | {"method": choice.name}
        if by_transformers:
            description["engine"] = "transformers"

        def load() -> Method:
            return make_method(choice.name, shared_decoder(engine_of_method), config)

        return Job(choice.label, description, load)

    return [job(choice) for choice in choices]


def describe(engine: EngineConfig) -> dict[str, Any]:
    """Return the checkpoint and its engine, as run.json has them."""
    files = find_files(engine, cache_folder())
    name = choose_engine(files)
    path = files.source.checkpoint_path
    return {
        "adapter": path and {"name": engine.adapter, "sha256": adapter_digest(path)},
        "model": str(engine.model) if engine.model else base_name(path),
        "engine": name,
        "file_type": ENGINES[name].dtype(files),
        "context": engine.cache_tokens,
        "threads": engine.threads,
        "device": engine.device,
        "join": engine.join and engine.join.value,  # None: the adapter's digest implies it
    }


def print_summary(label: str, records: Sequence[Record]) -> None:
    """Print means of a method's answers, and each failure."""
    done = [record for record in records if record.error is None]
    failed = [record for record in records if record.error is not None]
    line = f"{label}: {len(records)} prompts, {len(failed)} failed"
    if done:
        tokens = sum(record.plain_tokens for record in done) / len(done)
        speed = geometric_mean(record.tokens_per_step for record in done)
        line += f", {tokens:.0f} tokens on average, {speed:.2f} tokens per step"
    typer.echo(line)
    for record in failed:
        say(f"failed: {record.instruction[:60]!r}: {record.error}")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders of `eval generate`, or the folder that holds them."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")] = Path("report"),
    judge_base_url: Annotated[
        str | None, typer.Option(help="OpenAI-compatible endpoint of a judge, as http://host/v1.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's model.")] = None,
) -> None:
    """Compare runs with the first sequential run; write index.html and report.json.

    A judge compares each run's answers with the baseline's, in both orders. Run folders keep its
    verdicts, and the same command resumes there. The endpoint's key is PASTA_ENDPOINT_KEY, else
    OPENAI_API_KEY. Without a judge, win rates are read from the files that alpaca_eval left in the
    run folders. Figures have 95 % intervals and count failed answers.
    """
    from pasta_decoding.evaluation.judged import judge_run
    from pasta_decoding.evaluation.report import build_report, numbers, render

    folders = find_runs(runs)
    if judge_base_url is None and judge_model is None:
        comparison = build_report(folders)
    elif judge_base_url is None or judge_model is None:
        raise PastaError("a judge is named by --judge-base-url http://host/v1 and --judge-model m")
    else:
        judge = Endpoint(judge_base_url, judge_model, endpoint_key(os.environ))
        verdict_count = 2 * len(folders[0].records) * (len(folders) - 1)
        with bar(desc="judging", total=verdict_count) as progress:
            comparison = build_report(folders, partial(judge_run, judge, progress.update))
    write_text(out / "index.html", render(comparison))
    write_json(out / "report.json", numbers(comparison))
    for note in comparison.notes:
        say(note)
    typer.echo(out / "index.html")
