"""Pairs of a best and a worst answer as examples of stage 2, and the loss of such an example."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from random import Random
from sys import maxsize
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from pasta_decoding.data.rows import Row
from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.lang.layout import Joining, Layout
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.training.config import PreferenceConfig, SftConfig
from pasta_decoding.training.examples import compile_answer, compile_groups
from pasta_decoding.training.loop import share_of
from pasta_decoding.training.objectives import anchored_loss, bonbon_loss
from pasta_decoding.training.run import tracked
from pasta_decoding.training.sample import Sample
from pasta_decoding.training.score import PreferencePair
from pasta_decoding.training.view import Example, LossParts, label_logprobs


def preference_loss(
    logprobs: Sequence[Tensor], example: Example, *, config: PreferenceConfig
) -> tuple[Tensor, LossParts]:
    """Return the loss of an example under the objective of the run, and its parts."""
    best, worst, replay = answer_logprobs(logprobs, example)
    if config.objective == "rejection":
        return -best, {"sft": -best}
    reference_best, reference_worst = example.reference
    if config.objective == "anchored":
        return anchored_loss(
            best,
            worst,
            replay,
            reference_best=reference_best,
            reference_worst=reference_worst,
            best_of=example.best_of,
            worst_of=example.worst_of,
        )
    return bonbon_loss(
        best,
        worst,
        reference_best=reference_best,
        reference_worst=reference_worst,
        candidates=max(example.best_of, example.worst_of),
        alpha=config.alpha,
        sigmoid=config.objective == "sigmoid",
    )


def answer_logprobs(logprobs: Sequence[Tensor], example: Example) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of best, worst and replayed row, summed over their labels.

    An answer that the example does not have counts 0. Of the worst, only the labels that
    `example.worst_counts` marks are summed.
    """
    replay_start = len(logprobs) - example.replay_rows
    best = logprobs[: example.best_rows]
    worst = [
        logprobs_L[torch.tensor(counts_L, device=logprobs_L.device)]
        for logprobs_L, counts_L in zip(
            logprobs[example.best_rows : replay_start], example.worst_counts, strict=True
        )
    ]
    return _total(best), _total(worst), _total(logprobs[replay_start:])


def _total(logprobs: Sequence[Tensor]) -> Tensor:
    return sum((logprobs_L.sum() for logprobs_L in logprobs), torch.tensor(0.0))


def differing_labels(
    best: Sequence[Layout], worst: Sequence[Layout], silent: frozenset[int]
) -> tuple[tuple[bool, ...], ...]:
    """Mark, for each layout of the worst answer, the labels by which it may be pushed down.

    Left out are `silent` labels, and what best and worst have in common before they first differ.

    silent: ends, closings of chunks and syncs. Most worst answers end and join as they should.
    """
    marks: list[tuple[bool, ...]] = []
    has_differed = False
    for index, layout in enumerate(worst):
        best_labels = labels_of(best[index]) if index < len(best) else []
        layout_marks = []
        for position, label in enumerate(labels_of(layout)):
            if not has_differed and best_labels[position : position + 1] != [label]:
                has_differed = True
            layout_marks.append(has_differed and label not in silent)
        marks.append(tuple(layout_marks))
    return tuple(marks)


def labels_of(layout: Layout) -> list[int]:
    return [label for label in layout.label if label is not None]


def silent_labels(control: ControlTokens, ends: Sequence[int | None]) -> frozenset[int]:
    """Return the labels of endings: of answers, of chunks, and of waiting for chunks."""
    known_ends = [end for end in ends if end is not None]
    return frozenset([control.async_close, control.sync, *known_ends])


def make_pair(
    best: Sequence[Layout],
    worst: Sequence[Layout],
    *,
    best_of: int,
    worst_of: int,
    silent: frozenset[int],
    objective: str,
) -> Example:
    """Return the example of one pair as its objective needs it."""
    if objective == "rejection":
        return Example(tuple(best), best_rows=len(best), best_of=best_of)
    if objective == "anchored":
        counts = differing_labels(best, worst, silent)
    else:
        counts = tuple((True,) * len(labels_of(layout)) for layout in worst)
    return Example(
        (*best, *worst),
        best_rows=len(best),
        worst_counts=counts,
        best_of=best_of,
        worst_of=worst_of,
    )


