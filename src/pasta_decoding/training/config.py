"""The settings of both stages, which are the options of the commands, too.

Nothing here needs torch: `pasta train --help` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining

if TYPE_CHECKING:
    from pasta_decoding.runtime.request import Rules


def joins_named(names: Iterable[str]) -> tuple[Joining, ...]:
    """Return the joins of these names. Raises PastaError for one of another version."""
    try:
        return tuple(map(Joining, names))
    except ValueError as error:
        known = ", ".join(join.value for join in Joining)
        raise PastaError(f"unknown join: {error}", hint=f"This version knows {known}.") from error


@dataclass(frozen=True, slots=True)
class SftConfig:
    """One finetuning run; its resolved form is `config.json` in the run folder.

    start:          folder of an adapter to go on from; None starts a new one.
    scheme:         the position scheme, by name.
    topic:          "none" leaves the topics out of all promises; "required" refuses rows without.
    joins:          those that it is trained for.
    eval_data:      files of held-out rows, whose loss is measured whenever a checkpoint is saved.
    lora_rank:      with 0 `adapter` is a whole model.
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
    epochs: Annotated[int, Option(min=1)] = 3
    max_steps: Annotated[int | None, Option(min=1, help="Optimiser steps at most.")] = None
    learning_rate: Annotated[float, Option(min=0)] = 5e-4
    warmup_steps: Annotated[int, Option(min=0)] = 20
    lora_rank: Annotated[int, Option(min=0, help="0 trains all weights, not LoRA.")] = 16
    max_tokens: Annotated[
        int, Option("--max-length", min=8, help="Tokens of one answer and prompt.")
    ] = 512
    pack_tokens: Annotated[int, Option(min=8, help="Tokens of one forward pass.")] = 320
    packs_per_step: Annotated[int, Option(min=1, help="Packs of one optimiser step.")] = 6
    save_every_steps: Annotated[int, Option(min=1)] = 50
    eval_data: tuple[str, ...] = ()
    eval_share: Annotated[
        float, Option(min=0, max=0.5, help="Share of --data to hold out for that instead.")
    ] = 0.0
    seed: Annotated[int, Option(min=0)] = 0
    bf16: Annotated[bool, Option(help="bfloat16 weights and activations.")] = True
    gradient_checkpointing: Annotated[
        bool, Option("--gradient-checkpointing", help="Less memory, a third more time.")
    ] = False
    attention: Annotated[
        Literal["auto", "flex", "dense"],
        Option(help="auto: flex, with block masks, on a GPU; dense masks elsewhere."),
    ] = "auto"


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


@dataclass(frozen=True, slots=True)
class Weights:
    """What a round's scores are made with, besides the parts.

    lambda_: None is infinity.
    """

    lambda_: Annotated[
        float | None,
        Option("--lambda", min=0, callback=_finite, help="Weight of quality; `inf`: nothing else."),
    ] = 1.0
    length_control: Annotated[
        bool, Option(help="Take the slope over length out of the scores.")
    ] = True


@dataclass(frozen=True, slots=True)
class PairConfig:
    """One training on pairs; kept as `config.json` beside its checkpoints.

    pairs_per_step: pairs whose gradients make one optimiser step.
    bf16:           bfloat16 weights and activations; LoRA and its optimiser stay float32.
    """

    alpha: float
    epochs: int
    learning_rate: float
    warmup_steps: int
    pairs_per_step: int
    save_every_steps: int
    seed: int
    bf16: bool


@dataclass(frozen=True, slots=True)
class PreferenceConfig:
    """One run; its resolved form is `config.json` in the run folder.

    policy:           adapter that the first round samples from and trains on.
    baseline:         adapter of the sequential baseline.
    limit:            among those of at most `max_prompt_chars`.
    engine:           what decodes, in words; answers of two engines differ in near-ties.
    quality:          what rates the samples.
    temperature:      of the samples. BoNBoN is derived for 1, where a small model writes what it
                      never would when it decodes greedily.
    """

    prompts: tuple[str, ...]
    policy: str
    baseline: str
    engine: str = ""
    quality: str = "nats"
    weights: Weights = field(default_factory=Weights)
    rounds: Annotated[int, Option(min=1, help="Each samples from the one before.")] = 1
    samples: Annotated[int, Option(min=2, help="Annotated answers a prompt.")] = 8
    temperature: Annotated[float, Option(min=0.1, help="Of the samples.")] = 1.0
    baseline_samples: Annotated[
        int, Option(min=1, help="Sequential answers a prompt, of the baseline.")
    ] = 4
    limit: Annotated[
        int | None, Option(min=1, help="So many of the prompts, chosen by the seed.")
    ] = None
    max_prompt_chars: Annotated[int, Option(min=1, help="Longer prompts are left out.")] = 1000
    true_lengths: Annotated[
        bool, Option(help="The best answer's promises give the lengths its chunks came to.")
    ] = True
    max_tokens: Annotated[int, Option(min=1, help="Of an answer, tags included.")] = 400
    max_threads: Annotated[int, Option(min=1, help="Live threads of an answer.")] = 12
    max_chunks: Annotated[int, Option(min=1, help="Chunks of an answer.")] = 16
    alpha: Annotated[float, Option(min=0, max=1, help="Weight of the SFT term.")] = 0.005
    epochs: Annotated[int, Option(min=1, help="Over the pairs of a round.")] = 1
    learning_rate: Annotated[float, Option(min=0)] = 1e-4
    warmup_steps: Annotated[int, Option(min=0)] = 5
    pairs_per_step: Annotated[int, Option(min=1, help="Pairs of one optimiser step.")] = 4
    save_every_steps: Annotated[int, Option(min=1)] = 10
    seed: Annotated[int, Option(min=0)] = 0
    bf16: Annotated[bool, Option(help="bfloat16 weights and activations.")] = True

    @property
    def rules(self) -> Rules:
        """How far an annotated answer may go."""
        from pasta_decoding.runtime.request import Rules

        return Rules(
            max_tokens=self.max_tokens, max_threads=self.max_threads, max_chunks=self.max_chunks
        )

    @property
    def pair_config(self) -> PairConfig:
        """How a round is trained."""
        return PairConfig(**{one.name: getattr(self, one.name) for one in fields(PairConfig)})
