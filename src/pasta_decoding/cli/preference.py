"""The command `train preference`: stage 2."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from pasta_decoding.api.settings import Dtype, EngineName, LoadSettings
from pasta_decoding.cli.files import base_folder, place, say
from pasta_decoding.cli.options import Without, with_options
from pasta_decoding.cli.train import require_training
from pasta_decoding.cli.training_bar import ReportTo, drawn_progress, goes_on, trackers
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.training.config import PreferenceConfig, Weights

if TYPE_CHECKING:
    from pasta_decoding.runtime.local import LocalDecoder
    from pasta_decoding.training.preference_run import Surroundings
    from pasta_decoding.training.scoring import Quality

Item = TypeVar("Item")


class Efficiency(StrEnum):
    """The efficiency term of a score."""

    theoretical = "theoretical"
    own = "own"


_DEFAULT = PreferenceConfig(prompts=(), policy="", baseline="")
_WEIGHTS = _DEFAULT.weights
_EFFICIENCY = Efficiency(_WEIGHTS.efficiency)
_LOADING = LoadSettings(join=Joining.kv, context=16384)
_FIXED = Without({"adapter", "model", "engine", "join", "base_url", "remote_key"})

LocalEngine = Literal["auto", "compiled", "torch", "llama"]


@with_options
def preference(
    prompts: Annotated[
        list[Path], typer.Option(help="JSONL (.gz) with an `instruction` a line; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")],
    policy: Annotated[str, typer.Option(help="Adapter to sample from and to go on from.")],
    baseline: Annotated[
        str, typer.Option(help="Adapter of the sequential baseline (`train sft --plain`).")
    ],
    model: Annotated[
        Path | None, typer.Option(help="Folder of the base model; the embedded one if left out.")
    ] = None,
    lambda_: Annotated[
        float, typer.Option("--lambda", min=0, help="Weight of quality; `inf`: nothing else.")
    ] = _WEIGHTS.lambda_ or 0.0,
    efficiency: Annotated[
        Efficiency,
        typer.Option(help="Of the baseline's tokens a step, or of the answer's own."),
    ] = _EFFICIENCY,
    length_control: Annotated[
        bool, typer.Option(help="Take the slope over length out of the scores.")
    ] = _WEIGHTS.length_control,
    rounds: Annotated[
        int, typer.Option(min=1, help="Each samples from the one before.")
    ] = _DEFAULT.rounds,
    samples: Annotated[
        int, typer.Option(min=2, help="Annotated answers a prompt.")
    ] = _DEFAULT.samples,
    baseline_samples: Annotated[
        int, typer.Option(min=1, help="Sequential answers a prompt, of the baseline.")
    ] = _DEFAULT.baseline_samples,
    samples_from: Annotated[
        Path | None,
        typer.Option(help="Run folder whose first samples to use: same policy, another lambda."),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="JSONL (.gz): prompts that show what each round did.")
    ] = None,
    check_limit: Annotated[
        int, typer.Option(min=1, help="Only the first so many.")
    ] = _DEFAULT.check_limit,
    limit: Annotated[
        int | None, typer.Option(min=1, help="So many of the prompts, chosen by the seed.")
    ] = _DEFAULT.limit,
    max_prompt_chars: Annotated[
        int, typer.Option(min=1, help="Longer prompts are left out.")
    ] = _DEFAULT.max_prompt_chars,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Of an answer, tags included.")
    ] = _DEFAULT.max_tokens,
    max_threads: Annotated[
        int, typer.Option(min=1, help="Live threads of an answer.")
    ] = _DEFAULT.max_threads,
    max_chunks: Annotated[
        int, typer.Option(min=1, help="Chunks of an answer.")
    ] = _DEFAULT.max_chunks,
    alpha: Annotated[
        float, typer.Option(min=0, max=1, help="Weight of the SFT term.")
    ] = _DEFAULT.alpha,
    epochs: Annotated[
        int, typer.Option(min=1, help="Over the pairs of a round.")
    ] = _DEFAULT.epochs,
    learning_rate: Annotated[float, typer.Option(min=0)] = _DEFAULT.learning_rate,
    warmup_steps: Annotated[int, typer.Option(min=0)] = _DEFAULT.warmup_steps,
    pairs_per_step: Annotated[
        int, typer.Option(min=1, help="Pairs of one optimiser step.")
    ] = _DEFAULT.pairs_per_step,
    save_every_steps: Annotated[int, typer.Option(min=1)] = _DEFAULT.save_every_steps,
    seed: Annotated[int, typer.Option(min=0)] = _DEFAULT.seed,
    bf16: Annotated[bool, typer.Option(help="bfloat16 weights and activations.")] = _DEFAULT.bf16,
    report_to: ReportTo = None,
    engine: Annotated[
        LocalEngine,
        typer.Option(
            help="auto takes torch on a GPU and where llama is not installed or cannot run the "
            "model."
        ),
    ] = "auto",
    loading: Annotated[LoadSettings, _FIXED] = _LOADING,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
) -> None:
    """Stage 2: prefer fast and good among sampled answers (BoNBoN), in rounds."""
    from pasta_decoding.models.loading import find_adapter
    from pasta_decoding.training.settings import share_samples

    require_training()
    refuse_several_processes()
    if model is not None and model.suffix == ".gguf":
        raise PastaError("training does not start from a GGUF file", hint="Give --model a folder.")
    given = replace(loading, model=base_folder(model), engine=EngineName(engine))
    loading, engine_name = settled(given, find_adapter(policy))
    config = PreferenceConfig(
        prompts=tuple(str(path) for path in prompts),
        policy=str(find_adapter(policy)),
        baseline=str(find_adapter(baseline)),
        check=str(check) if check else None,
        check_limit=check_limit,
        limit=limit,
        max_prompt_chars=max_prompt_chars,
        engine=engine_name,
        rounds=rounds,
        samples=samples,
        baseline_samples=baseline_samples,
        max_tokens=max_tokens,
        max_threads=max_threads,
        max_chunks=max_chunks,
        weights=Weights(
            efficiency=efficiency.value,
            lambda_=None if math.isinf(lambda_) else lambda_,
            length_control=length_control,
        ),
        alpha=alpha,
        epochs=epochs,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        pairs_per_step=pairs_per_step,
        save_every_steps=save_every_steps,
        seed=seed,
        bf16=bf16,
    )
    if samples_from is not None:
        share_samples(samples_from, out, config)
    with goes_on():
        found = train(config, prompts, check, out, loading, trackers(report_to))
    show(found)
    typer.echo(json.dumps(found) if as_json else found["adapter"])


def refuse_several_processes() -> None:
    """Refuse to be launched several times at once: each would sample into the same files."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PastaError(
            "train preference is one process", hint="Start it without accelerate launch."
        )


