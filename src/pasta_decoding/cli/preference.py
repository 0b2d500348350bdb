"""The command `train preference`: stage 2."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.bars import drawn
from pasta_decoding.cli.console import base_folder, cache_folder, say
from pasta_decoding.cli.options import DefaultModel, Without, command
from pasta_decoding.cli.train import require_training
from pasta_decoding.cli.training_bar import ReportTo, drawn_progress, goes_on, trackers
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.training.config import PreferenceConfig, Weights

if TYPE_CHECKING:
    from pasta_decoding.data.asked import Asked
    from pasta_decoding.runtime.local import LocalDecoder
    from pasta_decoding.training.preference_run import Surroundings
    from pasta_decoding.training.scoring import Quality

_CONFIG = PreferenceConfig(prompts=(), policy="", baseline="")
_LOADING = EngineConfig(join=Joining.kv, cache_tokens=16384)
_FIXED = Without({"adapter", "model", "engine", "join", "base_url", "api_key"})

LocalEngine = Annotated[
    Literal["auto", "compiled", "torch", "llama"],
    typer.Option(
        help="auto takes torch on a GPU and where llama is not installed or cannot run the model."
    ),
]
SamplesFrom = Annotated[
    Path | None,
    typer.Option(help="Run folder whose first samples to use: same policy, another lambda."),
]


@command()
def preference(
    prompts: Annotated[
        list[Path], typer.Option(help="JSONL (.gz) with an `instruction` a line; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")],
    policy: Annotated[str, typer.Option(help="Adapter to sample from and to go on from.")],
    baseline: Annotated[
        str, typer.Option(help="Adapter of the sequential baseline (`train sft --plain`).")
    ],
    model: DefaultModel = None,
    samples_from: SamplesFrom = None,
    report_to: ReportTo = None,
    engine: LocalEngine = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
    *,
    weights: Weights,
    config: PreferenceConfig = _CONFIG,
    loading: Annotated[EngineConfig, _FIXED] = _LOADING,
) -> None:
    """Stage 2: prefer fast and good among sampled answers (BoNBoN), in rounds."""
    from pasta_decoding.models.load import find_adapter

    require_training()
    refuse_what_cannot_start(model)
    config = replace(
        config,
        prompts=tuple(map(str, prompts)),
        policy=str(find_adapter(policy)),
        baseline=str(find_adapter(baseline)),
        weights=weights,
    )
    loading = replace(loading, model=base_folder(model), engine=engine)
    found = train(config, out, loading, trackers(report_to), samples_from)
    show(found)
    typer.echo(json.dumps(found) if as_json else found["adapter"])


def refuse_what_cannot_start(model: Path | None) -> None:
    """Refuse several launched processes, whose samples would mix, and weights that do not train."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PastaError(
            "train preference is one process", hint="Start it without accelerate launch."
        )
    if model is not None and model.suffix == ".gguf":
        raise PastaError("training does not start from a GGUF file", hint="Give --model a folder.")


def settled(loading: EngineConfig, policy: Path) -> tuple[EngineConfig, str]:
    """Return the same with one engine and one number format, and their names, loading nothing.

    They are kept with the run, so that none goes on with another. What is compiled is so for one
    adapter, and each round makes a new one: `auto` does not take it.
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


def show(found: dict[str, Any]) -> None:
    """Say what a run came to: what it took."""
    pairs = sum(one["pairs"] for one in found["rounds"])
    seconds = sum(one["seconds"] for one in found["spent"])
    say(f"finished: {len(found['rounds'])} rounds, {pairs} pairs, {seconds:.0f} s in all")


def train(
    config: PreferenceConfig,
    out: Path,
    wanted: EngineConfig,
    report_to: list[str],
    samples_from: Path | None,
) -> dict[str, Any]:
    """Settle what decodes, read the prompts, and run the rounds."""
    from pasta_decoding.data.asked import read_all_asked
    from pasta_decoding.training.preference import train_preference
    from pasta_decoding.training.settings import share_samples

    loading, engine = settled(wanted, Path(config.policy))
    config = replace(config, engine=engine)
    if samples_from is not None:
        share_samples(samples_from, out, config)
    with goes_on():
        chosen = choose(
            [one for path in config.prompts for one in read_all_asked(Path(path))],
            config.limit,
            config.max_prompt_chars,
            config.seed,
        )
        around = surroundings(config, out, loading, report_to)
        return train_preference(config, chosen, around)


def choose(prompts: Sequence[Asked], limit: int | None, max_chars: int, seed: int) -> list[Asked]:
    """Return the prompts to use, shuffled, so that a limit takes a fair sample."""
    from pasta_decoding.data.asked import each_once

    kept = [
        one
        for one in each_once(prompts)
        if one.instruction.strip() and len(one.instruction) <= max_chars
    ]
    random.Random(seed).shuffle(kept)
    return kept[:limit]


def surroundings(
    config: PreferenceConfig, out: Path, loading: EngineConfig, report_to: list[str]
) -> Surroundings:
    """Wire up what training takes from outside: engines, the quality, progress."""
    from pasta_decoding.api.opening import open_local
    from pasta_decoding.models.load import default_device, native_dtype
    from pasta_decoding.training.likelihood import likelihood_rate, load_nll
    from pasta_decoding.training.preference_run import Surroundings
    from pasta_decoding.training.scoring import Quality

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
