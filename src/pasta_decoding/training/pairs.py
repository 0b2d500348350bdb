"""Training on pairs: reference log-probabilities once, then BoNBoN steps by the Trainer.

Rejection sampling is the same with the best answers alone: there is no reference then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.models.control_tokens import add_missing_tokens, grow_vocabulary
from pasta_decoding.models.load import default_device, holds_weights, load_base
from pasta_decoding.training.bonbon import bonbon_loss, target_gap
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.loop import RunTrainer, training_arguments
from pasta_decoding.training.lora import add_lora
from pasta_decoding.training.loss import Example, Meter, label_logprobs
from pasta_decoding.training.sample import Sample
from pasta_decoding.training.score import PreferencePair


class PreferenceLoss:
    """BoNBoN's loss of a pair, or finetuning on the best where the worst is left out.

    The metrics have the parts of the loss (`sft`, `square`), the margin and where it should be
    (`gap`, `target`), the share of pairs with a gap above 0, and the mean log-ratio (`drift`).
    """

    def __init__(self, config: PreferenceConfig) -> None:
        paired = ("square", "gap", "target", "accuracy", "drift")
        self.meter = Meter("sft", *(paired if config.objective == "bonbon" else ()))
        self._alpha = config.alpha

    def __call__(self, logprobs: Sequence[Tensor], example: Example, /) -> Tensor:
        """Return the loss of one pair."""
        best, *worst = (logprobs_L.sum() for logprobs_L in logprobs)
        if not worst:
            self.meter.add(sft=-best)
            return -best
        target, reference = target_gap(example.candidates), map(torch.tensor, example.reference)
        found = bonbon_loss(best, *worst, *reference, target=target, alpha=self._alpha)
        figures = {name: getattr(found, name) for name in ("sft", "square", "gap", "drift")}
        self.meter.add(**figures, target=torch.tensor(target), accuracy=(found.gap > 0).float())
        return found.total


def load_policy(base: Path, policy: Path, config: PreferenceConfig) -> tuple[Any, Any, Checkpoint]:
    """Return the policy with its LoRA, or all its weights, trainable; its tokenizer; its record."""
    checkpoint, whole = checkpoints.load(policy), holds_weights(policy)
    dtype = "bfloat16" if config.bf16 and not whole else "float32"
    model, tokenizer = load_base(policy if whole else base, dtype=dtype)
    add_missing_tokens(tokenizer, checkpoint.token_texts)
    checkpoints.check_match(checkpoint, model, tokenizer)
    grow_vocabulary(model, checkpoint.control)
    if not whole:  # the rank is the policy's own
        model = add_lora(model, checkpoint.control, rank=0, seed=config.seed, start=str(policy))
    return model.to(config.device or default_device()), tokenizer, checkpoint


def lay_out_pairs(
    checkpoint: Checkpoint, samples: Sequence[Sample], pairs: Sequence[PreferencePair]
) -> list[Example]:
    """Lay the pairs out; the best promise the lengths that their chunks came to."""
    scheme, control = scheme_named(checkpoint.scheme), checkpoint.control
    sampled = {(sample.prompt, sample.number): sample for sample in samples}
    examples = []
    for pair in pairs:
        best = sampled[pair.prompt, pair.best].with_true_lengths(control)
        layouts = (best, sampled[pair.prompt, pair.worst])
        laid = tuple(one.layout(scheme, control) for one in layouts)
        examples.append(Example(laid, candidates=pair.candidates))
    return examples


def with_references(model: Any, examples: Iterable[Example], *, bf16: bool) -> list[Example]:
    """Score every pair exactly as the training forward does, before there was a step."""
    model.eval()
    with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        scored = ((one, label_logprobs(model, one.layouts)) for one in examples)
        return [replace(one, reference=tuple(float(x.sum()) for x in each)) for one, each in scored]


def train_pairs(
    model: Any, examples: Sequence[Example], config: PreferenceConfig, out: Path, doing: str
) -> None:
    """Let the Trainer step over all pairs, each epoch in an order of its own."""
    # The order of all epochs is fixed in advance, so that a resumed run sees the same one.
    generator = torch.Generator().manual_seed(config.seed)
    orders = [torch.randperm(len(examples), generator=generator) for _ in range(config.epochs)]
    plan = [examples[int(place)] for order in orders for place in order]
    arguments = training_arguments(
        out, config, len(plan), config.pairs_per_step, model.device.type, logging_steps=1
    )
    RunTrainer(model, PreferenceLoss(config), plan, arguments, doing=doing).run()
