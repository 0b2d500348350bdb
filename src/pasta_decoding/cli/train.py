"""The commands `train sft` (stage 1) and `train preference` (stage 2), and their progress."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.console import base_folder, cache_folder, is_main, say
from pasta_decoding.cli.options import Base, Without, command
from pasta_decoding.errors import PastaError, require
from pasta_decoding.lang.layout import Joining
from pasta_decoding.training.config import PreferenceConfig, SftConfig, keys, read_config

if TYPE_CHECKING:
    from pasta_decoding.data.rows import Question, Row
    from pasta_decoding.runtime.local import LocalDecoder
    from pasta_decoding.training.loop import Show
    from pasta_decoding.training.sample import Item
    from pasta_decoding.training.score import Rate

LINE_EVERY_S = 60.0
_SFT_KEYS, _PREFERENCE_KEYS = Without(keys(SftConfig)), Without(keys(PreferenceConfig))
_FILE = "YAML file of settings; a run's config.json is one. Its further keys: "

Out = Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")]


@command(
    "pasta train sft --data rows.jsonl --out runs/sft",
    "pasta train sft --data rows.jsonl --plain --out runs/baseline",
)
def sft(
    context: typer.Context,
    out: Out,
    model: Base = None,
    file: Annotated[
        Path | None, typer.Option("--config", help=f"{_FILE}{', '.join(sorted(_SFT_KEYS))}.")
    ] = None,
    *,
    config: Annotated[SftConfig, _SFT_KEYS],
) -> None:
    """Stage 1: finetune on annotated responses (LoRA and the control-token rows, or everything)."""
    found = given(context, file, config)
    config = SftConfig(**{"base_name": hub_name(model)} | settings_of_start(found) | found)
    require_training(config)
    from pasta_decoding.training.sft import train_sft

    with goes_on(), showing("training") as show:
        rows, held_out = rows_of(config)
        base = base_folder(model)
        adapter = train_sft(config, rows, base=base, out=out, say=say, held_out=held_out, show=show)
    if is_main():
        typer.echo(adapter)


@command(
    "pasta train preference --prompts prompts.jsonl --policy runs/sft --baseline runs/baseline "
    "--out runs/preference",
)
def preference(
    context: typer.Context,
    out: Out,
    model: Base = None,
    file: Annotated[
        Path | None, typer.Option("--config", help=f"{_FILE}{', '.join(sorted(_PREFERENCE_KEYS))}.")
    ] = None,
    samples_from: Annotated[
        Path | None,
        typer.Option(help="Use the first samples of this run folder: same policy, another lambda."),
    ] = None,
    *,
    config: Annotated[PreferenceConfig, _PREFERENCE_KEYS],
) -> None:
    """Stage 2: prefer fast and good among sampled answers (BoNBoN), in rounds."""
    from pasta_decoding.models.load import find_adapter

    config = PreferenceConfig(**given(context, file, config))
    require_training(config)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PastaError("train preference is one process: start it without accelerate launch")
    if model is not None and model.suffix == ".gguf":
        raise PastaError("training does not start from a GGUF file: give --model a folder")
    for name in ("prompts", "policy", "baseline"):
        if not getattr(config, name):
            raise PastaError(f"--{name} is missing")
    config = replace(
        config,
        policy=str(find_adapter(config.policy)),
        baseline=str(find_adapter(config.baseline)),
    )
    base = base_folder(model)
    loading = settled(config, base)
    engine: Any = loading.engine
    config = replace(config, engine=engine, dtype=loading.dtype)
    from pasta_decoding.training.preference import PreferenceRun, share_samples

    if samples_from is not None:
        share_samples(samples_from, out, config)
    with goes_on():
        load_decoder, load_rate = loaders(config, base, loading)
        run = PreferenceRun(config, base, out, load_decoder, load_rate, say, tracked, showing)
        adapter = run.train(prompts_of(config))
    say(f"finished: {config.rounds} rounds")
    typer.echo(adapter)


def given(
    context: typer.Context, file: Path | None, config: SftConfig | PreferenceConfig
) -> dict[str, Any]:
    """Return the settings that a user gave: the file's, and the command line's above them."""
    found = read_config(file, type(config)) if file else {}
    for name in (one.name for one in fields(config)):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found[name] = getattr(config, name)
    return found


def settings_of_start(found: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a run takes over from the adapter it starts from."""
    from pasta_decoding.models.checkpoint import load
    from pasta_decoding.models.load import find_adapter

    if found.get("start") is None:
        return {}
    folder = find_adapter(found["start"])
    found["start"] = str(folder)
    start = load(folder)
    try:
        joins = tuple(map(Joining, start.joins))
    except ValueError as error:
        known = ", ".join(Joining)
        raise PastaError(f"unknown join: {error}; this version knows {known}") from error
    return {"scheme": start.scheme, "topic": start.topic, "joins": joins}


