"""Which of the answers to a prompt is the best and which the worst: efficiency + lambda x quality.

Efficiency is the speedup in steps: the baseline's tokens for the prompt / critical path. By that
alone, short answers and chunks that say the same would win. So an answer is credited with min(own
tokens, baseline's tokens). Own tokens leave out idle chunks, which repeat a sibling or the main
text, and are at most the share of four-word runs that are new.

Quality is scaled once a round: its spread among the finished answers to one prompt (pooled) becomes
`QUALITY_SPREAD` times the efficiency's. With one half, lambda 1 weighs speed twice as much as
quality, 2 both the same; infinity is quality alone.

Length control subtracts the pooled slope of the score over log length within prompts. Lengths count
as within a factor of two of the prompt's median.

An unsound answer (cut by a limit, or with an empty list item) is never the best. It is the worst as
often as such were sampled, drawn by the prompt's hash: docs/log.md says why.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pasta_decoding.data.rows import Question
from pasta_decoding.lang import measures
from pasta_decoding.lang.layout import ChunkRun, MainRun, lay_out
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import read, strip
from pasta_decoding.models.catalog import ModelSource
from pasta_decoding.models.load import load_model
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.models.template import Message
from pasta_decoding.training.sample import Sample
from pasta_decoding.training.view import score_layouts

QUALITY_SPREAD = 0.5
LENGTH_BAND = float(np.log(2))
IDLE_COST = 2.0  # nats that an answer loses if all its chunks are idle ones
TIE = 1e-9
REP_4_COST = 4.0
"""Nats per token that a text costs if all its runs of four words are repeated.

A token of a repetition costs a model next to nothing instead of the two nats or so of a new one,
so a share r of them saves 2 r. The penalty must be more than that.
"""

Rate = Callable[[str, Sequence[str]], Sequence[float]]
"""(instruction, plain texts) -> the quality of each text, larger is better."""
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """What one sample's score is made of; none of it depends on lambda.

    new_tokens: plain tokens that repeat nothing, see above.
    quality:    in the unit of its measure, idle chunks taken off: a plain text does not show them.
    finished:   no limit ended it or a chunk of it.
    sound:      finished, and without an empty list item.
    """

    prompt: str
    number: int
    plain_tokens: int
    new_tokens: int
    critical_path: int
    quality: float
    finished: bool
    sound: bool

    def efficiency(self, baseline_tokens: float) -> float:
        """Return the credited tokens a step; 0 for an answer that says nothing."""
        credited = min(self.new_tokens, baseline_tokens)
        return credited / self.critical_path if self.critical_path else 0.0


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Best and worst of one prompt, by their numbers, of this many `candidates`."""

    prompt: str
    best: int
    worst: int
    candidates: int


def measure(question: Question, samples: Sequence[Sample], rate: Rate) -> list[ScoreParts]:
    trees = [read(sample.annotated) for sample in samples]
    texts = list(map(strip, trees))
    ratings = rate(question.instruction, texts)
    found = []
    for sample, tree, text, rating in zip(samples, trees, texts, ratings, strict=True):
        bodies = [one.ids[1:] for one in sample.segments if isinstance(one, ChunkRun)]
        idle = {*measures.repetitions(tree), *measures.echoes(tree)}
        outside = sample.plain_tokens - sum(len(bodies[place]) for place in idle)
        new = min(outside, round(sample.plain_tokens * (1 - measures.rep_4(text))))
        quality = rating - IDLE_COST * len(idle) / max(1, len(bodies))
        finished = not sample.truncated
        sound = finished and not measures.empty_items(text)
        counts = sample.plain_tokens, max(0, new), sample.critical_path
        part = ScoreParts(sample.prompt, sample.number, *counts, quality, finished, sound)
        found.append(part)
    return found


def likelihood_rate(source: ModelSource, *, dtype: str, device: str = "cpu") -> Rate:
    """Load a model; return what rates plain texts by their likelihood under it, less rep-4."""
    loaded = load_model(source, dtype=dtype)
    loaded.model.to(device).eval()
    checkpoint = loaded.checkpoint
    close, scheme = checkpoint.control.async_close, scheme_named(checkpoint.scheme)
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=checkpoint.control.ids)

    def rate(instruction: str, texts: Sequence[str]) -> list[float]:
        prompt = encoder.encode([Message("user", instruction)])
        runs = [MainRun(tuple(encoder.encode_text(text)) if text else ()) for text in texts]
        layouts = [
            lay_out(prompt, [run], scheme, async_close=close, end=loaded.end) for run in runs
        ]
        scored = zip(score_layouts(loaded.model, layouts), texts, strict=True)
        return [float(one_L.mean()) - REP_4_COST * measures.rep_4(text) for one_L, text in scored]

    return rate


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


