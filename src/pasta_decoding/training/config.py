"""The settings of both stages. Their defaults are those of the commands, too.

Nothing here needs torch: `pasta train --help` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pasta_decoding.lang.layout import Joining

if TYPE_CHECKING:
    from pasta_decoding.runtime.rules import Rules


@dataclass(frozen=True, slots=True)
class SftConfig:
    """One finetuning run; its resolved form is `config.json` in the run folder.

    start:          folder of an adapter to go on from; None starts a new one.
    plain:          take the tags out: the sequential baseline of the same responses.
    scheme:         the position scheme, by name.
    topic:          "none" leaves the topics out of all promises; "required" refuses rows without.
    joins:          those that it is trained for.
    eval_data:      files of held-out rows, whose loss is measured whenever a checkpoint is saved.
    eval_share:     share of the rows of `data` that are held out instead, chosen by their ids.
    lora_rank:      0 trains all weights instead; `adapter` is then a whole model.
    max_tokens:     tokens of one answer with its prompt; a longer one is cut between parts.
    pack_tokens:    tokens of one pack, the unit of a forward pass.
    packs_per_step: packs whose gradients make one optimiser step, over all processes.
    max_steps:      optimiser steps at most; None for all epochs. The schedule ends there.
    bf16:           bfloat16 weights and activations; what is trained stays float32.
    gradient_checkpointing: compute activations again on the way back instead of keeping them.
    attention:      "flex" with block masks, "dense" masks, or "auto": flex on a GPU.
    """

    data: tuple[str, ...]
    base_name: str
    start: str | None = None
    plain: bool = False
    scheme: str = "shared-max"
    topic: str = "required"
    joins: tuple[Joining, ...] = (Joining.kv,)
    epochs: int = 3
    learning_rate: float = 5e-4
    warmup_steps: int = 20
    lora_rank: int = 16
    max_tokens: int = 512
    pack_tokens: int = 320
    packs_per_step: int = 6
    max_steps: int | None = None
    save_every_steps: int = 50
    seed: int = 0
    bf16: bool = True
    gradient_checkpointing: bool = False
    attention: str = "auto"
    eval_data: tuple[str, ...] = ()
    eval_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Weights:
    """What a round's scores are made with, besides the parts.

    efficiency:     "theoretical", or "own" for own tokens / critical path, whatever the baseline.
    lambda_:        weight of quality; None is infinity: nothing but quality.
    length_control: whether the slope over log length is subtracted.
    """

    efficiency: str = "theoretical"
    lambda_: float | None = 1.0
    length_control: bool = True


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
    check:            prompts whose greedy answers show each round's effect; None for no check.
    limit:            prompts, chosen by the seed among those of at most `max_prompt_chars`.
    engine:           what decodes, in words; answers of two engines differ in near-ties.
    samples:          annotated answers a prompt, at temperature 1.
    baseline_samples: sequential answers of the baseline a prompt.
    weights:          how scores are made; `lambda_` None is infinity.
    max_tokens:       tokens of one answer, tags included.
    """

    prompts: tuple[str, ...]
    policy: str
    baseline: str
    check: str | None = None
    check_limit: int = 50
    limit: int | None = None
    max_prompt_chars: int = 1000
    engine: str = ""
    rounds: int = 1
    samples: int = 8
    baseline_samples: int = 4
    max_tokens: int = 400
    max_threads: int = 12
    max_chunks: int = 16
    quality: str = "nats"
    weights: Weights = field(default_factory=Weights)
    alpha: float = 0.005
    epochs: int = 1
    learning_rate: float = 1e-4
    warmup_steps: int = 5
    pairs_per_step: int = 4
    save_every_steps: int = 10
    seed: int = 0
    bf16: bool = True

    @property
    def rules(self) -> Rules:
        """How far an annotated answer may go."""
        from pasta_decoding.runtime.rules import Rules

        return Rules(
            max_tokens=self.max_tokens, max_threads=self.max_threads, max_chunks=self.max_chunks
        )

    @property
    def pair_config(self) -> PairConfig:
        """How a round is trained."""
        return PairConfig(
            alpha=self.alpha,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            pairs_per_step=self.pairs_per_step,
            save_every_steps=self.save_every_steps,
            seed=self.seed,
            bf16=self.bf16,
        )
