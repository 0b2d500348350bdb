"""The settings of both stages: options of the commands, and keys of `--config` files.

Hidden fields are keys of such files only. This module imports no torch: `pasta train --help` needs
it.
"""

import math
from dataclasses import dataclass, fields
from inspect import formatannotation
from keyword import iskeyword
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pasta_decoding.answer.settings import Rules
from pasta_decoding.api.config import check_name
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import SCHEMES
from pasta_decoding.setting import Setting

Bf16 = Annotated[
    bool | None,
    Setting("bfloat16 weights and activations; else where the device computes in it.", hidden=True),
]
ReportTo = Annotated[
    tuple[Literal["tensorboard", "wandb"], ...],
    Setting("Trackers that get the losses as well.", hidden=True),
]
Warmup = Annotated[
    int, Setting("Steps until the peak; a tenth of the run at most.", min=0, hidden=True)
]
SaveEvery = Annotated[int, Setting("Steps between checkpoints.", min=1, hidden=True)]
Schedule = Annotated[
    Literal["linear", "cosine", "constant_with_warmup"],
    Setting("Course of the learning rate after the warm-up.", hidden=True),
]


@dataclass(frozen=True, slots=True)
class SftConfig:
    """Settings of a run of stage 1. Raises PastaError for settings that contradict each other."""

    data: Annotated[tuple[str, ...], Setting("Annotated JSONL (.gz); may be repeated.")] = ()
    base_name: Annotated[str, Setting("What the adapter calls its base.", hidden=True)] = ""
    start: Annotated[str | None, Setting("Adapter or run folder to continue from.")] = None
    plain: Annotated[bool, Setting("Train without the tags: the baseline.", flag="--plain")] = False
    scheme: Annotated[str, Setting(f"Positions: {', '.join(SCHEMES)}.", hidden=True)] = "shared-max"
    topic: Annotated[
        Literal["required", "none"], Setting("none: take topics out.", hidden=True)
    ] = "required"
    joins: Annotated[
        tuple[Joining, ...],
        Setting("How chunks are read: kv; text for servers. May be repeated.", flag="--join"),
    ] = (Joining.kv,)
    epochs: Annotated[int, Setting("Passes over the rows.", min=1)] = 3
    max_steps: Annotated[int | None, Setting("Optimiser steps at most.", min=1)] = None
    learning_rate: Annotated[float, Setting("Peak of the learning rate.", min=0)] = 5e-4
    warmup_steps: Warmup = 20
    schedule: Schedule = "linear"
    lora_rank: Annotated[int, Setting("0 trains all weights, not LoRA.", min=0)] = 16
    lora_alpha: Annotated[
        int | None, Setting("Scale of LoRA; else twice the rank.", min=1, hidden=True)
    ] = None
    lora_targets: Annotated[
        tuple[str, ...], Setting("Layers with LoRA; else all.", hidden=True)
    ] = ()
    load_in_4bit: Annotated[
        bool, Setting("4-bit base under LoRA (QLoRA); needs a GPU.", hidden=True)
    ] = False
    max_tokens: Annotated[int, Setting("Longest row in tokens.", flag="--max-length", min=8)] = 512
    pack_tokens: Annotated[int, Setting("Tokens of one forward pass.", min=8)] = 320
    packs_per_step: Annotated[int, Setting("Packs of a step, in all processes.", min=1)] = 6
    save_every_steps: SaveEvery = 50
    eval_data: Annotated[tuple[str, ...], Setting("Held-out JSONL (.gz): log its loss.")] = ()
    seed: Annotated[int, Setting("Seed of row order and new weights.", min=0)] = 0
    bf16: Bf16 = None
    gradient_checkpointing: Annotated[
        bool, Setting("Less memory, a third more time.", hidden=True)
    ] = False
    try_prompts: Annotated[int, Setting("Prompts to answer at the end.", min=0, hidden=True)] = 5
    report_to: ReportTo = ()

    def __post_init__(self) -> None:
        if self.load_in_4bit and not self.lora_rank:
            raise PastaError("load_in_4bit is for LoRA: the weights of a 4-bit base cannot move")
        if self.start is not None and not self.lora_rank:
            raise PastaError(
                "all weights are to be trained, so there is no adapter to go on from: "
                "merge it first (pasta export --to hf)"
            )


