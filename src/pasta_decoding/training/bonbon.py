"""The loss of stage 2: BoNBoN (arXiv 2406.00832), as its paper states it.

    alpha * (-log p(best)) + (1 - alpha) * ((log p/q (best) - log p/q (worst)) - 1 / (2 beta))^2
    beta = 1 / (2 (N - 1) H(N - 1)),  H(n) = 1 + 1/2 + ... + 1/n

p is the trained model, and q is the model that the N candidates were sampled from. The
log-probability of a sequence is the sum over its labels: those of all threads, without forced
tokens. The code published with the paper does not compute this square; it calls the sigmoid loss of
DPO instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from sys import maxsize
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from pasta_decoding.data.rows import Row
from pasta_decoding.lang.layout import Joining, Layout
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.training.config import PreferenceConfig, SftConfig
from pasta_decoding.training.examples import compile_answer, compile_groups
from pasta_decoding.training.loop import share_of
from pasta_decoding.training.run import tracked
from pasta_decoding.training.sample import Sample
from pasta_decoding.training.score import PreferencePair
from pasta_decoding.training.view import Example, LossParts, label_logprobs


def target_gap(candidates: int) -> float:
    """Return 1 / (2 beta) in nats: the gap that best and worst of N samples should have."""
    assert candidates > 1, "best and worst are two answers"
    others = candidates - 1
    harmonic_number = sum(1 / n for n in range(1, others + 1))
    return others * harmonic_number


def bonbon_loss(
    best: Tensor,
    worst: Tensor,
    reference_best: Tensor,
    reference_worst: Tensor,
    *,
    target: float,
    alpha: float,
) -> tuple[Tensor, LossParts]:
    """Return the loss of one pair from four log-probabilities (scalars, nats), and its parts.

    sft:    -log p(best).
    square: the squared distance of `gap` from its target.
    gap:    log-ratio of the best minus log-ratio of the worst.
    drift:  mean of both log-ratios; it tells how far p moved away from q.
    """
    ratio_best = best - reference_best
    ratio_worst = worst - reference_worst
    gap = ratio_best - ratio_worst
    square = (gap - target) ** 2
    drift = (ratio_best + ratio_worst) / 2
    total = alpha * -best + (1 - alpha) * square
    return total, {"sft": -best, "square": square, "gap": gap, "drift": drift}


def preference_loss(
    logprobs: Sequence[Tensor], example: Example, *, alpha: float
) -> tuple[Tensor, LossParts]:
    """Return BoNBoN's loss of a pair, or the loss of finetuning on a best answer alone.

    The parts of a pair also have the target of the gap, and whether the gap is above 0.
    """
    best, worst = answer_logprobs(logprobs, example)
    if worst is None:
        return -best, {"sft": -best}
    target = target_gap(example.candidates)
    reference_best, reference_worst = map(torch.tensor, example.reference)
    total, parts = bonbon_loss(
        best, worst, reference_best, reference_worst, target=target, alpha=alpha
    )
    accuracy = (parts["gap"] > 0).float()
    return total, parts | {"target": torch.tensor(target), "accuracy": accuracy}


def answer_logprobs(logprobs: Sequence[Tensor], example: Example) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of the best and the worst answer, summed over their layouts.

    The second is None if the example has only a best answer.
    """
    best = _total(logprobs[: example.best_rows])
    worst_rows = logprobs[example.best_rows :]
    return best, _total(worst_rows) if worst_rows else None


def _total(logprobs: Sequence[Tensor]) -> Tensor:
    return torch.stack([logprobs_L.sum() for logprobs_L in logprobs]).sum()


def lay_out_pairs(
    samples: Sequence[Sample],
    pairs: Sequence[PreferencePair],
    joining: Joining,
    loaded: LoadedModel,
) -> list[Example]:
    """Lay the pairs out. The promises of best answers get the true lengths of their chunks."""
    control = loaded.checkpoint.control
    settings = SftConfig(scheme=loaded.checkpoint.scheme, joins=(joining,), max_tokens=maxsize)

    def rows_of(sample: Sample) -> list[Layout]:
        return compile_answer(
            sample.prompt_ids, sample.segments, control.async_close, sample.end, settings
        )

    sample_by_key = {(sample.prompt, sample.number): sample for sample in samples}
    examples = []
    for pair in pairs:
        best = sample_by_key[pair.prompt, pair.best].with_true_lengths(control)
        worst = sample_by_key[pair.prompt, pair.worst]
        best_rows = rows_of(best)
        examples.append(
            Example(
                best_rows + rows_of(worst),
                best_rows=len(best_rows),
                candidates=pair.candidates,
            )
        )
    return examples


def compile_pairs(
    pairs: Sequence[tuple[Row, Row]], config: PreferenceConfig, loaded: LoadedModel
) -> list[Example]:
    """Lay out pairs of a chosen and a rejected answer as the best and the worst of 2.

    Raises PastaError if no pair can be used.
    """
    topic: Any = loaded.checkpoint.topic
    settings = SftConfig(scheme=loaded.checkpoint.scheme, topic=topic, max_tokens=config.max_tokens)
    layouts_by_pair = compile_groups(pairs, loaded, settings)
    return [Example(layouts, candidates=2) for layouts in layouts_by_pair]


def with_references(model: Any, examples: Sequence[Example], *, bf16: bool) -> list[Example]:
    """Return the pairs with their log-probabilities before the first step.

    They are computed exactly as in training. The processes share the work.
    """
    model.eval()
    share = share_of(examples)
    references: list[tuple[float, ...]] = []
    with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        for example in tracked(share, "reference", len(share)):
            best, worst = answer_logprobs(label_logprobs(model, example.layouts), example)
            assert worst is not None, "a pair has two answers"
            references.append((float(best), float(worst)))
    all_references = gather_object(references)
    return [
        replace(example, reference=reference)
        for example, reference in zip(examples, all_references, strict=True)
    ]
