"""Which of the answers to a prompt is the best and which the worst: efficiency + lambda x quality.

Efficiency is the speedup in steps: the baseline's tokens for the same prompt / critical path.
Left at that, it would be cheated in two ways, and each has its guard here:

- An answer of ten words has a short critical path. So an answer is credited with no more tokens
  than it has: min(own tokens, baseline's tokens) / critical path. Up to the baseline's length
  that is the tokens that a step brings, which a short answer does not have more of; beyond it,
  further text only costs steps. What still favours one length over another is taken out by the
  length control below.
- Ten chunks that say the same have the critical path of one. So text that repeats is no text:
  own tokens are those outside of idle chunks (they repeat a sibling or the main text), and no
  more than the share of four-word runs that are new. Their promises still cost their steps of the
  main thread.

Quality comes in whatever unit its measure has. It is standardised once a round: one unit of
lambda is that multiple of it whose spread among the answers to one prompt (pooled, finished
answers) is `QUALITY_SPREAD` times the efficiency's. With one half, lambda 1 weighs speed twice as
much as quality, 2 both the same, 4 and 8 quality more; infinity is quality alone.

Length control: the pooled slope of the score over log length within prompts is subtracted, so
that on the whole the best are no shorter than the worst. Lengths count as within a factor of two
of the prompt's median there: what is far off that gets no more of it.

An answer that a limit cut, or a chunk of it, is never the best: its text breaks off. Nor is one
with an empty list item. The others are called sound. An unsound answer is the worst as often as
such were sampled: with the odds of their share among the answers to the prompt, drawn by the
prompt's hash. Cut answers are the longest, so if one were the worst wherever there is one, the
pairs would teach brevity more than anything else; if none ever was, nothing would say that an
answer has to end (docs/log.md).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from pasta_decoding.data.questions import Question
from pasta_decoding.lang.layout import ChunkRun
from pasta_decoding.lang.measures import (
    echoes,
    empty_items,
    geometric_mean,
    rep_4,
    repetitions,
    tokens_per_step,
)
from pasta_decoding.training.sample import Sample

QUALITY_SPREAD = 0.5
LENGTH_BAND = math.log(2)
TIE = 1e-9


Rate = Callable[[str, Sequence[str]], Sequence[float]]
"""(instruction, plain texts) -> one number a text, larger is better."""


@dataclass(frozen=True, slots=True)
class Quality:
    """A measure of quality, in a unit of its own.

    rate:        see `Rate`.
    idle_cost: what an answer loses, in that unit, if all its chunks are idle ones. A plain
               text does not show its chunks, so this is taken off here.
    """

    name: str
    rate: Rate
    idle_cost: float


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """What one sample's score is made of; none of it depends on lambda.

    new_tokens: plain tokens that repeat nothing, see above.
    idle_chunks: chunks that repeat a sibling or the main text.
    quality:    in the unit of its measure, idle chunks taken off.
    finished:   no limit ended it or a chunk of it.
    sound:      finished, and without an empty list item.
    """

    prompt: str
    number: int
    plain_tokens: int
    new_tokens: int
    critical_path: int
    chunks: int
    repeated_chunks: int
    idle_chunks: int
    rep_4: float
    quality: float
    finished: bool
    sound: bool
    hit_limit: bool

    @property
    def tokens_per_step(self) -> float:
        """Plain tokens / critical path."""
        return tokens_per_step(self.plain_tokens, self.critical_path)


@dataclass(frozen=True, slots=True)
class Scored:
    """A part with its score: efficiency + lambda x quality_scale x quality - length_term."""

    part: ScoreParts
    baseline_tokens: float
    efficiency: float
    length_term: float
    score: float


@dataclass(frozen=True, slots=True)
class Scores:
    """All scores of a round, and what they were standardised by."""

    scored: list[Scored]
    quality_scale: float
    length_slope: float


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Best and worst of one prompt, by their numbers, of this many `candidates`."""

    prompt: str
    best: int
    worst: int
    candidates: int


def measure(question: Question, samples: Sequence[Sample], quality: Quality) -> list[ScoreParts]:
    """Measure all answers to one prompt."""
    rated = quality.rate(question.instruction, [sample.text for sample in samples])
    return [
        _measure_one(sample, rating, quality.idle_cost)
        for sample, rating in zip(samples, rated, strict=True)
    ]


def _measure_one(sample: Sample, rating: float, idle_cost: float) -> ScoreParts:
    bodies = [one.ids[1:] for one in sample.segments if isinstance(one, ChunkRun)]
    tree, text = sample.tree, sample.text
    repeats = repetitions(tree)
    idle = {*repeats, *echoes(tree)}
    grams = rep_4(text)
    outside = sample.plain_tokens - sum(len(bodies[place]) for place in idle)
    return ScoreParts(
        prompt=sample.prompt,
        number=sample.number,
        plain_tokens=sample.plain_tokens,
        new_tokens=max(0, min(outside, round(sample.plain_tokens * (1 - grams)))),
        critical_path=sample.critical_path,
        chunks=len(bodies),
        repeated_chunks=len(repeats),
        idle_chunks=len(idle),
        rep_4=grams,
        quality=rating - idle_cost * len(idle) / max(1, len(bodies)),
        finished=not sample.truncated,
        sound=not sample.truncated and not empty_items(text),
        hit_limit=sample.hit_limit,
    )


