"""The command `train preference`: stage 2."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pasta_decoding.api.settings import Dtype, EngineName, FileType
from pasta_decoding.cli.engine import (
    Context,
    Device,
    Loading,
    LocalEngine,
    Precision,
    Quant,
    Threads,
)
from pasta_decoding.cli.files import base_folder, say
from pasta_decoding.cli.training_bar import ReportTo, drawn_progress, goes_on, trackers
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining

if TYPE_CHECKING:
    from pasta_decoding.runtime.local import LocalDecoder
    from pasta_decoding.training.preference import Surroundings
    from pasta_decoding.training.scoring import Quality
    from pasta_decoding.training.settings import PreferenceConfig

Item = TypeVar("Item")


class Efficiency(StrEnum):
    """The efficiency term of a score."""

    theoretical = "theoretical"
    own = "own"


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
    ] = 1.0,
    efficiency: Annotated[
        Efficiency,
        typer.Option(help="Of the baseline's tokens a step, or of the answer's own."),
    ] = Efficiency.theoretical,
    length_control: Annotated[
        bool, typer.Option(help="Take the slope over length out of the scores.")
    ] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Each samples from the one before.")] = 1,
    samples: Annotated[int, typer.Option(min=2, help="Annotated answers a prompt.")] = 8,
    baseline_samples: Annotated[
        int, typer.Option(min=1, help="Sequential answers a prompt, of the baseline.")
    ] = 4,
    samples_from: Annotated[
        Path | None,
        typer.Option(help="Run folder whose first samples to use: same policy, another lambda."),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="JSONL (.gz): prompts that show what each round did.")
    ] = None,
    check_limit: Annotated[int, typer.Option(min=1, help="Only the first so many.")] = 50,
    limit: Annotated[
        int | None, typer.Option(min=1, help="So many of the prompts, chosen by the seed.")
    ] = None,
    max_prompt_chars: Annotated[
        int, typer.Option(min=1, help="Longer prompts are left out.")
    ] = 1000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer, tags included.")] = 400,
    max_threads: Annotated[int, typer.Option(min=1, help="Live threads of an answer.")] = 12,
    max_chunks: Annotated[int, typer.Option(min=1, help="Chunks of an answer.")] = 16,
    alpha: Annotated[float, typer.Option(min=0, max=1, help="Weight of the SFT term.")] = 0.005,
    epochs: Annotated[int, typer.Option(min=1, help="Over the pairs of a round.")] = 1,
    learning_rate: Annotated[float, typer.Option(min=0)] = 1e-4,
    warmup_steps: Annotated[int, typer.Option(min=0)] = 5,
    pairs_per_step: Annotated[int, typer.Option(min=1, help="Pairs of one optimiser step.")] = 4,
    save_every_steps: Annotated[int, typer.Option(min=1)] = 10,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    bf16: Annotated[bool, typer.Option(help="bfloat16 weights and activations.")] = True,
    report_to: ReportTo = None,
    engine: LocalEngine = EngineName.auto,
    dtype: Precision = Dtype.auto,
    quant: Quant = FileType.F16,
    context: Context = 16384,
    threads: Threads = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
) -> None:
    """Stage 2: prefer fast and good among sampled answers (BoNBoN), in rounds."""
    from pasta_decoding.models.loading import find_adapter
    from pasta_decoding.training.scoring import Weights
    from pasta_decoding.training.settings import PreferenceConfig, share_samples

    refuse_several_processes()
    if model is not None and model.suffix == ".gguf":
        raise PastaError("training does not start from a GGUF file", hint="Give --model a folder.")
    loading = Loading(
        model=base_folder(model),
        engine=engine,
        join=Joining.kv,
        dtype=dtype,
        quant=quant,
        context=context,
        threads=threads,
        device=device,
    )
    config = PreferenceConfig(
        prompts=tuple(str(path) for path in prompts),
        policy=str(find_adapter(policy)),
        baseline=str(find_adapter(baseline)),
        check=str(check) if check else None,
        check_limit=check_limit,
        limit=limit,
        max_prompt_chars=max_prompt_chars,
        engine=engine_words(loading, find_adapter(policy)),
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


def engine_words(loading: Loading, policy: Path) -> str:
    """Name the engine that `loading` would take for the policy, without loading anything."""
    from pasta_decoding.api.opening import llama_can_run
    from pasta_decoding.engines.llamacpp import library
    from pasta_decoding.models.loading import default_device

    assert loading.model is not None, "the base is known"
    if loading.engine is EngineName.llama:
        library()  # its absence is told before the work
        return f"llama {loading.quant}"
    on_cpu = (loading.device or default_device()) == "cpu"
    may_be_llama = loading.engine is EngineName.auto and on_cpu
    if may_be_llama and llama_can_run(loading.model, policy):
        return f"llama {loading.quant}"
    return f"torch {loading.dtype}"


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
    loading: Loading,
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
    config: PreferenceConfig, out: Path, loading: Loading, report_to: list[str]
) -> Surroundings:
    """Wire up what training takes from outside: engines, the quality, progress."""
    from pasta_decoding.evaluation.rating import likelihood_rate, load_nll
    from pasta_decoding.models.loading import default_device, native_dtype
    from pasta_decoding.training.preference import Surroundings
    from pasta_decoding.training.score import score_layouts
    from pasta_decoding.training.scoring import Quality

    base = loading.model
    assert base is not None, "the base is known"
    device = loading.device or default_device()

    def load_decoder(adapter: Path) -> LocalDecoder:
        return loading.of(str(adapter)).local_decoder()

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
