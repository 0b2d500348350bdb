"""The score of a sampled answer, and the best and the worst answer to each prompt.

    score = lambda q + [q_raw >= q_baseline - half a grade] S - 0.5 max(0, ln(own / baseline) - 0.1)
    S     = ln(baseline's tokens / critical path), limited to [-0.3, 0.7]

q is the quality in standard deviations within prompts, pooled over prompts. S is the speedup in
steps against the baseline's greedy answer to the same prompt, so an answer that is worse than the
baseline's earns nothing for its speed. Extra length costs.

An unsound answer was cut by a limit, is empty, loops, has an empty list item, or has a seam
(`lang.seams`). It is never the best. It is the worst as often as unsound answers were sampled,
drawn by the prompt's hash; docs/log.md has the reason.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pasta_decoding.data.rows import Question
from pasta_decoding.lang import measures
from pasta_decoding.lang.seams import find_seams
from pasta_decoding.lang.tree import read, strip
from pasta_decoding.training.sample import Sample

SPEED_RANGE = (-0.3, 0.7)
"""Limits of S: beyond twice the speed, nothing is gained by being faster."""
FREE_LENGTH = 0.1
LENGTH_COST = 0.5
LOOPING_SHARE = 0.5
"""An answer loops if at least this share of its runs of four words occurred before."""
MIN_DIFFERENCE = 0.3
"""Standard deviations of the scores within prompts: the least difference of best and worst."""

Values = NDArray[np.float64]
"""One number for each `ScoreParts`, in their order."""


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """The measures of one sample that its score is computed from; none depends on lambda.

    quality:    in the unit of its source; None if the source has no verdict on the answer.
    baseline_quality: the quality of the baseline's answer to the prompt, in the same unit.
    baseline_tokens: plain tokens of that answer.
    finished:   no limit ended the answer or a chunk of it.
    sound:      see the module's docstring.
    """

    prompt: str
    number: int
    plain_tokens: int
    critical_path: int
    quality: float | None
    baseline_quality: float
    baseline_tokens: int
    finished: bool
    sound: bool


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """The numbers of the best and the worst answer to one prompt.

    best_of, worst_of: the numbers of answers that they were chosen from.
    """

    prompt: str
    best: int
    worst: int
    best_of: int
    worst_of: int


def measure_all(
    prompts: Sequence[Question],
    baseline: Sequence[Sample],
    samples: Sequence[Sample],
    grades: Mapping[tuple[str, int | str], float | None],
) -> list[ScoreParts]:
    """Measure the samples of all prompts whose baseline answer has a grade.

    baseline: one answer to each prompt.
    grades:   by prompt and number; "baseline" is the number of the baseline's answer.
    """
    samples_by_prompt = {
        prompt: list(group) for prompt, group in groupby(samples, lambda sample: sample.prompt)
    }
    parts: list[ScoreParts] = []
    for question, baseline_answer in zip(prompts, baseline, strict=True):
        baseline_quality = grades[question.id, "baseline"]
        if baseline_quality is not None:
            answers = samples_by_prompt[question.id]
            qualities = [grades[question.id, answer.number] for answer in answers]
            parts += measure(question, answers, baseline_answer, qualities, baseline_quality)
    return parts


def measure(
    question: Question,
    samples: Sequence[Sample],
    baseline: Sample,
    qualities: Sequence[float | None],
    baseline_quality: float,
) -> list[ScoreParts]:
    """Measure the samples of one question; `qualities` come in their order."""
    return [
        ScoreParts(
            prompt=sample.prompt,
            number=sample.number,
            plain_tokens=sample.plain_tokens,
            critical_path=sample.critical_path,
            quality=quality,
            baseline_quality=baseline_quality,
            baseline_tokens=baseline.plain_tokens,
            finished=not sample.truncated,
            sound=not sample.truncated and _is_sound(question.instruction, sample.annotated),
        )
        for sample, quality in zip(samples, qualities, strict=True)
    ]


def _is_sound(instruction: str, annotated: str) -> bool:
    tree = read(annotated)
    text = strip(tree)
    if not text.strip() or measures.rep_4(text) >= LOOPING_SHARE or measures.empty_items(text):
        return False
    return not find_seams(instruction, tree).names


def score_parts(
    parts: Sequence[ScoreParts], lambda_: float | None, half_grade: float
) -> list[float | None]:
    """Score all answers of a round; an answer without a quality has no score.

    lambda_:    None is infinity: quality alone.
    half_grade: half the smallest difference of quality that counts, in the unit of its source.
    """
    graded = [part for part in parts if part.quality is not None]
    spread = pooled_deviation(graded, np.array([part.quality for part in graded]))
    scores: list[float | None] = []
    for part in parts:
        if part.quality is None:
            scores.append(None)
            continue
        quality = part.quality / spread if spread else 0.0
        if lambda_ is None:
            scores.append(quality)
            continue
        keeps_quality = part.quality >= part.baseline_quality - half_grade
        speed = speed_term(part) if keeps_quality else 0.0
        scores.append(lambda_ * quality + speed - length_term(part))
    return scores


def speed_term(part: ScoreParts) -> float:
    """Return S, the limited log of the speedup in steps against the baseline's answer."""
    speedup = log(max(1, part.baseline_tokens) / max(1, part.critical_path))
    lowest, highest = SPEED_RANGE
    return min(max(speedup, lowest), highest)


