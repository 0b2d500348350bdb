"""The commands `train sft` (stage 1) and `train preference` (stage 2), and their progress."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.bars import drawn
from pasta_decoding.cli.console import base_folder, cache_folder, is_main, say
from pasta_decoding.cli.options import AsJson, Base, Without, command
from pasta_decoding.errors import PastaError, require
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import SCHEMES
from pasta_decoding.training.config import PreferenceConfig, SftConfig, joins_named

if TYPE_CHECKING:
    from pasta_decoding.data.dataset import Row
    from pasta_decoding.data.questions import Question
    from pasta_decoding.runtime.local import LocalDecoder
    from pasta_decoding.training.loop import Progress, Show
    from pasta_decoding.training.preference import Surroundings
    from pasta_decoding.training.score import Quality

LINE_EVERY_S = 60.0
_SFT = SftConfig(data=(), base_name="")
_PREFERENCE = PreferenceConfig(prompts=(), policy="", baseline="")
_ENGINE = EngineConfig(join=Joining.kv, cache_tokens=16384)
_FIXED = Without({"adapter", "model", "engine", "join", "base_url", "api_key"})


class Tracker(StrEnum):
    """Who is told the losses of a run while it goes."""

    none = "none"
    tensorboard = "tensorboard"
    wandb = "wandb"


ReportTo = Annotated[
    list[Tracker] | None,
    typer.Option(help="Log to this tracker as well; may be repeated."),
]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run goes on from; what is left out is as `start` has it, else as new runs have it."""

    start: Annotated[
        str | None, typer.Option(help="Adapter to go on from, or the run folder that holds it.")
    ] = None
    scheme: Annotated[
        str | None,
        typer.Option(
            help=f"Positions: {', '.join(SCHEMES)}. Else those of --start, else shared-max."
        ),
    ] = None
    topic: Annotated[
        Literal["required", "none"] | None,
        typer.Option(help="none: leave topics out; else as --start has it, else required."),
    ] = None
    join: Annotated[
        tuple[Joining, ...],
        typer.Option(
            help="How the main thread comes to see chunks; text is for remote engines. May be "
            "repeated: one adapter for both. Else as --start has it, else kv."
        ),
    ] = ()

    def begin(self) -> dict[str, Any]:
        """Return the settings that stand here. Raises PastaError for no such adapter."""
        from pasta_decoding.models.checkpoint import load
        from pasta_decoding.models.load import find_adapter

        folder = find_adapter(self.start) if self.start else None
        begun = load(folder) if folder else _SFT
        return {
            "start": str(folder) if folder else None,
            "scheme": self.scheme or begun.scheme,
            "topic": self.topic or begun.topic,
            "joins": joins_named(self.join or begun.joins),
        }


@command(
    "pasta train sft --data rows.jsonl --out runs/sft",
    "pasta train sft --data rows.jsonl --plain --out runs/baseline",
)
def sft(
    out: Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Annotated JSONL (.gz); may be repeated.")
    ] = None,
    model: Base = None,
    base_name: Annotated[str | None, typer.Option(help="What the adapter calls its base.")] = None,
    eval_data: Annotated[
        list[Path] | None,
        typer.Option(help="Held-out JSONL (.gz), whose loss is measured at every checkpoint."),
    ] = None,
    report_to: ReportTo = None,
    *,
    origin: Origin,
    config: SftConfig = _SFT,
) -> None:
    """Stage 1: finetune on annotated responses (LoRA and the control-token rows, or everything)."""
    require_training()
    config = replace(
        config,
        **origin.begin(),
        data=tuple(map(str, data or [])),
        base_name=base_name or called(model),
        eval_data=tuple(map(str, eval_data or [])),
    )
    from pasta_decoding.training.sft import train_sft

    with goes_on(), drawn_progress("training") as show:
        rows, held_out = rows_of(config)
        adapter = train_sft(
            config,
            rows,
            base=base_folder(model),
            out=out,
            say=say,
            held_out=held_out,
            show=show,
            report_to=trackers(report_to),
        )
    if is_main():
        typer.echo(adapter)


