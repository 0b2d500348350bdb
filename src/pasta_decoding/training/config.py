"""The settings of both stages: each annotated field is an option of its command, too.

Nothing here needs torch: `pasta train --help` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining

if TYPE_CHECKING:
    from pasta_decoding.runtime.request import Rules

Schedule = Annotated[
    Literal["linear", "cosine", "constant_with_warmup"],
    Option(help="Course of the learning rate after the warm-up."),
]


def joins_named(names: Iterable[str]) -> tuple[Joining, ...]:
    """Return the joins of these names. Raises PastaError for one of another version."""
    try:
        return tuple(map(Joining, names))
    except ValueError as error:
        known = ", ".join(join.value for join in Joining)
        raise PastaError(f"unknown join: {error}; this version knows {known}") from error


@dataclass(frozen=True, slots=True)
class SftConfig:
    """One finetuning run; its resolved form is `config.json` in the run folder.

    start:          folder of an adapter to go on from; None starts a new one.
    scheme:         the position scheme, by name.
    topic:          "none" leaves the topics out of all promises; "required" refuses rows without.
    joins:          those that it is trained for.
    eval_data:      files of held-out rows, whose loss is measured whenever a checkpoint is saved.
    lora_rank:      with 0 `adapter` is a whole model.
    lora_targets:   names of linear layers; none means all of them.
    max_tokens:     a longer answer is cut between parts.
    packs_per_step: over all processes.
    max_steps:      None for all epochs. The schedule ends there.
    bf16:           what is trained stays float32.
    """

    data: tuple[str, ...]
    base_name: str
    start: str | None = None
    plain: Annotated[
        bool, Option("--plain", help="Take the tags out: trains the sequential baseline.")
    ] = False
    scheme: str = "shared-max"
    topic: str = "required"
    joins: tuple[Joining, ...] = (Joining.kv,)
    epochs: Annotated[int, Option(min=1, help="Times that each row is shown.")] = 3
    max_steps: Annotated[int | None, Option(min=1, help="Optimiser steps at most.")] = None
    learning_rate: Annotated[float, Option(min=0, help="Peak of the learning rate.")] = 5e-4
    warmup_steps: Annotated[
        int, Option(min=0, help="Steps until the peak; a tenth of the run at most.")
    ] = 20
    schedule: Schedule = "linear"
    lora_rank: Annotated[int, Option(min=0, help="0 trains all weights, not LoRA.")] = 16
    lora_alpha: Annotated[
        int | None, Option(min=1, help="Scale of LoRA; twice the rank if left out.")
    ] = None
    lora_targets: Annotated[
        tuple[str, ...],
        Option("--lora-target", help="Linear layers that get LoRA, such as q_proj; else all."),
    ] = ()
    max_tokens: Annotated[
        int, Option("--max-length", min=8, help="Tokens of one answer and prompt.")
    ] = 512
    pack_tokens: Annotated[int, Option(min=8, help="Tokens of one forward pass.")] = 320
    packs_per_step: Annotated[int, Option(min=1, help="Packs of one optimiser step.")] = 6
    save_every_steps: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 50
    eval_data: tuple[str, ...] = ()
    eval_share: Annotated[
        float, Option(min=0, max=0.5, help="Share of --data to hold out for that instead.")
    ] = 0.0
    seed: Annotated[int, Option(min=0, help="Seed of order and of new weights.")] = 0
    bf16: Annotated[bool, Option(help="bfloat16 weights and activations.")] = True
    gradient_checkpointing: Annotated[
        bool, Option("--gradient-checkpointing", help="Less memory, a third more time.")
    ] = False
    attention: Annotated[
        Literal["auto", "flex", "dense"],
        Option(help="auto: flex, with block masks, on a GPU; dense masks elsewhere."),
    ] = "auto"

    def __post_init__(self) -> None:
        if self.eval_data and self.eval_share:
            raise PastaError("--eval-data and --eval-share are two ways: give one of them")
        if self.start is not None and not self.lora_rank:
            raise PastaError(
                "all weights are to be trained, so there is no adapter to go on from: "
                "merge it first (pasta export --to hf)"
            )


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


@dataclass(frozen=True, slots=True)
class PreferenceConfig:
    """One run of stage 2; its resolved form is `config.json` in the run folder.

    policy:           adapter that the first round samples from and trains on.
    baseline:         adapter of the sequential baseline.
    limit:            among those of at most `max_prompt_chars`.
    engine:           what decodes, in words; answers of two engines differ in near-ties.
    lambda_:          None is infinity.
    temperature:      of the samples. BoNBoN is derived for 1, where a small model writes what it
                      never would when it decodes greedily.
    bf16:             LoRA and its optimiser stay float32.
    """

    prompts: tuple[str, ...]
    policy: str
    baseline: str
    engine: str = ""
    objective: Annotated[
        Literal["bonbon", "rejection"],
        Option(help="bonbon: best against worst. rejection: finetune on the best alone."),
    ] = "bonbon"
    lambda_: Annotated[
        float | None,
        Option("--lambda", min=0, callback=_finite, help="Weight of quality; `inf`: nothing else."),
    ] = 1.0
    rounds: Annotated[int, Option(min=1, help="Each samples from the one before.")] = 1
    samples: Annotated[int, Option(min=2, help="Annotated answers a prompt.")] = 8
    temperature: Annotated[float, Option(min=0.1, help="Of the samples.")] = 1.0
    baseline_samples: Annotated[
        int, Option(min=1, help="Sequential answers a prompt, of the baseline.")
    ] = 4
    limit: Annotated[
        int | None, Option(min=1, help="Take this many of the prompts, chosen by the seed.")
    ] = None
    max_prompt_chars: Annotated[int, Option(min=1, help="Longer prompts are left out.")] = 1000
    max_tokens: Annotated[int, Option(min=1, help="Of an answer, tags included.")] = 400
    max_threads: Annotated[int, Option(min=1, help="Live threads of an answer.")] = 12
    alpha: Annotated[float, Option(min=0, max=1, help="Weight of the SFT term.")] = 0.005
    epochs: Annotated[int, Option(min=1, help="Over the pairs of a round.")] = 1
    learning_rate: Annotated[float, Option(min=0, help="Peak of the learning rate.")] = 1e-4
    warmup_steps: Annotated[int, Option(min=0, help="Steps until the peak.")] = 5
    schedule: Schedule = "linear"
    pairs_per_step: Annotated[int, Option(min=1, help="Pairs of one optimiser step.")] = 4
    save_every_steps: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 10
    seed: Annotated[int, Option(min=0, help="Seed of samples and of the pairs' order.")] = 0
    bf16: Annotated[bool, Option(help="bfloat16 weights and activations.")] = True

    @property
    def rules(self) -> Rules:
        """How far an annotated answer may go."""
        from pasta_decoding.runtime.request import Rules

        return Rules(max_tokens=self.max_tokens, max_threads=self.max_threads, max_chunks=16)


# What neither samples nor what is measured of them depend on: how pairs are chosen and trained on.
FREE_OF_SAMPLES = frozenset(one.name for one in fields(PreferenceConfig)) - {
    "prompts", "policy", "baseline", "engine", "samples", "temperature",
    "baseline_samples", "limit", "max_prompt_chars", "max_tokens", "max_threads", "seed",
}  # fmt: skip
