"""The commands `train sft` (stage 1) and `train preference` (stage 2)."""

import os
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from pasta_decoding.cli.console import cache_folder, say
from pasta_decoding.cli.options import ModelOption, command
from pasta_decoding.data.checks import Check, read_checks
from pasta_decoding.data.endpoint import Endpoint, endpoint_key
from pasta_decoding.data.rows import Question, Row, question_of, read_pairs, read_prompts, read_rows
from pasta_decoding.errors import PastaError, errors_as, require
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.catalog import NO_ADAPTER, find_adapter, find_base, hub_name
from pasta_decoding.models.checkpoint import read_checkpoint
from pasta_decoding.training.config import (
    IDLE_WITH_PAIRS,
    QUALITY_SOURCES,
    Config,
    PreferenceConfig,
    SftConfig,
    hidden_settings,
    read_settings_file,
)

_HIDDEN_SETTINGS = "Further keys of --config: "

SettingsFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; a run's config.json is one.")
]

MISSING_HINTS = {
    "quality": "judge, checks, likelihood, or a file that the grades of the answers will be in",
    "replay": "rows that the policy learned in stage 1, so that it keeps endings and syncs",
}

RunFolder = Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")]


@command(
    "pasta train sft --data rows.jsonl --out runs/sft",
    "pasta train sft --data rows.jsonl --plain --out runs/baseline",
    notes=f"{_HIDDEN_SETTINGS}{', '.join(sorted(hidden_settings(SftConfig)))}.",
)
def sft(
    context: typer.Context,
    out: RunFolder,
    model: ModelOption = None,
    file: SettingsFile = None,
    *,
    config: SftConfig,
) -> None:
    """Stage 1: finetune on annotated responses (LoRA and the control-token rows, or everything)."""
    settings = explicit_settings(context, file, config)
    defaults: dict[str, Any] = {"base_name": hub_name(model)}
    if settings.get("start") is not None:
        adapter = find_adapter(settings["start"])
        settings["start"] = str(adapter)
        defaults |= settings_of_adapter(adapter)
    config = SftConfig(**defaults | settings)
    require_training(config)
    from pasta_decoding.training.loop import processes
    from pasta_decoding.training.sft import train_sft

    base = find_base(model, cache_folder(), adapter=config.start or NO_ADAPTER)
    rows = rows_of(config.data)
    held_out = rows_of(config.eval_data)
    trained_prompts = {row.prompt_text for row in rows}
    overlap = sum(row.prompt_text in trained_prompts for row in held_out)
    if overlap:
        say(f"{overlap} of {len(held_out)} held-out prompts are trained on as well")
    finished = train_sft(config, rows, base=base, out=out, held_out=held_out)
    if processes().is_main_process:
        typer.echo(finished)


@command(
    "pasta train preference --prompts prompts.jsonl --policy runs/sft --baseline runs/baseline "
    "--quality grades.jsonl --replay rows.jsonl --out runs/preference",
    notes=f"{_HIDDEN_SETTINGS}{', '.join(sorted(hidden_settings(PreferenceConfig)))}.",
)
def preference(
    context: typer.Context,
    out: RunFolder,
    model: ModelOption = None,
    file: SettingsFile = None,
    samples_from: Annotated[
        Path | None,
        typer.Option(help="Use the first samples of this run folder: same policy, another lambda."),
    ] = None,
    *,
    config: PreferenceConfig,
) -> None:
    """Stage 2: train on the best and worst of sampled answers in rounds."""
    options = list(explicit_settings(context, None, config))
    if samples_from is not None:
        options.append("samples_from")
    config = PreferenceConfig(**explicit_settings(context, file, config))
    require_training(config)
    check_options(config, options)
    policy = str(find_adapter(config.policy))
    baseline = str(find_adapter(config.baseline)) if config.baseline else ""
    from pasta_decoding.training.loop import processes
    from pasta_decoding.training.preference import PreferenceRun, resolve_engine, share_samples

    base = find_base(model, cache_folder(), adapter=policy)
    config = replace(config, policy=policy, baseline=baseline)
    if not config.pairs:
        config = resolve_engine(config, base, cache_folder())
    if samples_from is not None:
        share_samples(samples_from, out, config)
    pairs = [pair for path in config.pairs for pair in read_pairs(Path(path))]
    run = PreferenceRun(
        config,
        base,
        out,
        cache_folder(),
        replay=rows_of(config.replay),
        api_key=os.environ.get("PASTA_REMOTE_KEY"),
        judge=judge_of(config),
        checks=checks_of(config),
    )
    finished = run.train(prompts_of(config), pairs)
    if processes().is_main_process:
        typer.echo(finished)


