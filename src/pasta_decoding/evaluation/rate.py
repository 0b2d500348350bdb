"""Rating the answers of a run against the baseline's: without a judge, and with one.

Files beside the records: `quality.jsonl` grows line by line, `annotations.json` (in the format of
the package alpaca_eval) and `rating.json` (who rated what) are written whole.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pasta_decoding.data.dataset import read_objects
from pasta_decoding.data.lines import append_line, read_lines, refuse_other_settings, write_text
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.judge.base import Judge
from pasta_decoding.evaluation.records import Record
from pasta_decoding.evaluation.runs import (
    ANNOTATIONS,
    QUALITY,
    RATING,
    MethodRun,
    TextQuality,
    text_digest,
)
from pasta_decoding.lang.measures import missing_topics, rep_4
from pasta_decoding.lang.tree import Chunk, read

Nll = Callable[[str, Sequence[str]], Sequence[float]]
"""(instruction, plain texts) -> nats per token of each text and its end."""

Tick = Callable[[], None]


def rate_texts(run: MethodRun, baseline: MethodRun, nll: Nll, under: str, tick: Tick) -> None:
    """Rate every answer without a judge; texts that were rated are not rated again.

    under: names the model of `nll`. Raises PastaError if the file was made with another one.
    """
    path = run.folder / QUALITY
    keep_rating(run, {"likelihood_under": under}, of=path)
    rated = {
        row["id"]: (row["answer"], row["baseline_answer"]) for row in read_lines(path, resume=True)
    }
    for key, record in run.records.items():
        base = baseline.records[key]
        if rated.get(key) != (text_digest(record.text), text_digest(base.text)):
            append_line(path, asdict(_text_quality(record, base, nll)))
        tick()


def remembering(nll: Nll) -> Nll:
    """Return `nll` that asks the model about each text once: every run has the same baseline."""
    known: dict[tuple[str, str], float] = {}

    def ask(instruction: str, texts: Sequence[str]) -> list[float]:
        new = [text for text in dict.fromkeys(texts) if (instruction, text) not in known]
        if new:
            keys = [(instruction, text) for text in new]
            known.update(zip(keys, nll(instruction, new), strict=True))
        return [known[instruction, text] for text in texts]

    return ask


def _text_quality(record: Record, base: Record, nll: Nll) -> TextQuality:
    tree = read(record.annotated)
    own, other = nll(record.instruction, [record.text, base.text])
    return TextQuality(
        id=record.id,
        answer=text_digest(record.text),
        baseline_answer=text_digest(base.text),
        nats=own,
        baseline_nats=other,
        rep_4=rep_4(record.text),
        baseline_rep_4=rep_4(base.text),
        topics=sum(isinstance(node, Chunk) and node.topic is not None for node in tree),
        missing_topics=len(missing_topics(tree)),
    )


def annotate(
    run: MethodRun,
    baseline: MethodRun,
    judge: Judge,
    annotator: str,
    difficulties: Mapping[str, float] | None = None,
) -> int:
    """Let `judge` compare every answer with the baseline's; return how many verdicts are missing.

    An empty answer loses, and equal ones are a tie, so these are not asked about.
    difficulties: of instructions, for the length-controlled win rate.
    """
    pairs = [(record, baseline.records[key]) for key, record in run.records.items()]
    asked = pairs_to_judge(run, baseline)
    verdicts = judge.prefer(
        [record.instruction for record, _ in asked],
        [record.text for record, _ in asked],
        [base.text for _, base in asked],
    )
    said = {record.id: verdict for (record, _), verdict in zip(asked, verdicts, strict=True)}
    rows = []
    for record, base in pairs:
        known = _known(record, base)
        preference = said[record.id] if known is None else known
        rows.append(_annotation(run, baseline, record, base, preference, annotator, difficulties))
    write_text(run.folder / ANNOTATIONS, json.dumps(rows, ensure_ascii=False, indent=1) + "\n")
    keep_rating(run, {"annotator": annotator})
    return sum(row["preference"] is None for row in rows)


def pairs_to_judge(run: MethodRun, baseline: MethodRun) -> list[tuple[Record, Record]]:
    """Return the answers that somebody must be asked about, each with the baseline's."""
    pairs = [(record, baseline.records[key]) for key, record in run.records.items()]
    return [(record, base) for record, base in pairs if _known(record, base) is None]


def _known(record: Record, base: Record) -> float | None:
    """Return the preference for the record's answer where nobody needs to be asked.

    An empty answer loses, also against another one.
    """
    if not record.text.strip():
        return 0.0
    if not base.text.strip():
        return 1.0
    return 0.5 if record.text == base.text else None


def _annotation(
    run: MethodRun,
    baseline: MethodRun,
    record: Record,
    base: Record,
    preference: float | None,
    annotator: str,
    difficulties: Mapping[str, float] | None,
) -> dict[str, Any]:
    row = {
        "instruction": record.instruction,
        "output_1": base.text,
        "generator_1": baseline.label,
        "output_2": record.text,
        "generator_2": run.label,
        "dataset": record.dataset,
        "annotator": annotator,
        "preference": None if preference is None else 1 + preference,
    }
    if difficulties is not None:
        row["instruction_difficulty"] = difficulties.get(record.instruction)
    return row


# rating.json


def keep_rating(run: MethodRun, found: Mapping[str, Any], *, of: Path | None = None) -> None:
    """Add to how a run was rated.

    of: a file that grows; raises PastaError if it is there and was made in another way.
    """
    path = run.folder / RATING
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if of is not None and of.exists():
        there = {key: known.get(key) for key in found}
        refuse_other_settings(of, there, found, hint="Remove it to rate the answers again.")
    write_text(path, json.dumps({**known, **found}, ensure_ascii=False, indent=1) + "\n")


def read_difficulties(path: Path, prompts: Path) -> dict[str, float]:
    """Return AlpacaEval's difficulty of each instruction.

    path:    CSV whose first column is AlpacaEval's number of the instruction, from 0, and whose
             column `instruction_difficulty` is its difficulty.
    prompts: JSONL (.gz) with `instruction` and that number as `instruction_id`.
    """
    numbers = dict(_numbered(prompts))
    found = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                number = int(next(iter(row.values())) or "")
                difficulty = float(row["instruction_difficulty"])
                if not math.isfinite(difficulty):
                    raise ValueError(f"{difficulty} of number {number}")
                if number in numbers:
                    found[numbers[number]] = difficulty
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        hint = "Its columns are a number and instruction_difficulty."
        raise PastaError(f"{path}: not difficulties: {error}", hint=hint) from error
    if not found:
        raise PastaError(f"{path} and {prompts} have no instruction in common")
    return found


def _numbered(prompts: Path) -> Iterator[tuple[int, str]]:
    for line, found in read_objects(prompts):
        number, instruction = found.get("instruction_id"), found.get("instruction")
        if not (isinstance(number, int) and isinstance(instruction, str)):
            hint = "Difficulties are found by AlpacaEval's number of an instruction, from 0."
            message = f"{prompts}:{line}: no 'instruction_id' and 'instruction'"
            raise PastaError(message, hint=hint)
        yield number, instruction