def length_term(part: ScoreParts) -> float:
    """Return what the length beyond the baseline's costs."""
    excess = log(max(1, part.plain_tokens) / max(1, part.baseline_tokens))
    return LENGTH_COST * max(0.0, excess - FREE_LENGTH)


def pooled_deviation(parts: Sequence[ScoreParts], values: Values) -> float:
    """Return the standard deviation of `values` around the mean of each prompt."""
    if not len(values):
        return 0.0
    _, prompt_indices = np.unique([part.prompt for part in parts], return_inverse=True)
    means = np.bincount(prompt_indices, values) / np.bincount(prompt_indices)
    return float(np.sqrt(np.mean((values - means[prompt_indices]) ** 2)))


def choose_pairs(
    samples: Sequence[Sample], parts: Sequence[ScoreParts], scores: Sequence[float | None]
) -> list[PreferencePair]:
    """Return the best and the worst answer to each prompt that has a difference to learn from.

    A prompt is left out if it has no sound answer, if best and worst are the same text, or if two
    sound ones differ by less than `MIN_DIFFERENCE`. Answers to one prompt must be neighbours in
    `parts`.
    """
    annotated = {(sample.prompt, sample.number): sample.annotated for sample in samples}
    scored_parts = [
        (score, part) for score, part in zip(scores, parts, strict=True) if score is not None
    ]
    spread = pooled_deviation(
        [part for _, part in scored_parts], np.array([score for score, _ in scored_parts])
    )
    pairs = []
    for prompt, group in groupby(scored_parts, key=lambda scored: scored[1].prompt):
        answers = list(group)
        sound = [(score, part) for score, part in answers if part.sound]
        unsound = [(score, part) for score, part in answers if not part.sound]
        if not sound:
            continue
        draw = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") / 2**32
        worst_is_unsound = draw < len(unsound) / len(answers)
        if len(sound) == 1 and unsound:
            worst_is_unsound = True
        best_score, best = max(sound, key=itemgetter(0))
        worst_score, worst = min(unsound if worst_is_unsound else sound, key=itemgetter(0))
        differs = best_score - worst_score >= MIN_DIFFERENCE * spread
        same_text = annotated[prompt, best.number] == annotated[prompt, worst.number]
        if (worst_is_unsound or differs) and not same_text:
            worst_of = len(answers if worst_is_unsound else sound)
            pairs.append(
                PreferencePair(
                    prompt, best.number, worst.number, best_of=len(sound), worst_of=worst_of
                )
            )
    return pairs


def summarise(parts: Sequence[ScoreParts], pairs: Sequence[PreferencePair]) -> dict[str, Any]:
    """Return means over all, the best and the worst answers, as summary.json has them."""
    part_by_key = {(part.prompt, part.number): part for part in parts}
    groups = {
        "all": parts,
        "best": [part_by_key[pair.prompt, pair.best] for pair in pairs],
        "worst": [part_by_key[pair.prompt, pair.worst] for pair in pairs],
    }
    summary: dict[str, Any] = {"pairs": len(pairs)}
    for name, group in groups.items():
        if group:
            summary[name] = _means(group)
    return summary


def _means(parts: Sequence[ScoreParts]) -> dict[str, Any]:
    speeds = [measures.tokens_per_step(part.plain_tokens, part.critical_path) for part in parts]
    speedups = [max(1, part.baseline_tokens) / max(1, part.critical_path) for part in parts]
    qualities = [part.quality for part in parts if part.quality is not None]
    return {
        "answers": len(parts),
        "finished": fmean(part.finished for part in parts),
        "sound": fmean(part.sound for part in parts),
        "plain_tokens": fmean(part.plain_tokens for part in parts),
        "quality": fmean(qualities) if qualities else None,
        "tokens_per_step": measures.geometric_mean(speeds),
        "speedup_in_steps": measures.geometric_mean(speedups),
    }
