"""The settings of both stages: options of the commands, and keys of `--config` files.

A field says its type, range and help once. Hidden ones are keys of the file only. Nothing here
needs torch: `pasta train --help` reads it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from inspect import formatannotation
from keyword import iskeyword
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from typer import Option

from pasta_decoding.answer.request import Rules
from pasta_decoding.api.config import check_name
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import SCHEMES

Key = partial(Option, hidden=True)
Bf16 = Annotated[bool, Key(help="bfloat16 weights and activations; LoRA stays float32.")]
ReportTo = Annotated[
    tuple[Literal["tensorboard", "wandb"], ...], Key(help="Trackers that get the losses as well.")
]
Warmup = Annotated[int, Key(min=0, help="Steps until the peak; a tenth of the run at most.")]
SaveEvery = Annotated[int, Key(min=1, help="Steps between checkpoints.")]
Schedule = Annotated[
    Literal["linear", "cosine", "constant_with_warmup"],
    Key(help="Course of the learning rate after the warm-up."),
]


@dataclass(frozen=True, slots=True)
class SftConfig:
    """One run of stage 1. `scheme`, `topic` and `joins` are resolved when the run begins."""

    data: Annotated[tuple[str, ...], Option(help="Annotated JSONL (.gz); may be repeated.")] = ()
    base_name: Annotated[str, Key(help="What the adapter calls its base.")] = ""
    start: Annotated[str | None, Option(help="Adapter or run folder to continue from.")] = None
    plain: Annotated[bool, Option("--plain", help="Train without the tags: the baseline.")] = False
    scheme: Annotated[str, Key(help=f"Positions: {', '.join(SCHEMES)}.")] = "shared-max"
    topic: Annotated[Literal["required", "none"], Key(help="none: take topics out.")] = "required"
    joins: Annotated[
        tuple[Joining, ...],
        Option("--join", help="How chunks are read: kv; text for servers. May be repeated."),
    ] = (Joining.kv,)
    epochs: Annotated[int, Option(min=1, help="Passes over the rows.")] = 3
    max_steps: Annotated[int | None, Option(min=1, help="Optimiser steps at most.")] = None
    learning_rate: Annotated[float, Option(min=0, help="Peak of the learning rate.")] = 5e-4
    warmup_steps: Warmup = 20
    schedule: Schedule = "linear"
    lora_rank: Annotated[int, Option(min=0, help="0 trains all weights, not LoRA.")] = 16
    lora_alpha: Annotated[int | None, Key(min=1, help="Scale of LoRA; else twice the rank.")] = None
    lora_targets: Annotated[tuple[str, ...], Key(help="Layers with LoRA; else all.")] = ()
    load_in_4bit: Annotated[bool, Key(help="4-bit base under LoRA (QLoRA); needs a GPU.")] = False
    max_tokens: Annotated[int, Option("--max-length", min=8, help="Longest row in tokens.")] = 512
    pack_tokens: Annotated[int, Option(min=8, help="Tokens of one forward pass.")] = 320
    packs_per_step: Annotated[int, Option(min=1, help="Packs of a step, in all processes.")] = 6
    save_every_steps: SaveEvery = 50
    eval_data: Annotated[tuple[str, ...], Option(help="Held-out JSONL (.gz): log its loss.")] = ()
    seed: Annotated[int, Option(min=0, help="Seed of row order and new weights.")] = 0
    bf16: Bf16 = True
    gradient_checkpointing: Annotated[bool, Key(help="Less memory, a third more time.")] = False
    try_prompts: Annotated[int, Key(min=0, help="Prompts to answer at the end.")] = 5
    report_to: ReportTo = ()

    def __post_init__(self) -> None:
        if self.load_in_4bit and not self.lora_rank:
            raise PastaError("load_in_4bit is for LoRA: the weights of a 4-bit base cannot move")
        if self.start is not None and not self.lora_rank:
            raise PastaError(
                "all weights are to be trained, so there is no adapter to go on from: "
                "merge it first (pasta export --to hf)"
            )


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


@dataclass(frozen=True, slots=True)
class PreferenceConfig:
    """One run of stage 2. `engine` and `dtype` are resolved when the run begins.

    temperature: BoNBoN is derived for 1, where a small model writes what it never would when it
                 decodes greedily.
    """

    prompts: Annotated[tuple[str, ...], Option(help="JSONL (.gz) of prompts; repeatable.")] = ()
    pairs: Annotated[tuple[str, ...], Option(help="JSONL (.gz) of `chosen`, `rejected`.")] = ()
    policy: Annotated[str, Option(help="Adapter to sample from and to train.")] = ""
    baseline: Annotated[str, Option(help="Adapter of the baseline (`train sft --plain`).")] = ""
    engine: Annotated[
        Literal["auto", "fast", "torch", "llama", "remote"],
        Option(help="Engine that decodes the samples."),
    ] = "auto"
    base_url: Annotated[
        tuple[str, ...], Option(help="remote: a vLLM server of the base model; repeatable.")
    ] = ()
    dtype: Annotated[str, Key(help="Number format of the engine's weights.")] = "auto"
    device: Annotated[str | None, Option(help="cpu or cuda; else cuda if there is a GPU.")] = None
    cache_tokens: Annotated[int, Key(min=1, help="Tokens in the engine's KV cache.")] = 16384
    objective: Annotated[
        Literal["bonbon", "rejection"], Option(help="rejection: finetune on the best alone.")
    ] = "bonbon"
    lambda_: Annotated[
        float | None,
        Option("--lambda", min=0, callback=_finite, help="Weight of quality; `inf`: only quality."),
    ] = 1.0
    rounds: Annotated[int, Option(min=1, help="Each samples from the last adapter.")] = 1
    samples: Annotated[int, Option(min=2, help="Answers sampled for each prompt.")] = 8
    temperature: Annotated[float, Key(min=0.1, max=100, help="Of the samples.")] = 1.0
    baseline_samples: Annotated[int, Key(min=1, help="The baseline's answers a prompt.")] = 4
    limit: Annotated[int | None, Key(min=1, help="Prompts to take, chosen by the seed.")] = None
    max_prompt_chars: Annotated[int, Key(min=1, help="Longer prompts are left out.")] = 1000
    max_tokens: Annotated[int, Option(min=1, help="Longest answer in tokens, with tags.")] = 400
    max_threads: Annotated[int, Key(min=1, help="Live threads of an answer.")] = 12
    alpha: Annotated[float, Key(min=0, max=1, help="Weight of the SFT term.")] = 0.005
    epochs: Annotated[int, Key(min=1, help="Passes over the pairs of a round.")] = 1
    learning_rate: Annotated[float, Option(min=0, help="Peak of the learning rate.")] = 1e-4
    warmup_steps: Warmup = 5
    schedule: Schedule = "linear"
    pairs_per_step: Annotated[int, Key(min=1, help="Pairs of one optimiser step.")] = 4
    save_every_steps: SaveEvery = 10
    seed: Annotated[int, Key(min=0, help="Seed of the samples and of the order of pairs.")] = 0
    bf16: Bf16 = True
    report_to: ReportTo = ()

    @property
    def rules(self) -> Rules:
        return Rules(max_tokens=self.max_tokens, max_threads=self.max_threads, max_chunks=16)

    @property
    def joining(self) -> Joining:
        """How the samples join chunks, and so what is trained: servers know one way."""
        return Joining.text if self.engine == "remote" else Joining.kv


Config = SftConfig | PreferenceConfig
SAMPLING = (
    *("prompts", "policy", "baseline", "engine", "dtype", "samples", "temperature", "seed"),
    *("baseline_samples", "limit", "max_prompt_chars", "max_tokens", "max_threads"),
)
"""Settings that the samples and their measures depend on."""
IDLE_WITH_PAIRS = {*SAMPLING, "samples_from", "rounds", "lambda_"} - {
    "policy",
    "seed",
    "max_tokens",
}
"""Options that are refused beside pairs; a settings file may have them for other runs."""


def keys(kind: type[Any]) -> list[str]:
    """Return the settings that only a file gives."""
    hints = get_type_hints(kind, include_extras=True)
    return [one.name for one in fields(kind) if get_args(hints[one.name])[1].hidden]


def read_config(path: Path, kind: type[Any]) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file. Raises PastaError, naming what is wrong.

    A file for both stages holds those of each under its command's name, `sft` or `preference`.
    """
    import yaml

    with errors_as(f"{path} cannot be read", OSError, UnicodeDecodeError, yaml.YAMLError):
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if isinstance(found, dict):
        found = found.get("sft" if kind is SftConfig else "preference", found)
    if not isinstance(found, dict):
        raise PastaError(f"{path} holds no settings, such as `epochs: 2`")
    try:
        return dict(_settings(found, get_type_hints(kind, include_extras=True)))
    except PastaError as error:
        raise PastaError(f"{path}: {error}") from error


def _settings(found: dict[Any, Any], hints: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, given in found.items():
        name = f"{key}_" if iskeyword(str(key)) else str(key)
        check_name("setting", name, list(hints))
        kind, option = get_args(hints[name])
        try:
            value = _parsed(given, kind)
        except (TypeError, ValueError):
            raise PastaError(f"{key} is {given!r}, not {formatannotation(kind)}") from None
        if value is not None and option.min is not None and not value >= option.min:
            raise PastaError(f"{key} is {value}, less than {option.min}")
        if value is not None and option.max is not None and not value <= option.max:
            raise PastaError(f"{key} is {value}, more than {option.max}")
        yield name, option.callback(value) if option.callback else value


def _parsed(value: Any, kind: Any) -> Any:
    """Return a value of a file as one of its field's type. Raises TypeError or ValueError."""
    if isinstance(kind, UnionType):
        kind = NoneType if value is None else get_args(kind)[0]
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_parsed(one, get_args(kind)[0]) for one in value)
    if get_origin(kind) is Literal and value in get_args(kind):
        return value
    if kind is float and not isinstance(value, bool):
        return float(value)  # YAML takes 1e-4 for a text
    if kind is Joining:
        return Joining(value)
    if type(value) is not kind:
        raise TypeError
    return value