def settled(loading: LoadSettings, policy: Path) -> tuple[LoadSettings, str]:
    """Return the same with one engine and one number format, and their names, loading nothing.

    They are kept with the run, so that none goes on with another. What is compiled is so for one
    adapter, and each round makes a new one: `auto` does not take it.
    """
    from pasta_decoding.api.opening import llama_can_run
    from pasta_decoding.engines.llamacpp import library
    from pasta_decoding.models.loading import default_device, native_dtype

    assert loading.model is not None, "the base is known"
    engine, device = loading.engine, loading.device or default_device()
    if engine is EngineName.llama:
        library()  # its absence is told before the work
    if engine is EngineName.auto:
        by_llama = device == "cpu" and llama_can_run(loading.model, policy)
        engine = EngineName.llama if by_llama else EngineName.torch
    if engine is EngineName.llama:
        return replace(loading, engine=engine), f"{engine} {loading.quant}"
    dtype = Dtype(native_dtype(device)) if loading.dtype is Dtype.auto else loading.dtype
    return replace(loading, engine=engine, dtype=dtype), f"{engine} {dtype}"


def show(found: dict[str, Any]) -> None:
    """Say what a run came to: what it took, and the check prompts after each round."""
    pairs = sum(one["pairs"] for one in found["rounds"])
    seconds = sum(one["seconds"] for one in found["spent"])
    say(f"finished: {len(found['rounds'])} rounds, {pairs} pairs, {seconds:.0f} s in all")
    for point in found["check"]:
        say(
            f"check after round {point['round']}: own speedup {point['own_speedup']:.2f}, "
            f"text quality {point['quality']:.3f}, {point['hit_limit']:.0%} hit the limit"
        )


def train(
    config: PreferenceConfig,
    prompts: list[Path],
    check: Path | None,
    out: Path,
    loading: LoadSettings,
    report_to: list[str],
) -> dict[str, Any]:
    """Read the prompts and run the rounds."""
    from pasta_decoding.data.dataset import read_prompts
    from pasta_decoding.training.preference import train_preference

    chosen = choose(
        [text for path in prompts for text in read_prompts(path)],
        config.limit,
        config.max_prompt_chars,
        config.seed,
    )
    checked = read_prompts(check)[: config.check_limit] if check else []
    return train_preference(config, chosen, checked, surroundings(config, out, loading, report_to))


def choose(instructions: Sequence[str], limit: int | None, max_chars: int, seed: int) -> list[str]:
    """Return the instructions to use, shuffled, so that a limit takes a fair sample."""
    kept = [one for one in dict.fromkeys(instructions) if one.strip() and len(one) <= max_chars]
    random.Random(seed).shuffle(kept)
    return kept[:limit]


def surroundings(
    config: PreferenceConfig, out: Path, loading: LoadSettings, report_to: list[str]
) -> Surroundings:
    """Wire up what training takes from outside: engines, the quality, progress."""
    from pasta_decoding.api.opening import open_local
    from pasta_decoding.evaluation.rating import likelihood_rate, load_nll
    from pasta_decoding.models.loading import default_device, native_dtype
    from pasta_decoding.training.preference_run import Surroundings
    from pasta_decoding.training.score import score_layouts
    from pasta_decoding.training.scoring import Quality

    base = loading.model
    assert base is not None, "the base is known"
    device = loading.device or default_device()

    def load_decoder(adapter: Path) -> LocalDecoder:
        return open_local(loading.of(str(adapter)), place())

    @cache
    def load_quality() -> Quality:
        baseline = Path(config.baseline)
        nll = load_nll(base, baseline, score_layouts, dtype=native_dtype(device), device=device)
        return Quality("nats", likelihood_rate(nll), repeat_cost=2.0)

    return Surroundings(
        base, out, load_decoder, load_quality, say, Bars(), drawn_progress, report_to
    )


class Bars:
    """Progress bars on standard error."""

    def __call__(self, items: Iterable[Item], doing: str, total: int) -> Iterable[Item]:
        """See `Track`."""
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        return track(items, doing, total=total, console=console, transient=True)