@dataclass(frozen=True, slots=True)
class PreferenceConfig:
    """Settings of a run of stage 2. `engine` and `dtype` are resolved when the run begins.

    temperature: BoNBoN is derived for 1. At 1, a small model writes texts that it would never
                 write when it decodes greedily.
    lambda_:     weight of quality against speed; None is infinity, quality alone.
    """

    prompts: Annotated[tuple[str, ...], Setting("JSONL (.gz) of prompts; repeatable.")] = ()
    pairs: Annotated[tuple[str, ...], Setting("JSONL (.gz) of `chosen`, `rejected`.")] = ()
    policy: Annotated[str, Setting("Adapter to sample from and to train.")] = ""
    baseline: Annotated[str, Setting("Adapter of the baseline (`train sft --plain`).")] = ""
    engine: Annotated[
        Literal["auto", "fast", "torch", "llama", "remote"],
        Setting("Engine that decodes the samples."),
    ] = "auto"
    base_url: Annotated[
        tuple[str, ...], Setting("remote: a vLLM server of the base model; repeatable.")
    ] = ()
    dtype: Annotated[str, Setting("Number format of the engine's weights.", hidden=True)] = "auto"
    device: Annotated[str | None, Setting("cpu or cuda; else cuda if there is a GPU.")] = None
    cache_tokens: Annotated[
        int, Setting("Tokens in the engine's KV cache.", min=1, hidden=True)
    ] = 16384
    objective: Annotated[
        Literal["anchored", "square", "sigmoid", "rejection", "eagerness"],
        Setting(
            "Loss of a pair; square, sigmoid: BoNBoN's; rejection: the best alone; "
            "eagerness: learn when to promise and sync."
        ),
    ] = "anchored"
    replay: Annotated[
        tuple[str, ...], Setting("anchored: JSONL (.gz) rows of stage 1; repeatable.")
    ] = ()
    quality: Annotated[
        str, Setting("What grades answers: judge, checks, likelihood, or a FILE of grades.")
    ] = ""
    judge_base_url: Annotated[str, Setting("judge: address of an OpenAI-compatible API.")] = ""
    judge_model: Annotated[str, Setting("judge: name of the model there.")] = ""
    lambda_: Annotated[
        float | None,
        Setting("Weight of quality; `inf`: only quality.", flag="--lambda", min=0),
    ] = 1.0
    rounds: Annotated[int, Setting("Each samples from the last adapter.", min=1)] = 1
    samples: Annotated[int, Setting("Answers sampled for each prompt.", min=2)] = 8
    temperature: Annotated[float, Setting("Of the samples.", min=0.1, max=100, hidden=True)] = 1.0
    limit: Annotated[
        int | None, Setting("Prompts to take, chosen by the seed.", min=1, hidden=True)
    ] = None
    max_prompt_chars: Annotated[
        int, Setting("Longer prompts are left out.", min=1, hidden=True)
    ] = 1000
    max_tokens: Annotated[int, Setting("Longest answer in tokens, with tags.", min=1)] = 400
    max_threads: Annotated[int, Setting("Live threads of an answer.", min=1, hidden=True)] = 12
    alpha: Annotated[
        float, Setting("square, sigmoid: weight of the SFT term.", min=0, max=1, hidden=True)
    ] = 0.005
    epochs: Annotated[int, Setting("Passes over the pairs of a round.", min=1, hidden=True)] = 1
    learning_rate: Annotated[float, Setting("Peak of the learning rate.", min=0)] = 1e-5
    warmup_steps: Warmup = 5
    schedule: Schedule = "linear"
    pairs_per_step: Annotated[int, Setting("Pairs of one optimiser step.", min=1, hidden=True)] = 8
    save_every_steps: SaveEvery = 10
    seed: Annotated[
        int, Setting("Seed of the samples and of the order of pairs.", min=0, hidden=True)
    ] = 0
    eager_share: Annotated[
        float | None,
        Setting("Share of eager samples; else 0.5 for eagerness.", min=0, max=1, hidden=True),
    ] = None
    eager_bias: Annotated[
        float, Setting("Eagerness of these samples.", min=-100, max=100, hidden=True)
    ] = 2.0
    bf16: Bf16 = None
    report_to: ReportTo = ()

    def __post_init__(self) -> None:
        if self.lambda_ == math.inf:  # JSON has no infinity
            object.__setattr__(self, "lambda_", None)
        if self.eager_share is None:
            share = 0.5 if self.objective == "eagerness" else 0.0
            object.__setattr__(self, "eager_share", share)
        if self.objective == "eagerness" and self.pairs:
            raise PastaError("eagerness is learned from samples: give --prompts, not --pairs")
        if self.objective == "eagerness" and self.temperature != 1:
            raise PastaError("eagerness is learned from samples at a temperature of 1")

    @property
    def rules(self) -> Rules:
        """The limits of a sampled answer."""
        return Rules(max_tokens=self.max_tokens, max_threads=self.max_threads, max_chunks=16)

    def eagerness_of(self, number: int) -> float | None:
        """Return the eagerness that the sample of this number is drawn with.

        None is the checkpoint's own. The first samples of a prompt are the eager ones.
        """
        assert self.eager_share is not None, "it is resolved when the settings are made"
        return self.eager_bias if number < self.eager_share * self.samples else None

    @property
    def joining(self) -> Joining:
        """How the samples join chunks, and so the join that is trained. Servers know only text."""
        return Joining.text if self.engine == "remote" else Joining.kv


