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
from pasta_decoding.cli.options import Base, command
from pasta_decoding.data.rows import Question, Row, question_of, read_pairs, read_prompts, read_rows
from pasta_decoding.errors import PastaError, errors_as, require
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.catalog import NO_ADAPTER, find_adapter, find_base, hub_name
from pasta_decoding.models.checkpoint import read_checkpoint
from pasta_decoding.training.config import (
    IDLE_WITH_PAIRS,
    Config,
    PreferenceConfig,
    SftConfig,
    hidden_settings,
    read_settings_file,
)

_KEYS = "Further keys of --config: "

File = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; a run's config.json is one.")
]

Out = Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")]


@command(
    "pasta train sft --data rows.jsonl --out runs/sft",
    "pasta train sft --data rows.jsonl --plain --out runs/baseline",
    notes=f"{_KEYS}{', '.join(sorted(hidden_settings(SftConfig)))}.",
)
def sft(
    context: typer.Context,
    out: Out,
    model: Base = None,
    file: File = None,
    *,
    config: SftConfig,
) -> None:
    """Stage 1: finetune on annotated responses (LoRA and the control-token rows, or everything)."""
    found = given(context, file, config)
    config = SftConfig(**{"base_name": hub_name(model)} | settings_of_start(found) | found)
    require_training(config)
    from pasta_decoding.training.loop import processes
    from pasta_decoding.training.sft import train_sft

    base = find_base(model, cache_folder(), adapter=config.start or NO_ADAPTER)
    rows, held_out = rows_of(config.data), rows_of(config.eval_data)
    known = {row.asked for row in rows}
    if both := sum(row.asked in known for row in held_out):
        say(f"{both} of {len(held_out)} held-out prompts are trained on as well")
    adapter = train_sft(config, rows, base=base, out=out, held_out=held_out)
    if processes().is_main_process:
        typer.echo(adapter)


@command(
    "pasta train preference --prompts prompts.jsonl --policy runs/sft --baseline runs/baseline "
    "--out runs/preference",
    notes=f"{_KEYS}{', '.join(sorted(hidden_settings(PreferenceConfig)))}.",
)
def preference(
    context: typer.Context,
    out: Out,
    model: Base = None,
    file: File = None,
    samples_from: Annotated[
        Path | None,
        typer.Option(help="Use the first samples of this run folder: same policy, another lambda."),
    ] = None,
    *,
    config: PreferenceConfig,
) -> None:
    """Stage 2: train on the best and worst of sampled answers (BoNBoN), in rounds."""
    config = PreferenceConfig(**given(context, file, config))
    require_training(config)
    typed = given(context, None, config) | ({"samples_from": 1} if samples_from else {})
    if config.pairs and (idle := [name for name in typed if name in IDLE_WITH_PAIRS]):
        raise PastaError(f"nothing is sampled with --pairs: leave out {', '.join(idle)}")
    for name in ("policy",) if config.pairs else ("prompts", "policy", "baseline"):
        if not getattr(config, name):
            raise PastaError(f"--{name} is missing")
    named = (config.policy, config.baseline)
    policy, baseline = (str(find_adapter(name)) if name else "" for name in named)
    from pasta_decoding.training.loop import processes
    from pasta_decoding.training.preference import PreferenceRun, resolve_engine, share_samples

    base = find_base(model, cache_folder(), adapter=policy)
    config = replace(config, policy=policy, baseline=baseline)
    if not config.pairs:
        config = resolve_engine(config, base, cache_folder())
    if samples_from is not None:
        share_samples(samples_from, out, config)
    pairs = [pair for path in config.pairs for pair in read_pairs(Path(path))]
    key = os.environ.get("PASTA_REMOTE_KEY")
    run = PreferenceRun(config, base, out, cache_folder(), key)
    adapter = run.train(prompts_of(config), pairs)
    if processes().is_main_process:
        typer.echo(adapter)


def given(context: typer.Context, file: Path | None, config: Config) -> dict[str, Any]:
    """Return the settings that a user gave: the file's, and the command line's above them."""
    found = read_settings_file(file, type(config)) if file else {}
    for name in (one.name for one in fields(config)):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found[name] = getattr(config, name)
    return found


def settings_of_start(found: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a run takes over from the adapter it starts from."""
    if found.get("start") is None:
        return {}
    folder = find_adapter(found["start"])
    found["start"], start = str(folder), read_checkpoint(folder)
    with errors_as(f"{folder} was trained for a join that this version does not know", ValueError):
        joins = tuple(map(Joining, start.joins))
    own = {"scheme": start.scheme, "topic": start.topic, "joins": joins}
    return own | {"base_name": start.base.name}


def require_training(config: Config) -> None:
    """Refuse to train without what the extra `train` brings, or a tracker that is asked for."""
    for package in ("accelerate", "peft"):
        require(package, extra="train", doing="training")
    for name in config.report_to:
        if find_spec(name) is None:
            raise PastaError(f"{name} is not installed", hint=f"pip install {name}")


def rows_of(paths: Sequence[str]) -> list[Row]:
    return [row for path in paths for row in read_rows(Path(path))]


def prompts_of(config: PreferenceConfig) -> list[Question]:
    """Return the prompts to use, each once and shuffled, so that a limit takes a fair sample."""
    asked = dict.fromkeys(one for path in config.prompts for one in read_prompts(Path(path)))
    kept = [one for one in asked if one.strip() and len(one) <= config.max_prompt_chars]
    random.Random(config.seed).shuffle(kept)
    return [question_of(one) for one in kept[: config.limit]]