def lay_out_pairs(
    samples: Sequence[Sample],
    pairs: Sequence[PreferencePair],
    config: PreferenceConfig,
    loaded: LoadedModel,
) -> list[Example]:
    """Lay the pairs out. The promises of best answers get the true lengths of their chunks."""
    control = loaded.checkpoint.control
    settings = SftConfig(
        scheme=loaded.checkpoint.scheme, joins=(config.joining,), max_tokens=maxsize
    )

    def rows_of(sample: Sample) -> list[Layout]:
        return compile_answer(
            sample.prompt_ids, sample.segments, control.async_close, sample.end, settings
        )

    sample_by_key = {(sample.prompt, sample.number): sample for sample in samples}
    examples = []
    for pair in pairs:
        best = sample_by_key[pair.prompt, pair.best].with_true_lengths(control)
        worst = sample_by_key[pair.prompt, pair.worst]
        example = make_pair(
            rows_of(best),
            rows_of(worst),
            best_of=pair.best_of,
            worst_of=pair.worst_of,
            silent=silent_labels(control, [best.end, worst.end]),
            objective=config.objective,
        )
        examples.append(example)
    return examples


def compile_pairs(
    pairs: Sequence[tuple[Row, Row]], config: PreferenceConfig, loaded: LoadedModel
) -> list[Example]:
    """Lay out pairs of a chosen and a rejected answer as the best and the worst of 2.

    Raises PastaError if no pair can be used.
    """
    settings = _row_settings(loaded, Joining.kv, config.max_tokens)
    silent = silent_labels(loaded.checkpoint.control, [loaded.end])
    return [
        make_pair([best], [worst], best_of=2, worst_of=2, silent=silent, objective=config.objective)
        for best, worst in compile_groups(pairs, loaded, settings)
    ]


def compile_replay(
    rows: Sequence[Row], config: PreferenceConfig, loaded: LoadedModel
) -> list[list[Layout]]:
    """Lay out rows of stage 1 to be replayed: every second one has a sync, if any has.

    Raises PastaError if no row can be used.
    """
    settings = _row_settings(loaded, config.joining, maxsize)
    compiled = compile_groups(([row] for row in rows), loaded, settings)
    Random(config.seed).shuffle(compiled)
    sync = loaded.checkpoint.control.sync
    with_sync: list[list[Layout]] = []
    without_sync: list[list[Layout]] = []
    for layouts in compiled:
        has_sync = any(sync in labels_of(layout) for layout in layouts)
        (with_sync if has_sync else without_sync).append(layouts)
    if not (with_sync and without_sync):
        return compiled
    alternating: list[list[Layout]] = []
    for synced, plain in zip(cycle(with_sync), without_sync, strict=False):
        alternating += [synced, plain]
    return alternating


def with_replay(
    examples: Sequence[Example], replay: Sequence[Sequence[Layout]]
) -> Iterator[Example]:
    """Yield each example with the next replayed row behind its answers."""
    for example, layouts in zip(examples, cycle(replay), strict=False):
        yield replace(example, layouts=(*example.layouts, *layouts), replay_rows=len(layouts))


def _row_settings(loaded: LoadedModel, joining: Joining, max_tokens: int) -> SftConfig:
    topic: Any = loaded.checkpoint.topic
    return SftConfig(
        scheme=loaded.checkpoint.scheme, topic=topic, joins=(joining,), max_tokens=max_tokens
    )


def with_references(model: Any, examples: Sequence[Example], *, bf16: bool) -> list[Example]:
    """Return the pairs with their log-probabilities before the first step.

    They are computed exactly as in training. The processes share the work.
    """
    model.eval()
    share = share_of(examples)
    references: list[tuple[float, float]] = []
    with torch.inference_mode(), torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        for example in tracked(share, "reference", len(share)):
            best, worst, _ = answer_logprobs(label_logprobs(model, example.layouts), example)
            references.append((float(best), float(worst)))
    all_references = gather_object(references)
    return [
        replace(example, reference=reference)
        for example, reference in zip(examples, all_references, strict=True)
    ]
