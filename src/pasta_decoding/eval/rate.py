"""Rating the answers of a run against the baseline's: without a judge, and with one.

Files beside the records: `quality.jsonl` grows line by line, `annotations.json` (in the format of
the package alpaca_eval) and `rating.json` (who rated what) are written whole.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pasta_decoding.data.dataset import read_objects
from pasta_decoding.data.lines import encode_line, resume_lines, write_text
from pasta_decoding.errors import PastaError
from pasta_decoding.eval.judge.base import Judge
from pasta_decoding.eval.judge.local import LocalJudge
from pasta_decoding.eval.records import Record
from pasta_decoding.eval.runs import (
    ANNOTATIONS,
    QUALITY,
    RATING,
    Run,
    TextQuality,
    read_json,
    text_digest,
)
from pasta_decoding.lang.measures import missing_topics, repeated_grams
from pasta_decoding.lang.tree import Chunk, read

Nats = Callable[[str, Sequence[str]], Sequence[float]]
"""(instruction, plain texts) -> nats per token of each text and its end."""

Tick = Callable[[], None]


def rate_texts(run: Run, baseline: Run, nats: Nats, under: str, tick: Tick) -> None:
    """Rate every answer without a judge; texts that were rated are not rated again.

    under: names the model of `nats`. Raises PastaError if the file was made with another one.
    """
    path = run.folder / QUALITY
    keep_rating(run, {"likelihood_under": under}, of=path)
    rated = {row["id"]: (row["answer"], row["baseline_answer"]) for row in resume_lines(path)}
    with path.open("a", encoding="utf-8") as lines:
        for key, record in run.records.items():
            base = baseline.records[key]
            if rated.get(key) != (text_digest(record.text), text_digest(base.text)):
                lines.write(encode_line(asdict(_text_quality(record, base, nats))))
                lines.flush()
            tick()


def remembering(nats: Nats) -> Nats:
    """Return `nats` that asks the model about each text once: every run has the same baseline."""
    known: dict[tuple[str, str], float] = {}

    def ask(instruction: str, texts: Sequence[str]) -> list[float]:
        new = [text for text in dict.fromkeys(texts) if (instruction, text) not in known]
        if new:
            keys = [(instruction, text) for text in new]
            known.update(zip(keys, nats(instruction, new), strict=True))
        return [known[instruction, text] for text in texts]

    return ask


def _text_quality(record: Record, base: Record, nats: Nats) -> TextQuality:
    tree = read(record.annotated)
    own, other = nats(record.instruction, [record.text, base.text])
    return TextQuality(
        id=record.id,
        answer=text_digest(record.text),
        baseline_answer=text_digest(base.text),
        nats=own,
        baseline_nats=other,
        repeated_grams=repeated_grams(record.text),
        baseline_repeated_grams=repeated_grams(base.text),
        topics=sum(isinstance(node, Chunk) and node.topic is not None for node in tree),
        missing_topics=missing_topics(tree),
    )


def annotate(
    run: Run,
    baseline: Run,
    judge: Judge,
    annotator: str,
    difficulties: Mapping[str, float] | None = None,
) -> int:
    """Let `judge` compare every answer with the baseline's; return how many verdicts are missing.

    An empty answer loses, and equal ones are a tie, so these are not asked about.
    difficulties: of instructions, for the length-controlled win rate.
    """
    pairs = [(record, baseline.records[key]) for key, record in run.records.items()]
    asked = [(record, base) for record, base in pairs if _known(record, base) is None]
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


def _known(record: Record, base: Record) -> float | None:
    """Return the preference for the record's answer where nobody needs to be asked."""
    if not record.text.strip():
        return 0.0
    if not base.text.strip():
        return 1.0
    return 0.5 if record.text == base.text else None


def _annotation(
    run: Run,
    baseline: Run,
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


def keep_rating(run: Run, found: Mapping[str, Any], *, of: Path | None = None) -> None:
    """Add to how a run was rated.

    of: a file that grows; raises PastaError if it is there and was made in another way.
    """
    path = run.folder / RATING
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    differing = [key for key in found if known.get(key) != found[key]]
    if of is not None and of.exists() and differing:
        key = differing[0]
        message = f"{of} was made otherwise: {key} is {known.get(key)!r} there, {found[key]!r} now"
        raise PastaError(message, hint="Remove it to rate the answers again.")
    write_text(path, json.dumps({**known, **found}, ensure_ascii=False, indent=1) + "\n")


# The local judge


@dataclass(frozen=True, slots=True)
class NewPrompts:
    """A local judge at equal length; no verdict on a prompt that it was fitted on."""

    judge: LocalJudge

    def prefer(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]
    ) -> list[float | None]:
        """Return the judge's preferences."""
        said = self.judge.equal_length().prefer(prompts, a, b)
        return [
            None if self.judge.has_seen(prompt) else verdict
            for prompt, verdict in zip(prompts, said, strict=True)
        ]


def read_verdict(path: Path) -> dict[str, Any]:
    """Return what `pasta judge eval --json` printed into a file. Raises PastaError."""
    found: dict[str, Any] = read_json(path, dict)
    return found


def why_not_used(verdict: Mapping[str, Any]) -> str | None:
    """Return why a judge may not be used by what `pasta judge eval --json` said; None if it may.

    Raises PastaError if the verdict is none.
    """
    try:
        if verdict["usable_for_training"]:
            return None
        failing = [one for one in verdict["sources"] if not one["usable_for_training"]]
        told = "; ".join(_source(one) for one in failing[:3])
        more = f"; and {len(failing) - 3} more" if len(failing) > 3 else ""
        return (
            f"it does not beat length alone beyond its interval by {len(failing)} of "
            f"{len(verdict['sources'])} sources: {told}{more}"
        )
    except (KeyError, TypeError) as error:
        hint = "Give what `pasta judge eval --json` printed."
        raise PastaError(f"not a verdict on a judge: no {error}", hint=hint) from error


def _source(one: Mapping[str, Any]) -> str:
    gains = [
        f"{where} {found['gain']['value']:+.3f} "
        f"({found['gain']['low']:+.3f} to {found['gain']['high']:+.3f})"
        for where, found in (("all", one["every"]), ("similar length", one["similar"]))
        if found is not None
    ]
    return f"{one['source']}, gain {', '.join(gains)}"


def read_difficulties(path: Path, prompts: Path) -> dict[str, float]:
    """Return AlpacaEval's difficulty of each instruction.

    path:    CSV whose first column is AlpacaEval's number of the instruction, from 0, and whose
             column `instruction_difficulty` is its difficulty.
    prompts: JSONL (.gz) with `instruction` and that number as `instruction_id`.
    """
    numbers = dict(_numbered(prompts))
    found = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                number = int(next(iter(row.values())) or "")
                difficulty = float(row["instruction_difficulty"])
            except (ValueError, KeyError, TypeError) as error:
                hint = "Its columns are a number and instruction_difficulty."
                raise PastaError(f"{path}: not difficulties: {error}", hint=hint) from error
            if number in numbers:
                found[numbers[number]] = difficulty
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
