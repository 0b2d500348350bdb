"""Training on pairs: reference log-probabilities once, then BoNBoN steps by the Trainer.

Rejection sampling is the same with the best answers alone: there is no reference then.

Shapes: T tokens of a pair (both answers in a row, which do not see each other), L labelled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pasta_decoding.engines.support import attention_windows
from pasta_decoding.lang.layout import Layout
from pasta_decoding.training.bonbon import bonbon_loss, target_gap
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.loop import RunCallback, RunTrainer, Say, Show, training_arguments
from pasta_decoding.training.loss import Meter, logprobs_of
from pasta_decoding.training.view import model_inputs, packed_batch

_FIGURES = ("square", "gap", "target", "accuracy", "drift")
_BEGIN_AGAIN = (
    "Begin again in another --out with a lower --learning-rate; --samples-from this run's folder "
    "spares the sampling."
)


@dataclass(frozen=True, slots=True)
class PairExample:
    """Best and worst of a prompt, laid out; `candidates` is the N that they were chosen from.

    worst: None where the best is learnt alone.
    """

    best: Layout
    worst: Layout | None
    candidates: int

    @property
    def layouts(self) -> list[Layout]:
        """What is in the pack of this pair."""
        return [self.best] if self.worst is None else [self.best, self.worst]

    @property
    def tokens(self) -> int:
        """Tokens of the pack, prompts included."""
        return sum(len(layout.tokens) for layout in self.layouts)


@dataclass(frozen=True, slots=True)
class Reference:
    """Log-probabilities of both sequences under the policy that sampled them, in nats."""

    best: float
    worst: float


def reference_sums(model: Any, examples: Iterable[PairExample], *, bf16: bool) -> list[Reference]:
    """Score every pair exactly as the training forward does, before there was a step."""
    windows = attention_windows(model.config.get_text_config())
    device = next(model.parameters()).device
    model.eval()
    sums = []
    for example in examples:
        inputs = pair_inputs(example, windows, device)
        with (
            torch.inference_mode(),
            torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16),
        ):
            best, worst = log_probabilities(model, inputs)
        sums.append(Reference(float(best), float(worst)))
    return sums


def train_pairs(
    model: Any,
    examples: Sequence[PairExample],
    references: Sequence[Reference | None],
    config: PreferenceConfig,
    out: Path,
    say: Say,
    show: Show,
) -> None:
    """Let the Trainer step over all pairs, each epoch in an order of its own."""
    arguments = training_arguments(
        out,
        config,
        config.pairs_per_step,
        warmup_steps=config.warmup_steps,
        logging_steps=1,
    )
    alone = config.objective == "rejection"
    meter = Meter("sft") if alone else Meter("sft", *_FIGURES)
    plan = _plan(examples, references, config)
    watching = RunCallback(
        meter,
        [one["example"].tokens for one in plan],
        out=out,
        say=say,
        show=show,
        begin_again=lambda: _BEGIN_AGAIN,
        processes=arguments.world_size,
    )
    trainer = PairTrainer(
        meter,
        watching,
        alpha=config.alpha,
        model=model,
        args=arguments,
        train_dataset=plan,
        data_collator=partial(_collate, attention_windows(model.config.get_text_config())),
    )
    trainer.run()


def _plan(
    examples: Sequence[PairExample],
    references: Sequence[Reference | None],
    config: PreferenceConfig,
) -> list[dict[str, Any]]:
    """Fix the order of all epochs in advance, so that a resumed run sees the same one."""
    generator = torch.Generator().manual_seed(config.seed)
    items = [
        {"example": example, "reference": reference}
        for example, reference in zip(examples, references, strict=True)
    ]
    orders = [torch.randperm(len(items), generator=generator) for _ in range(config.epochs)]
    return [items[int(place)] for order in orders for place in order]


class PairTrainer(RunTrainer):
    """The Trainer with the loss of a pair; its batches are single pairs.

    It logs the parts of the loss (`sft`, `square`), the margin and where it should be (`gap`,
    `target`), the share of pairs with a gap above 0, and the mean log-ratio of all sequences.
    """

    def __init__(
        self, meter: Meter, watching: RunCallback, *, alpha: float, **settings: Any
    ) -> None:
        super().__init__(meter, watching, **settings)
        self._alpha = alpha
        # The loss is that of one pair: the Trainer makes the mean over the pairs of a step.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_arguments: Any, **_: Any) -> Any:
        """Return the loss of the one pair in `inputs`."""
        reference_2, target = inputs.pop("reference_2", None), inputs.pop("target")
        best, worst = log_probabilities(model, inputs)
        if reference_2 is None:
            self.meter.add(sft=-best)
            return -best
        found = bonbon_loss(best, worst, *reference_2, target=float(target), alpha=self._alpha)
        figures = {name: getattr(found, name) for name in ("sft", "square", "gap", "drift")}
        self.meter.add(**figures, target=target, accuracy=(found.gap > 0).float())
        return found.total


def _collate(windows: dict[str, int | None], items: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate a batch of one pair; masks are made here, so that they live for a step."""
    (item,) = items
    example, reference = item["example"], item["reference"]
    inputs = pair_inputs(example, windows)
    if reference is not None:
        inputs["reference_2"] = torch.tensor([reference.best, reference.worst])
    return {**inputs, "target": torch.tensor(target_gap(example.candidates))}


def pair_inputs(
    example: PairExample, windows: dict[str, int | None], device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return what `log_probabilities` takes: a forward's arguments, labels, where they part."""
    pair = packed_batch(example.layouts).to(device)
    best_labels = sum(label is not None for label in example.best.label)
    parts = [best_labels, len(pair.label_L) - best_labels]
    return {**model_inputs(pair, windows), "label_L": pair.label_L, "parts": torch.tensor(parts)}


def log_probabilities(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return log p of best and worst: sums over the labels of all their threads."""
    label_L, parts = inputs.pop("label_L"), inputs.pop("parts").tolist()
    best_L, worst_L = torch.split(logprobs_of(model(**inputs), label_L), parts)
    return best_L.sum(), worst_L.sum()