def require_training(config: SftConfig | PreferenceConfig) -> None:
    """Refuse to train without what the extra `train` brings, or a tracker that is asked for."""
    for package in ("accelerate", "peft", "matplotlib"):
        require(package, extra="train", doing="training")
    for name in config.report_to:
        if find_spec(name) is None:
            raise PastaError(f"{name} is not installed", hint=f"pip install {name}")


def hub_name(model: Path | None) -> str:
    """Return the name of a base model on the hub; of a folder, the folder's own name."""
    from pasta_decoding.models.bases import BASES, DEFAULT_MODEL

    if model is None or str(model) in BASES:
        return BASES[str(model or DEFAULT_MODEL)].hub
    return model.name if model.exists() else model.as_posix()


def rows_of(config: SftConfig) -> tuple[list[Row], list[Row]]:
    """Return the rows to learn, and those that are held out.

    Says how many held-out prompts are trained on as well.
    """
    from pasta_decoding.data.rows import read_rows
    from pasta_decoding.training.packs import hold_out

    rows, held_out = (
        [row for path in paths for row in read_rows(Path(path))]
        for paths in (config.data, config.eval_data)
    )
    if config.eval_share:
        rows, held_out = hold_out(rows, config.eval_share)
    known = {row.asked for row in rows}
    if both := sum(row.asked in known for row in held_out):
        say(f"{both} of {len(held_out)} held-out prompts are trained on as well")
    return rows, held_out


def prompts_of(config: PreferenceConfig) -> list[Question]:
    """Return the prompts to use, each once and shuffled, so that a limit takes a fair sample."""
    from pasta_decoding.data.rows import question_of, read_prompts

    asked = dict.fromkeys(one for path in config.prompts for one in read_prompts(Path(path)))
    kept = [one for one in asked if one.strip() and len(one) <= config.max_prompt_chars]
    random.Random(config.seed).shuffle(kept)
    return [question_of(one) for one in kept[: config.limit]]


def settled(config: PreferenceConfig, base: Path) -> EngineConfig:
    """Return what loads a decoder, with one engine and one number format; loads nothing itself.

    They are kept with the run, so that none goes on with another.
    """
    from pasta_decoding.api.opening import ENGINES, choose_engine, find
    from pasta_decoding.engines.llamacpp import library

    loading = EngineConfig(
        adapter=config.policy,
        model=base,
        engine=config.engine,
        join=Joining.kv,
        dtype=config.dtype,
        cache_tokens=config.cache_tokens,
        device=config.device,
    )
    checkpoint = find(loading, Path())
    engine = choose_engine(checkpoint)
    if engine == "llama":
        library()  # its absence is told before the work
    dtype = ENGINES[engine].dtype(checkpoint)
    assert dtype is not None, "it decodes here"
    return replace(loading, engine=engine, dtype=loading.dtype if engine == "llama" else dtype)


def loaders(
    config: PreferenceConfig, base: Path, loading: EngineConfig
) -> tuple[Callable[[Path], LocalDecoder], Callable[[], Rate]]:
    """Return a function that loads an adapter's decoder, and one that loads the quality's model."""
    from pasta_decoding.api.opening import open_local
    from pasta_decoding.models.load import default_device, native_dtype
    from pasta_decoding.training.likelihood import likelihood_rate

    device = loading.device or default_device()

    def load_decoder(adapter: Path) -> LocalDecoder:
        return open_local(loading.of(str(adapter)), cache_folder())

    @cache
    def load_rate() -> Rate:
        dtype = native_dtype(device)
        return likelihood_rate(base, Path(config.baseline), dtype=dtype, device=device)

    return load_decoder, load_rate


@contextmanager
def goes_on() -> Iterator[None]:
    """Say of an interruption that the same command goes on."""
    from pasta_decoding.training.loop import GOES_ON

    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(GOES_ON) from None


@contextmanager
def showing(doing: str) -> Iterator[Show]:
    """Hand out what shows progress: a bar on a terminal, else a line a minute."""
    if not sys.stderr.isatty():
        yield _lines(doing)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(doing, total=None, words="")
        yield lambda done, total, words: bars.update(task, completed=done, total=total, words=words)


def _lines(doing: str) -> Show:
    told_s = time.monotonic()

    def show(done: int, total: int, words: str) -> None:
        nonlocal told_s
        if done == total or time.monotonic() - told_s >= LINE_EVERY_S:
            told_s = time.monotonic()
            say(f"{doing}: {words}")

    return show


def tracked(items: Iterable[Item], doing: str, total: int) -> Iterable[Item]:
    """Yield the items, and show how far they are."""
    began_s = time.monotonic()
    with showing(doing) as show:
        for done, item in enumerate(items, start=1):
            yield item
            left_s = (time.monotonic() - began_s) / done * (total - done)
            show(done, total, f"{done}/{total}, {timedelta(seconds=round(left_s))} left")