def check_options(config: PreferenceConfig, options: Sequence[str]) -> None:
    """Raise PastaError if stage 2 lacks an option, or has options that --pairs makes idle.

    options: names of the options on the command line.
    """
    idle = [name for name in options if name in IDLE_WITH_PAIRS]
    if config.pairs and idle:
        raise PastaError(f"nothing is sampled with --pairs: leave out {', '.join(idle)}")
    required = ["policy"] if config.pairs else ["prompts", "policy", "baseline", "quality"]
    if config.objective == "anchored":
        required.append("replay")
    if config.quality == "judge":
        required += ["judge_base_url", "judge_model"]
    for name in required:
        if not getattr(config, name):
            raise PastaError(
                f"--{name.replace('_', '-')} is missing", hint=MISSING_HINTS.get(name, "")
            )
    if config.quality not in ("", *QUALITY_SOURCES) and config.rounds > 1:
        raise PastaError("a file of grades is for one round: leave --rounds out")


def judge_of(config: PreferenceConfig) -> Endpoint | None:
    if config.quality != "judge":
        return None
    return Endpoint(config.judge_base_url, config.judge_model, endpoint_key(os.environ))


def checks_of(config: PreferenceConfig) -> dict[str, list[Check]]:
    """Return the checks of each prompt, by its id; none if another source grades.

    Raises PastaError if no prompt has checks.
    """
    if config.quality != "checks" or config.pairs:
        return {}
    checks = read_checks(map(Path, config.prompts))
    if not checks:
        raise PastaError(
            "no prompt has `checks`, which --quality checks grades by",
            hint="data/preference_prompts.jsonl of the repository shows what they look like.",
        )
    return checks


def explicit_settings(context: typer.Context, file: Path | None, config: Config) -> dict[str, Any]:
    """Return the settings of the file, and over them those of the command line, without defaults.

    config: the settings that typer made of the command line.
    """
    settings = read_settings_file(file, type(config)) if file else {}
    for field in fields(config):
        source = context.get_parameter_source(field.name)
        if source is not None and source.name == "COMMANDLINE":
            settings[field.name] = getattr(config, field.name)
    return settings


def settings_of_adapter(folder: Path) -> dict[str, Any]:
    """Return the settings that a run inherits from the adapter that it starts from."""
    checkpoint = read_checkpoint(folder)
    with errors_as(f"{folder} was trained for a join that this version does not know", ValueError):
        joins = tuple(Joining(join) for join in checkpoint.joins)
    return {
        "base_name": checkpoint.base.name,
        "scheme": checkpoint.scheme,
        "topic": checkpoint.topic,
        "joins": joins,
    }


def require_training(config: Config) -> None:
    """Raise PastaError if the extra `train` or a tracker of `config.report_to` is not installed."""
    for package in ("accelerate", "peft"):
        require(package, extra="train", doing="training")
    for name in config.report_to:
        if find_spec(name) is None:
            raise PastaError(f"{name} is not installed", hint=f"pip install {name}")


def rows_of(paths: Sequence[str]) -> list[Row]:
    return [row for path in paths for row in read_rows(Path(path))]


def prompts_of(config: PreferenceConfig) -> list[Question]:
    """Return the prompts to use, each once and shuffled, so that a limit takes a fair sample."""
    texts = [text for path in config.prompts for text in read_prompts(Path(path))]
    usable = [
        text
        for text in dict.fromkeys(texts)
        if text.strip() and len(text) <= config.max_prompt_chars
    ]
    random.Random(config.seed).shuffle(usable)
    return [question_of(text) for text in usable[: config.limit]]
