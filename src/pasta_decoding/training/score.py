"""The score of an answer, efficiency + lambda x quality, and the best and worst of each prompt.

Efficiency is a speedup in steps: credited tokens / critical path. Credited are the new tokens of
the answer, at most as many as the baseline needs for the prompt. If all tokens counted, chunks that
repeat each other would win. New tokens leave out idle chunks, which repeat a sibling or the main
text, and are no larger share of the answer than its new runs of four words.

Quality is scaled once a round. Its spread among the finished answers to one prompt, pooled over
prompts, becomes `QUALITY_SPREAD` times the spread of efficiency. With a half, lambda 1 weighs speed
twice as much as quality, and lambda 2 weighs both the same. Infinity is quality alone.

Length control subtracts the pooled slope of the score over log length within prompts. Lengths are
clipped to a factor of two around the prompt's median.

An unsound answer was cut by a limit or has an empty list item. It is never the best. It is the
worst as often as unsound answers were sampled, drawn by the prompt's hash; docs/log.md has the
reason.
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
IDLE_COST = 2.0
"""Quality, in nats, that an answer loses if all its chunks are idle."""
TIE = 1e-9
"""Scores that differ by no more than this are equal."""
REP_4_COST = 4.0
"""Quality, in nats per token, that a text loses if all its runs of four words are repeated.

A new token costs a model about two nats, a repeated one almost none. A share r of repetitions thus
raises the likelihood by about 2 r, and the penalty must be larger.
"""

Rate = Callable[[str, Sequence[str]], Sequence[float]]
"""(instruction, plain texts) -> the quality of each text; larger is better."""
Values = NDArray[np.float64]
"""One number for each `ScoreParts`, in their order."""


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """The measures of one sample that its score is computed from; none depends on lambda.

    new_tokens: plain tokens that repeat nothing; the module's docstring has the rule.
    quality:    in the unit of its measure, less `IDLE_COST` for idle chunks: the plain text, which
                the measure rates, does not show them.
    finished:   no limit ended the answer or a chunk of it.
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
        """Return the credited tokens per step; 0 for an empty answer."""
        credited = min(self.new_tokens, baseline_tokens)
        return credited / self.critical_path if self.critical_path else 0.0


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """The numbers of the best and the worst answer to one prompt, chosen from `candidates`."""

    prompt: str
    best: int
    worst: int
    candidates: int


def measure(question: Question, samples: Sequence[Sample], rate: Rate) -> list[ScoreParts]:
    """Measure the samples of one question."""
    trees = [read(sample.annotated) for sample in samples]
    texts = [strip(tree) for tree in trees]
    ratings = rate(question.instruction, texts)
    parts = []
    for sample, tree, text, rating in zip(samples, trees, texts, ratings, strict=True):
        chunk_tokens = [
            len(segment.ids) - 1 for segment in sample.segments if isinstance(segment, ChunkRun)
        ]
        idle_chunks = {*measures.repetitions(tree), *measures.echoes(tree)}
        idle_tokens = sum(chunk_tokens[index] for index in idle_chunks)
        unrepeated_tokens = round(sample.plain_tokens * (1 - measures.rep_4(text)))
        new_tokens = min(sample.plain_tokens - idle_tokens, unrepeated_tokens)
        idle_share = len(idle_chunks) / max(1, len(chunk_tokens))
        finished = not sample.truncated
        parts.append(
            ScoreParts(
                prompt=sample.prompt,
                number=sample.number,
                plain_tokens=sample.plain_tokens,
                new_tokens=max(0, new_tokens),
                critical_path=sample.critical_path,
                quality=rating - IDLE_COST * idle_share,
                finished=finished,
                sound=finished and not measures.empty_items(text),
            )
        )
    return parts


def likelihood_rate(source: ModelSource, *, dtype: str, device: str = "cpu") -> Rate:
    """Load a model, and return a function that rates plain texts.

    A rating is the mean log-probability per token in nats, less the cost of repetitions.
    """
    loaded = load_model(source, dtype=dtype)
    loaded.model.to(device).eval()
    control = loaded.checkpoint.control
    scheme = scheme_named(loaded.checkpoint.scheme)
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=control.ids)

    def rate(instruction: str, texts: Sequence[str]) -> list[float]:
        prompt = encoder.encode([Message("user", instruction)])
        runs = [MainRun(tuple(encoder.encode_text(text)) if text else ()) for text in texts]
        layouts = [
            lay_out(prompt, [run], scheme, async_close=control.async_close, end=loaded.end)
            for run in runs
        ]
        logprobs_by_text = score_layouts(loaded.model, layouts)
        return [
            float(logprobs_L.mean()) - REP_4_COST * measures.rep_4(text)
            for logprobs_L, text in zip(logprobs_by_text, texts, strict=True)
        ]

    return rate


