"""Rows for stage 1 from the best answers of a round of stage 2: a policy learns from its own best.

Only sound answers count (training/scoring.py), without idle chunks and hardly repeating a word.
Stage 1 counts each chunk's length again, so what it learns from them promises true lengths.
"""

from __future__ import annotations

from pathlib import Path

from pasta_decoding.data.dataset import Row
from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.measures import MOST_REP_4
from pasta_decoding.training.config import Weights
from pasta_decoding.training.sample import Sample, decode_sample
from pasta_decoding.training.scoring import Scored, ScoreParts, baseline_tokens, score_parts

FEWEST_TOKENS = 3


def best_rows(run: Path, number: int, weights: Weights, per_prompt: int) -> list[Row]:
    """Return the best answers of round `number` of a run folder, up to `per_prompt` a prompt.

    Raises PastaError if the folder holds no such round, or nothing in it will do.
    """
    folder = run / f"round-{number}"
    instructions = {line["id"]: line["instruction"] for line in read_lines(run / "prompts.jsonl")}
    lines = [ScoreParts(**line) for line in read_lines(folder / "parts.jsonl")]
    # Where measuring broke off within a prompt, it was measured again.
    parts = list({(part.prompt, part.number): part for part in lines}.values())
    answers = _samples(run / "baseline.jsonl")
    if not parts or not answers or not instructions:
        raise PastaError(
            f"{run} holds no scored answers of round {number}",
            hint="Give the run folder of `pasta train preference`, and --round.",
        )
    baseline = baseline_tokens(answers)
    texts = {(one.prompt, one.number): one.annotated for one in _samples(folder / "samples.jsonl")}
    best: dict[str, list[Scored]] = {}
    for one in sorted(score_parts(parts, baseline, weights).scored, key=lambda one: -one.score):
        if _fit(one.part):
            best.setdefault(one.part.prompt, []).append(one)
    chosen = [one.part for group in best.values() for one in group[:per_prompt]]
    if not chosen:
        raise PastaError(
            f"no answer of round {number} in {run} is fit to learn from",
            hint="All of them are cut, fail what their prompts ask, or repeat themselves.",
        )
    return [
        Row(
            id=f"{part.prompt}-{part.number}",
            source="samples",
            instruction=instructions[part.prompt],
            response=texts[part.prompt, part.number],
        )
        for part in chosen
    ]


def _fit(part: ScoreParts) -> bool:
    return (
        part.sound
        and not part.idle_chunks
        and part.rep_4 < MOST_REP_4
        and part.plain_tokens >= FEWEST_TOKENS
    )


def _samples(path: Path) -> list[Sample]:
    return [decode_sample(line) for line in read_lines(path)]