def baseline_tokens(samples: Sequence[Sample]) -> dict[str, float]:
    """Return, by prompt, the median plain length of the baseline's finished answers.

    A prompt with no finished answer is given the median of all finished ones, or of all answers
    where none finished.
    """
    finished = [sample for sample in samples if not sample.truncated]
    overall = median(sample.plain_tokens for sample in finished or samples)
    lengths: dict[str, list[int]] = {sample.prompt: [] for sample in samples}
    for sample in finished:
        lengths[sample.prompt].append(sample.plain_tokens)
    return {prompt: median(found) if found else overall for prompt, found in lengths.items()}


def efficiency_of(part: ScoreParts, baseline: float) -> float:
    """Return the efficiency of one answer; 0 for one that says nothing."""
    return min(part.new_tokens, baseline) / part.critical_path if part.critical_path else 0.0


def score_parts(
    parts: Sequence[ScoreParts],
    baseline: dict[str, float],
    lambda_: float | None,
    *,
    length_control: bool = True,
) -> Scores:
    """Score all answers of a round; a `lambda_` of None is infinity."""
    efficiencies = [efficiency_of(part, baseline[part.prompt]) for part in parts]
    scale = _quality_scale(parts, efficiencies)
    raw = [
        scale * part.quality if lambda_ is None else efficiency + lambda_ * scale * part.quality
        for part, efficiency in zip(parts, efficiencies, strict=True)
    ]
    lengths = _relative_lengths(parts)
    slope = _slope(parts, lengths, raw) if length_control else 0.0
    scored = [
        Scored(part, baseline[part.prompt], efficiency, slope * length, score - slope * length)
        for part, efficiency, length, score in zip(parts, efficiencies, lengths, raw, strict=True)
    ]
    return Scores(scored, scale, slope)


def _quality_scale(parts: Sequence[ScoreParts], efficiencies: Sequence[float]) -> float:
    """Return by what quality is multiplied to have its share of the efficiency's spread."""
    efficiency_spread = _spread(parts, efficiencies)
    quality_spread = _spread(parts, [part.quality for part in parts])
    if not efficiency_spread or not quality_spread:
        return 1.0
    return QUALITY_SPREAD * efficiency_spread / quality_spread


def _spread(parts: Sequence[ScoreParts], values: Sequence[float]) -> float:
    """Return the standard deviation within prompts, finished answers only."""
    centred = centre(parts, values)
    return math.sqrt(fmean(value**2 for value in centred)) if centred else 0.0


def centre(parts: Sequence[ScoreParts], values: Sequence[float]) -> list[float]:
    """Return the values of finished answers less the mean of their prompt's."""
    groups: dict[str, list[float]] = {}
    for part, value in zip(parts, values, strict=True):
        if part.finished:
            groups.setdefault(part.prompt, []).append(value)
    return [value - fmean(group) for group in groups.values() for value in group]


def _relative_lengths(parts: Sequence[ScoreParts]) -> list[float]:
    """Return log(length / the prompt's median length), within `LENGTH_BAND`."""
    groups: dict[str, list[int]] = {}
    for part in parts:
        groups.setdefault(part.prompt, []).append(max(1, part.plain_tokens))
    middle = {prompt: median(lengths) for prompt, lengths in groups.items()}
    logs = [math.log(max(1, part.plain_tokens) / middle[part.prompt]) for part in parts]
    return [max(-LENGTH_BAND, min(LENGTH_BAND, log)) for log in logs]


def _slope(parts: Sequence[ScoreParts], lengths: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of values over lengths within prompts."""
    across = centre(parts, lengths)
    total = sum(length**2 for length in across)
    along = sum(x * y for x, y in zip(across, centre(parts, values), strict=True))
    return along / total if total else 0.0


def choose_pairs(samples: Sequence[Sample], scores: Scores) -> list[PreferencePair]:
    """Return best and worst of each prompt; one without a difference to learn from is left out.

    The best is a sound answer; the worst is an unsound one as often as there are such. Left out
    are prompts without a sound answer, those whose scores are all equal, and those whose best and
    worst are the same text.
    """
    annotated = {(sample.prompt, sample.number): sample.annotated for sample in samples}
    groups: dict[str, list[Scored]] = {}
    for one in scores.scored:
        groups.setdefault(one.part.prompt, []).append(one)
    pairs = []
    for prompt, group in groups.items():
        sound = [one for one in group if one.part.sound]
        if not sound:
            continue
        best = max(sound, key=lambda one: one.score)
        unsound = [one for one in group if not one.part.sound]
        alone = len(sound) == 1 < len(group)
        faulty = alone or _draw(prompt) < len(unsound) / len(group)
        worst = min(unsound if faulty else sound, key=lambda one: one.score)
        numbers = best.part.number, worst.part.number
        same = annotated[prompt, numbers[0]] == annotated[prompt, numbers[1]]
        if (faulty or best.score - worst.score > TIE) and not same:
            pairs.append(
                PreferencePair(prompt, *numbers, candidates=len(group if faulty else sound))
            )
    return pairs


def _draw(prompt: str) -> float:
    """Return a number in [0, 1) that is always the same for a prompt."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") / 2**32


def summarise(
    samples: Sequence[Sample],
    scores: Scores,
    pairs: Sequence[PreferencePair],
    baseline: dict[str, float],
) -> dict[str, Any]:
    """Return the figures of a round: all answers, the best and the worst."""
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