@command(
    "pasta train preference --prompts prompts.jsonl --policy runs/sft --baseline runs/baseline "
    "--out runs/preference",
)
def preference(
    prompts: Annotated[
        list[Path], typer.Option(help="JSONL (.gz) with an `instruction` a line; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")],
    policy: Annotated[str, typer.Option(help="Adapter to sample from and to go on from.")],
    baseline: Annotated[
        str, typer.Option(help="Adapter of the sequential baseline (`train sft --plain`).")
    ],
    model: Base = None,
    samples_from: Annotated[
        Path | None,
        typer.Option(help="Run folder whose first samples to use: same policy, another lambda."),
    ] = None,
    report_to: ReportTo = None,
    engine: Annotated[
        Literal["auto", "fast", "torch", "llama"],
        typer.Option(help="Decodes the samples. auto: torch on a GPU, else llama where it can."),
    ] = "auto",
    as_json: AsJson = False,
    *,
    config: PreferenceConfig = _PREFERENCE,
    loading: Annotated[EngineConfig, _FIXED] = _ENGINE,
) -> None:
    """Stage 2: prefer fast and good among sampled answers (BoNBoN), in rounds."""
    from pasta_decoding.models.load import find_adapter

    require_training()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PastaError("train preference is one process: start it without accelerate launch")
    if model is not None and model.suffix == ".gguf":
        raise PastaError("training does not start from a GGUF file: give --model a folder")
    loading, engine_name = settled(
        replace(loading, model=base_folder(model), engine=engine), find_adapter(policy)
    )
    config = replace(
        config,
        prompts=tuple(map(str, prompts)),
        policy=str(find_adapter(policy)),
        baseline=str(find_adapter(baseline)),
        engine=engine_name,
    )
    from pasta_decoding.training.preference import share_samples, train_preference

    if samples_from is not None:
        share_samples(samples_from, out, config)
    with goes_on():
        around = surroundings(config, out, loading, trackers(report_to))
        found = train_preference(config, prompts_of(config), around)
    pairs = sum(one["pairs"] for one in found["rounds"])
    seconds = sum(one["seconds"] for one in found["spent"])
    say(f"finished: {len(found['rounds'])} rounds, {pairs} pairs, {seconds:.0f} s in all")
    typer.echo(json.dumps(found) if as_json else found["adapter"])


def require_training() -> None:
    """Refuse to train without what the extra `train` brings, and say how to get it."""
    for package in ("accelerate", "peft", "matplotlib"):
        require(package, extra="train", doing="training")


def called(model: Path | None) -> str:
    """Return what an adapter calls its base where it is not told: its name on the hub, if any."""
    from pasta_decoding.models.bases import BASES, DEFAULT_MODEL

    if model is None or str(model) in BASES:
        return BASES[str(model or DEFAULT_MODEL)].hub
    return model.name if model.exists() else model.as_posix()


def rows_of(config: SftConfig) -> tuple[list[Row], list[Row]]:
    """Return the rows to learn, and those that are held out.

    Says how many of the last are of prompts that are trained on, too.
    """
    from pasta_decoding.data.dataset import hold_out, read_rows

    rows, held_out = (
        [row for path in paths for row in read_rows(Path(path))]
        for paths in (config.data, config.eval_data)
    )
    if config.eval_share:
        rows, held_out = hold_out(rows, config.eval_share)
    known = {row.asked for row in rows}
    if both := sum(row.asked in known for row in held_out):
        say(f"{both} of {len(held_out)} held-out prompts are trained on, too")
    return rows, held_out


def prompts_of(config: PreferenceConfig) -> list[Question]:
    """Return the prompts to use, each once and shuffled, so that a limit takes a fair sample."""
    from pasta_decoding.data.dataset import read_prompts
    from pasta_decoding.data.questions import question_of

    asked = dict.fromkeys(one for path in config.prompts for one in read_prompts(Path(path)))
    kept = [one for one in asked if one.strip() and len(one) <= config.max_prompt_chars]
    random.Random(config.seed).shuffle(kept)
    return [question_of(one) for one in kept[: config.limit]]