def score_parts(
    parts: Sequence[ScoreParts], baseline: dict[str, float], lambda_: float | None
) -> list[float]:
    """Score all answers of a round; a `lambda_` of None is infinity."""
    return without_length(parts, raw_scores(parts, baseline, lambda_)).tolist()


def raw_scores(
    parts: Sequence[ScoreParts], baseline: dict[str, float], lambda_: float | None
) -> Values:
    """Return the scores before length control."""
    speed = np.array([part.efficiency(baseline[part.prompt]) for part in parts])
    quality = np.array([part.quality for part in parts])
    spreads = [np.linalg.norm(_within(parts, values)) for values in (speed, quality)]
    if all(spreads):
        quality *= QUALITY_SPREAD * spreads[0] / spreads[1]
    return quality if lambda_ is None else speed + lambda_ * quality


def without_length(parts: Sequence[ScoreParts], raw: Values) -> Values:
    """Return the scores less what the length of an answer says about them."""
    lengths: dict[str, list[int]] = {}
    for part in parts:
        lengths.setdefault(part.prompt, []).append(max(1, part.plain_tokens))
    middles = {prompt: median(found) for prompt, found in lengths.items()}
    logs = np.log([max(1, part.plain_tokens) / middles[part.prompt] for part in parts])
    logs = np.clip(logs, -LENGTH_BAND, LENGTH_BAND)
    across = _within(parts, logs)
    slope = across @ _within(parts, raw) / (across @ across) if across.any() else 0.0
    return raw - slope * logs


def _within(parts: Sequence[ScoreParts], values: Values) -> Values:
    """Return the values of finished answers less the mean of their prompt's."""
    values = values[[part.finished for part in parts]]
    prompts = [part.prompt for part in parts if part.finished]
    groups = np.unique(prompts, return_inverse=True)[1]
    return values - (np.bincount(groups, values) / np.bincount(groups))[groups]


def choose_pairs(
    samples: Sequence[Sample], parts: Sequence[ScoreParts], scores: Sequence[float]
) -> list[PreferencePair]:
    """Return best and worst of each prompt; one without a difference to learn from is left out.

    The best is a sound answer; the worst is an unsound one as often as there are such. Left out
    are prompts without a sound answer, those whose scores are all equal, and those whose best and
    worst are the same text.
    """
    annotated = {(sample.prompt, sample.number): sample.annotated for sample in samples}
    scored = zip(scores, parts, strict=True)
    pairs = []
    for prompt, some in groupby(scored, key=lambda one: one[1].prompt):
        group = list(some)
        sound = [one for one in group if one[1].sound]
        unsound = [one for one in group if not one[1].sound]
        if not sound:
            continue
        alone = len(sound) == 1 < len(group)
        drawn = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") / 2**32
        faulty = alone or drawn < len(unsound) / len(group)
        high, best = max(sound, key=itemgetter(0))
        low, worst = min(unsound if faulty else sound, key=itemgetter(0))
        same = annotated[prompt, best.number] == annotated[prompt, worst.number]
        if (faulty or high - low > TIE) and not same:
            count = len(group if faulty else sound)
            pairs.append(PreferencePair(prompt, best.number, worst.number, count))
    return pairs


def summarise(parts: Sequence[ScoreParts], pairs: Sequence[PreferencePair]) -> dict[str, Any]:
    known = {(part.prompt, part.number): part for part in parts}
    best = [known[pair.prompt, pair.best] for pair in pairs]
    worst = [known[pair.prompt, pair.worst] for pair in pairs]
    found: dict[str, Any] = {"pairs": len(pairs)}
    for name, group in (("all", parts), ("best", best), ("worst", worst)):
        if group:
            means = ("finished", "sound", "plain_tokens", "quality")
            steps = [measures.tokens_per_step(p.plain_tokens, p.critical_path) for p in group]
            found[name] = {
                "answers": len(group),
                **{mean: fmean(getattr(part, mean) for part in group) for mean in means},
                "tokens_per_step": measures.geometric_mean(steps),
            }
    return found
