"""Quality as somebody sees it: sampled answers in a sheet for readers to grade, and their grades.

A line of the sheet is a prompt with its answers, each text once and in an order of chance, without
tags: {"prompt": .., "answers": [..], "grades": null}. Whoever has read them writes a list of
numbers in the place of null, one for each answer, larger is better; only differences within a
prompt count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from pasta_decoding.data.asked import Asked
from pasta_decoding.data.dataset import read_objects
from pasta_decoding.data.lines import write_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.training.sample import Sample
from pasta_decoding.training.scoring import Rate

_HINT = "A line has prompt, answers, and grades: null or a number for each answer."


def graded(sheet: Path, prompts: Sequence[Asked], samples: Sequence[Sample], seed: int) -> Rate:
    """Return what looks up the grades of these answers in `sheet`, which is written if missing.

    Raises PastaError as long as some of them have no grade, or for a line that is no such line.
    """
    lines = _to_grade(prompts, samples, seed)
    if not sheet.exists():
        write_lines(sheet, lines)
    given: dict[tuple[str, str], float] = {}
    for number, line in read_objects(sheet):
        given |= _grades(line, f"{sheet}:{number}")
    missing = [
        line for line in lines if any((line["prompt"], one) not in given for one in line["answers"])
    ]
    if missing:
        raise PastaError(
            f"{sheet} has no grades for answers to {len(missing)} of {len(lines)} prompts",
            hint="Write a list of numbers in the place of each null, one for each answer, larger "
            "is better; the same command then goes on.",
        )
    return lambda instruction, texts: [given[instruction, text] for text in texts]


def _to_grade(
    prompts: Sequence[Asked], samples: Sequence[Sample], seed: int
) -> list[dict[str, Any]]:
    texts: dict[str, dict[str, None]] = {prompt.id: {} for prompt in prompts}
    for sample in samples:
        texts[sample.prompt][sample.text] = None
    draw = Random(seed)
    return [
        {
            "prompt": prompt.instruction,
            "answers": draw.sample(list(texts[prompt.id]), len(texts[prompt.id])),
            "grades": None,
        }
        for prompt in prompts
    ]


def _grades(line: Mapping[str, Any], where: str) -> dict[tuple[str, str], float]:
    """Return the grades of a line by its prompt and answer; none if nobody gave any yet."""
    try:
        if line["grades"] is None:
            return {}
        numbers = [float(grade) for grade in line["grades"]]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a grade is no number")
        pairs = zip(line["answers"], numbers, strict=True)
        return {(line["prompt"], text): number for text, number in pairs}
    except (LookupError, TypeError, ValueError) as error:
        raise PastaError(f"{where}: not a line with grades: {error}", hint=_HINT) from error
