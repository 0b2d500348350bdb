"""What a round of preference training leaves to look at: figures, worst repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from pasta_decoding.lang.measures import geometric_mean
from pasta_decoding.training.sample import Sample
from pasta_decoding.training.scoring import (
    PreferencePair,
    Scored,
    ScoreParts,
    Scores,
    centre,
)

WORST_REPEATS = 10


def summarise(
    samples: Sequence[Sample],
    scores: Scores,
    pairs: Sequence[PreferencePair],
    baseline: dict[str, float],
) -> dict[str, Any]:
    """Return the figures of a round: all answers, the best and the worst, how terms go together."""
    by_key = {(one.part.prompt, one.part.number): one for one in scores.scored}
    best = [by_key[pair.prompt, pair.best] for pair in pairs]
    worst = [by_key[pair.prompt, pair.worst] for pair in pairs]
    return {
        "prompts": len({sample.prompt for sample in samples}),
        "pairs": len(pairs),
        "baseline_tokens": fmean(baseline.values()),
        "quality_scale": scores.quality_scale,
        "length_slope": scores.length_slope,
        "all": describe(scores.scored),
        "best": describe(best) if best else None,
        "worst": describe(worst) if worst else None,
        "correlation": _correlations(scores.scored),
    }


def describe(scored: Sequence[Scored]) -> dict[str, float | None]:
    """Return the means over some answers."""
    parts = [one.part for one in scored]
    return {
        **describe_parts(parts),
        "efficiency": fmean(one.efficiency for one in scored),
        "score": fmean(one.score for one in scored),
    }


def describe_parts(parts: Sequence[ScoreParts]) -> dict[str, float | None]:
    """Return the means over some answers that need no baseline."""
    finished = [part.plain_tokens for part in parts if part.finished]
    chunks = sum(part.chunks for part in parts)
    return {
        "answers": len(parts),
        "finished": fmean(part.finished for part in parts),
        "sound": fmean(part.sound for part in parts),
        "hit_limit": fmean(part.hit_limit for part in parts),
        "plain_tokens_finished": fmean(finished) if finished else None,
        "tokens_per_step": geometric_mean(part.tokens_per_step for part in parts),
        "quality": fmean(part.quality for part in parts),
        "chunks": chunks / len(parts),
        "repeated_chunks": sum(part.repeated_chunks for part in parts) / chunks if chunks else 0.0,
        "idle_chunks": sum(part.idle_chunks for part in parts) / chunks if chunks else 0.0,
        "rep_4": fmean(part.rep_4 for part in parts),
    }


def _correlations(scored: Sequence[Scored]) -> dict[str, float | None]:
    """Return the correlations within prompts, finished answers only."""
    parts = [one.part for one in scored]
    columns = {
        "efficiency": [one.efficiency for one in scored],
        "quality": [part.quality for part in parts],
        "length": [math.log(max(1, part.plain_tokens)) for part in parts],
        "score": [one.score for one in scored],
    }
    centred = {name: centre(parts, values) for name, values in columns.items()}
    wanted = [
        ("efficiency", "quality"),
        ("efficiency", "length"),
        ("quality", "length"),
        ("score", "length"),
    ]
    return {f"{a}, {b}": _correlation(centred[a], centred[b]) for a, b in wanted}


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    norm = math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    return sum(a * b for a, b in zip(x, y, strict=True)) / norm if norm else None


def worst_repeats(samples: Sequence[Sample], scores: Scores) -> list[dict[str, Any]]:
    """Return the ten answers that repeat themselves most, text and figures.

    By the share of repeated chunks; where that is the same, by repeated runs of words.
    """

    def share(one: Scored) -> tuple[float, float]:
        return one.part.repeated_chunks / max(1, one.part.chunks), one.part.rep_4

    annotated = {(sample.prompt, sample.number): sample.annotated for sample in samples}
    ranked = sorted(scores.scored, key=share, reverse=True)[:WORST_REPEATS]
    return [
        {
            "prompt": one.part.prompt,
            "number": one.part.number,
            "chunks": one.part.chunks,
            "repeated_chunks": one.part.repeated_chunks,
            "rep_4": one.part.rep_4,
            "plain_tokens": one.part.plain_tokens,
            "new_tokens": one.part.new_tokens,
            "tokens_per_step": one.part.tokens_per_step,
            "efficiency": one.efficiency,
            "score": one.score,
            "annotated": annotated[one.part.prompt, one.part.number],
        }
        for one in ranked
    ]
