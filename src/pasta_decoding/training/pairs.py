"""Training on pairs: reference log-probabilities once, then BoNBoN steps by the Trainer.

Rejection sampling is the same with the best answers alone: there is no reference then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pasta_decoding.lang.layout import Layout
from pasta_decoding.training.bonbon import bonbon_loss, target_gap
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.loop import RunCallback, RunTrainer, Say, Show, training_arguments
from pasta_decoding.training.loss import Meter, label_logprobs

_BEGIN_AGAIN = (
    "Begin again in another --out with a lower --learning-rate; --samples-from this run's folder "
    "spares the sampling."
)


@dataclass(frozen=True, slots=True)
class PairExample:
    """Best and worst of a prompt, laid out; `candidates` is the N that they were chosen from.

    layouts:   of the best and the worst, or of the best alone. They do not see each other.
    reference: log-probabilities of both under the policy that sampled them, in nats.
    """

    layouts: tuple[Layout, ...]
    candidates: int
    reference: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the pack, prompts included."""
        return sum(len(layout.tokens) for layout in self.layouts)


def with_references(
    model: Any, examples: Iterable[PairExample], *, bf16: bool
) -> list[PairExample]:
    """Score every pair exactly as the training forward does, before there was a step."""
    kind = next(model.parameters()).device.type
    model.eval()
    with torch.inference_mode(), torch.autocast(kind, dtype=torch.bfloat16, enabled=bf16):
        return [
            replace(one, reference=tuple(float(each) for each in log_probabilities(model, one)))
            for one in examples
        ]


def log_probabilities(model: Any, example: PairExample) -> list[torch.Tensor]:
    """Return log p of each layout: sums over the labels of all its threads."""
    return [logprobs_L.sum() for logprobs_L in label_logprobs(model, example.layouts)]


def train_pairs(
    model: Any,
    examples: Sequence[PairExample],
    config: PreferenceConfig,
    out: Path,
    say: Say,
    show: Show,
) -> None:
    """Let the Trainer step over all pairs, each epoch in an order of its own.

    The metrics have the parts of the loss (`sft`, `square`), the margin and where it should be
    (`gap`, `target`), the share of pairs with a gap above 0, and the mean log-ratio (`drift`).
    """
    # The order of all epochs is fixed in advance, so that a resumed run sees the same one.
    generator = torch.Generator().manual_seed(config.seed)
    orders = [torch.randperm(len(examples), generator=generator) for _ in range(config.epochs)]
    plan = [examples[int(place)] for order in orders for place in order]
    device = next(model.parameters()).device.type
    arguments = training_arguments(
        out, config, len(plan), config.pairs_per_step, device, logging_steps=1
    )
    paired = ("square", "gap", "target", "accuracy", "drift")
    meter = Meter("sft", *(paired if config.objective == "bonbon" else ()))
    tokens = [one.tokens for one in plan]
    watching = RunCallback(
        meter, tokens, out=out, say=say, show=show, begin_again=lambda: _BEGIN_AGAIN
    )
    trainer = PairTrainer(
        meter,
        watching,
        alpha=config.alpha,
        model=model,
        args=arguments,
        train_dataset=plan,
        data_collator=lambda items: {"example": items[0]},
    )
    trainer.run()


class PairTrainer(RunTrainer):
    """The Trainer with the loss of a pair; its batches are single pairs."""

    def __init__(
        self, meter: Meter, watching: RunCallback, *, alpha: float, **settings: Any
    ) -> None:
        super().__init__(meter, watching, **settings)
        self._alpha = alpha
        # The loss is that of one pair: the Trainer makes the mean over the pairs of a step.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_arguments: Any, **_: Any) -> Any:
        """Return the loss of one pair."""
        example: PairExample = inputs["example"]
        best, *worst = log_probabilities(model, example)
        if not worst:
            self.meter.add(sft=-best)
            return -best
        target, reference = target_gap(example.candidates), map(torch.tensor, example.reference)
        found = bonbon_loss(best, *worst, *reference, target=target, alpha=self._alpha)
        figures = {name: getattr(found, name) for name in ("sft", "square", "gap", "drift")}
        self.meter.add(**figures, target=torch.tensor(target), accuracy=(found.gap > 0).float())
        return found.total

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:  # noqa: ARG002
        """Return 0: the Trainer cannot count them in what is no tensor."""
        return 0
