"""The loss of stage 2: BoNBoN (arXiv 2406.00832), as its paper states it.

    alpha * (-log p(best)) + (1 - alpha) * ((log p/q (best) - log p/q (worst)) - 1 / (2 beta))^2
    beta = 1 / (2 (N - 1) H(N - 1)),  H(n) = 1 + 1/2 + ... + 1/n

p is the model that is trained, q the one that the N candidates were sampled from, and a
sequence's log-probability is the sum over its labels: all threads, forced tokens left out. The
code that was published beside that paper does not compute this square: it calls the sigmoid loss
of DPO instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from sys import maxsize
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from pasta_decoding.data.rows import Row
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.training.config import PreferenceConfig, SftConfig
from pasta_decoding.training.loop import share_of
from pasta_decoding.training.run import tracked
from pasta_decoding.training.sample import Sample
from pasta_decoding.training.score import PreferencePair
from pasta_decoding.training.sft import compile_answer, compile_groups
from pasta_decoding.training.view import Example, LossParts, label_logprobs


def target_gap(candidates: int) -> float:
    """Return 1 / (2 beta) in nats: the gap of best-of-N against worst-of-N."""
    assert candidates > 1, "a best and a worst are two"
    others = candidates - 1
    return others * sum(1 / n for n in range(1, others + 1))


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

    sft:    -log p(best), the whole sequence.
    square: the squared distance of `gap` from its target.
    gap:    log-ratio of the best minus log-ratio of the worst.
    drift:  mean of both log-ratios: how far p went from q where q sampled.
    """
    ratio_best, ratio_worst = best - reference_best, worst - reference_worst
    gap = ratio_best - ratio_worst
    square = (gap - target) ** 2
    drift = (ratio_best + ratio_worst) / 2
    total = alpha * -best + (1 - alpha) * square
    return total, {"sft": -best, "square": square, "gap": gap, "drift": drift}


def preference_loss(
    logprobs: Sequence[Tensor], example: Example, *, alpha: float
) -> tuple[Tensor, LossParts]:
    """Return BoNBoN's loss of a pair; of a best answer alone that of finetuning on it.

    The figures have the target of the gap as well, and the share of pairs with a gap above 0.
    """
    best, *worst = answer_logprobs(logprobs, example)
    if not worst:
        return -best, {"sft": -best}
    target = target_gap(example.candidates)
    reference = map(torch.tensor, example.reference)
    total, figures = bonbon_loss(best, *worst, *reference, target=target, alpha=alpha)
    accuracy = (figures["gap"] > 0).float()
    return total, figures | {"target": torch.tensor(target), "accuracy": accuracy}


def answer_logprobs(logprobs: Sequence[Tensor], example: Example) -> list[Tensor]:
    """Add up the labels of the best answer, and of the worst if there is one, over their rows."""
    rows = logprobs[: example.best_rows], logprobs[example.best_rows :]
    return [torch.stack([one.sum() for one in some]).sum() for some in rows if some]


def lay_out_pairs(
    samples: Sequence[Sample],
    pairs: Sequence[PreferencePair],
    joining: Joining,
    loaded: LoadedModel,
) -> list[Example]:
    """Lay the pairs out; the best promise the lengths that their chunks came to."""
    checkpoint, control = loaded.checkpoint, loaded.checkpoint.control
    settings = SftConfig(scheme=checkpoint.scheme, joins=(joining,), max_tokens=maxsize)
    sampled = {(sample.prompt, sample.number): sample for sample in samples}
    examples = []
    for pair in pairs:
        best = sampled[pair.prompt, pair.best].with_true_lengths(control)
        high, low = (
            compile_answer(one.prompt_ids, one.segments, control.async_close, one.end, settings)
            for one in (best, sampled[pair.prompt, pair.worst])
        )
        examples.append(Example(high + low, best_rows=len(high), candidates=pair.candidates))
    return examples


def compile_pairs(
    pairs: Sequence[tuple[Row, Row]], config: PreferenceConfig, loaded: LoadedModel
) -> list[Example]:
    """Lay out pairs of written answers: a chosen and a rejected one are the best and worst of 2."""
    checkpoint: Any = loaded.checkpoint
    scheme, topic = checkpoint.scheme, checkpoint.topic
    settings = SftConfig(scheme=scheme, topic=topic, max_tokens=config.max_tokens)
    return [Example(both, candidates=2) for both in compile_groups(pairs, loaded, settings)]


def with_references(model: Any, examples: Sequence[Example], *, bf16: bool) -> list[Example]:
    """Score every pair exactly as the training forward does, before there was a step."""
    model.eval()
    own = share_of(examples)
    with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        shown = tracked(own, "reference", len(own))
        scored = (answer_logprobs(label_logprobs(model, x.layouts), x) for x in shown)
        found = gather_object([tuple(map(float, each)) for each in scored])
    return [replace(one, reference=each) for one, each in zip(examples, found, strict=True)]