def baseline_tokens(samples: Sequence[Sample]) -> dict[str, float]:
    """Return, by prompt, the median length in plain tokens of the baseline's finished answers.

    If no answer to a prompt finished, it gets the median of all finished answers; if none finished
    at all, the median of all answers.
    """
    finished = [sample for sample in samples if not sample.truncated]
    overall_median = median(sample.plain_tokens for sample in finished or samples)
    lengths_by_prompt: dict[str, list[int]] = {sample.prompt: [] for sample in samples}
    for sample in finished:
        lengths_by_prompt[sample.prompt].append(sample.plain_tokens)
    return {
        prompt: median(lengths) if lengths else overall_median
        for prompt, lengths in lengths_by_prompt.items()
    }


def score_parts(
    parts: Sequence[ScoreParts], baseline: dict[str, float], lambda_: float | None
) -> list[float]:
    """Score all answers of a round.

    baseline: the baseline's tokens by prompt.
    lambda_:  None is infinity.
    """
    return without_length(parts, raw_scores(parts, baseline, lambda_)).tolist()


def raw_scores(
    parts: Sequence[ScoreParts], baseline: dict[str, float], lambda_: float | None
) -> Values:
    """Return the scores before length control."""
    efficiency = np.array([part.efficiency(baseline[part.prompt]) for part in parts])
    quality = np.array([part.quality for part in parts])
    efficiency_spread = np.linalg.norm(_centred(parts, efficiency))
    quality_spread = np.linalg.norm(_centred(parts, quality))
    if efficiency_spread and quality_spread:
        quality *= QUALITY_SPREAD * efficiency_spread / quality_spread
    return quality if lambda_ is None else efficiency + lambda_ * quality


def without_length(parts: Sequence[ScoreParts], raw: Values) -> Values:
    """Return the scores less the part that the lengths of the answers predict."""
    lengths_by_prompt: dict[str, list[int]] = {}
    for part in parts:
        lengths_by_prompt.setdefault(part.prompt, []).append(max(1, part.plain_tokens))
    medians = {prompt: median(lengths) for prompt, lengths in lengths_by_prompt.items()}
    log_lengths = np.log([max(1, part.plain_tokens) / medians[part.prompt] for part in parts])
    log_lengths = np.clip(log_lengths, -LENGTH_BAND, LENGTH_BAND)
    centred_lengths = _centred(parts, log_lengths)
    slope = 0.0
    if centred_lengths.any():
        squares = centred_lengths @ centred_lengths
        slope = float(centred_lengths @ _centred(parts, raw) / squares)
    return raw - slope * log_lengths


def _centred(parts: Sequence[ScoreParts], values: Values) -> Values:
    """Return the values of finished answers, each less the mean of its prompt."""
    values = values[[part.finished for part in parts]]
    prompts = [part.prompt for part in parts if part.finished]
    _, prompt_indices = np.unique(prompts, return_inverse=True)
    means = np.bincount(prompt_indices, values) / np.bincount(prompt_indices)
    return values - means[prompt_indices]


def choose_pairs(
    samples: Sequence[Sample], parts: Sequence[ScoreParts], scores: Sequence[float]
) -> list[PreferencePair]:
    """Return the best and the worst answer to each prompt that has a difference to learn from.

    The best is a sound answer. The share of prompts with an unsound worst answer is the share of
    unsound answers. A prompt is left out if it has no sound answer, if all scores are equal, or if
    best and worst are the same text. Answers to one prompt must be neighbours in `parts`.
    """
    annotated = {(sample.prompt, sample.number): sample.annotated for sample in samples}
    scored_parts = zip(scores, parts, strict=True)
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
        same_text = annotated[prompt, best.number] == annotated[prompt, worst.number]
        if (worst_is_unsound or best_score - worst_score > TIE) and not same_text:
            candidates = len(answers if worst_is_unsound else sound)
            pairs.append(PreferencePair(prompt, best.number, worst.number, candidates))
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
    return {
        "answers": len(parts),
        "finished": fmean(part.finished for part in parts),
        "sound": fmean(part.sound for part in parts),
        "plain_tokens": fmean(part.plain_tokens for part in parts),
        "quality": fmean(part.quality for part in parts),
        "tokens_per_step": measures.geometric_mean(speeds),
    }