def settled(loading: EngineConfig, policy: Path) -> tuple[EngineConfig, str]:
    """Return the same with one engine and one number format, and their names, loading nothing.

    They are kept with the run, so that none goes on with another.
    """
    from pasta_decoding.api.opening import ENGINES, choose_engine, find
    from pasta_decoding.engines.llamacpp import library

    checkpoint = find(replace(loading, adapter=str(policy)), Path())
    engine = choose_engine(checkpoint)
    if engine == "llama":
        library()  # its absence is told before the work
    dtype = ENGINES[engine].dtype(checkpoint)
    assert dtype is not None, "it decodes here"
    own = loading.dtype if engine == "llama" else dtype
    return replace(loading, engine=engine, dtype=own), f"{engine} {dtype}"


def surroundings(
    config: PreferenceConfig, out: Path, loading: EngineConfig, report_to: list[str]
) -> Surroundings:
    """Wire up what training takes from outside: engines, the quality, progress."""
    from pasta_decoding.api.opening import open_local
    from pasta_decoding.models.load import default_device, native_dtype
    from pasta_decoding.training.likelihood import likelihood_rate, load_nll
    from pasta_decoding.training.preference import Surroundings
    from pasta_decoding.training.score import Quality

    base = loading.model
    assert base is not None, "the base is known"
    device = loading.device or default_device()

    def load_decoder(adapter: Path) -> LocalDecoder:
        return open_local(loading.of(str(adapter)), cache_folder())

    @cache
    def load_quality() -> Quality:
        baseline = Path(config.baseline)
        nll = load_nll(base, baseline, dtype=native_dtype(device), device=device)
        return Quality("nats", likelihood_rate(nll), idle_cost=2.0)

    return Surroundings(
        base, out, load_decoder, load_quality, say, drawn, drawn_progress, report_to
    )


def trackers(report_to: list[Tracker] | None) -> list[str]:
    """Return the trackers to log to; refuse one that is not installed."""
    wanted = [one.value for one in report_to or [] if one is not Tracker.none]
    for name in wanted:
        if find_spec(name) is None:
            raise PastaError(f"{name} is not installed", hint=f"pip install {name}")
    return wanted


@contextmanager
def goes_on() -> Iterator[None]:
    """Say of an interruption that the same command goes on."""
    from pasta_decoding.training.loop import GOES_ON

    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(GOES_ON) from None


def drawn_progress(doing: str) -> AbstractContextManager[Show]:
    """Return what draws a run: a bar on a terminal, else a line a minute."""
    return _bar(doing) if sys.stderr.isatty() else _lines(doing)


@contextmanager
def _bar(doing: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}")
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(doing, total=None, said="")
        yield lambda at: bars.update(
            task, total=at.all_tokens, completed=at.tokens, said=standing(at)
        )


@contextmanager
def _lines(doing: str) -> Iterator[Show]:
    told_s = time.monotonic()

    def show(at: Progress) -> None:
        nonlocal told_s
        last = at.step == at.steps and at.tokens == at.all_tokens
        if last or time.monotonic() - told_s >= LINE_EVERY_S:
            told_s = time.monotonic()
            say(f"{doing}: {standing(at)}")

    yield show


def standing(at: Progress) -> str:
    """Return where a run stands: steps, losses, pace, and the time that is left."""
    parts = [f"step {at.step}/{at.steps}"]
    if at.loss is not None:
        parts.append(f"loss {at.loss:.3f}")
    if at.held_out is not None:
        parts.append(f"held out {at.held_out:.3f}")
    if at.left_s is not None:
        left = timedelta(seconds=round(at.left_s))
        parts += [f"{at.tokens_per_s:.0f} tokens/s", f"{left} left"]
    return ", ".join(parts)