Config = SftConfig | PreferenceConfig
SAMPLING = (
    "prompts",
    "policy",
    "baseline",
    "engine",
    "dtype",
    "samples",
    "temperature",
    "seed",
    *("eager_share", "eager_bias", "limit", "max_prompt_chars", "max_tokens", "max_threads"),
)
"""Settings that the samples and their measures depend on."""
QUALITY_SOURCES = ("judge", "checks", "likelihood")
"""Values of `quality` that name no file."""
IDLE_WITH_PAIRS = {*SAMPLING, "samples_from", "rounds", "lambda_", "quality"} - {
    "policy",
    "seed",
    "max_tokens",
}
"""Options that contradict --pairs. A settings file may have them, for other runs."""


def hidden_settings(config_class: type[Any]) -> list[str]:
    """Return the names of the settings that only a file can have."""
    hints = get_type_hints(config_class, include_extras=True)
    return [field.name for field in fields(config_class) if get_args(hints[field.name])[1].hidden]


def read_settings_file(path: Path, config_class: type[Any]) -> dict[str, Any]:
    """Return the settings in a YAML or JSON file. Raises PastaError that names the mistake.

    A file for both stages holds the settings of each under its command's name, `sft` or
    `preference`.
    """
    import yaml

    with errors_as(f"{path} cannot be read", OSError, UnicodeDecodeError, yaml.YAMLError):
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    if isinstance(contents, dict):
        contents = contents.get("sft" if config_class is SftConfig else "preference", contents)
    if not isinstance(contents, dict):
        raise PastaError(f"{path} holds no settings, such as `epochs: 2`")
    hints = get_type_hints(config_class, include_extras=True)
    try:
        return dict(_parse_setting(key, value, hints) for key, value in contents.items())
    except PastaError as error:
        raise PastaError(f"{path}: {error}") from error


def _parse_setting(key: Any, value: Any, hints: dict[str, Any]) -> tuple[str, Any]:
    """Return the name and the checked value of a field. Raises PastaError."""
    name = f"{key}_" if iskeyword(str(key)) else str(key)
    check_name("setting", name, list(hints))
    kind, setting = get_args(hints[name])
    try:
        parsed = _parsed(value, kind)
    except (TypeError, ValueError):
        raise PastaError(f"{key} is {value!r}, not {formatannotation(kind)}") from None
    if parsed is not None and setting.min is not None and not parsed >= setting.min:
        raise PastaError(f"{key} is {parsed}, less than {setting.min}")
    if parsed is not None and setting.max is not None and not parsed <= setting.max:
        raise PastaError(f"{key} is {parsed}, more than {setting.max}")
    return name, parsed


def _parsed(value: Any, kind: Any) -> Any:
    """Convert a value of a file to the type of its field. Raises TypeError or ValueError."""
    if isinstance(kind, UnionType):
        kind = NoneType if value is None else get_args(kind)[0]
    if get_origin(kind) is tuple and isinstance(value, list):
        item_kind = get_args(kind)[0]
        return tuple(_parsed(item, item_kind) for item in value)
    if get_origin(kind) is Literal and value in get_args(kind):
        return value
    if kind is float and not isinstance(value, bool):
        return float(value)  # YAML reads 1e-4 as a string
    if kind is Joining:
        return Joining(value)
    if type(value) is not kind:
        raise TypeError
    return value
