"""Run folders: what `pasta eval generate` wrote, and what `pasta eval rate` put beside it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pasta_decoding.data.lines import parse_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.records import Record, read_records

SETTINGS, RECORDS = "run.json", "records.jsonl"
QUALITY, ANNOTATIONS, RATING = "quality.jsonl", "annotations.json", "rating.json"
BASELINE = "sequential"

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class TextQuality:
    """What can be said of an answer without a judge; the text of a failed request is empty.

    answer, baseline_answer: digests of the two texts, so that a rating of other texts is noticed.
    nats:           per token of the plain text and its end, under a sequential model.
    baseline_nats:  the same of the baseline's answer to this prompt.
    rep_4, missing_topics: see lang/measures.py.
    """

    id: str
    answer: str
    baseline_answer: str
    nats: float
    baseline_nats: float
    rep_4: float
    baseline_rep_4: float
    topics: int
    missing_topics: int


@dataclass(frozen=True, slots=True)
class Annotation:
    """A line of annotations.json, as the package alpaca_eval writes it.

    output_1 is the baseline's answer, output_2 the run's.
    preference: from 1, the baseline's is better, to 2; None where the annotator gave no verdict.
    difficulty: of the instruction, in AlpacaEval's unit; None if it is not known.
    """

    instruction: str
    output_1: str
    output_2: str
    annotator: str
    preference: float | None
    difficulty: float | None = None


@dataclass(frozen=True, slots=True)
class MethodRun:
    """One method's answers to a set of prompts. Records and qualities are found by their ids.

    annotations: by the id of the instruction.
    rating:      how the run was rated; empty if it was not.
    """

    folder: Path
    settings: Mapping[str, Any]
    records: Mapping[str, Record]
    quality: Mapping[str, TextQuality]
    annotations: Mapping[str, Annotation]
    rating: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What the run is called: its folder's name."""
        return self.folder.resolve().name

    @property
    def method(self) -> str:
        """How the answers were decoded: `sequential`, `pasta`, `sot`, `apar`, `lookup`."""
        return str(self.settings["method"])

    @property
    def unanswered(self) -> int:
        """How many prompts of its file the run has not come to yet."""
        prompts = self.settings.get("prompts")
        number = prompts.get("number") if isinstance(prompts, dict) else None
        return max(0, number - len(self.records)) if isinstance(number, int) else 0

    @property
    def max_tokens(self) -> int:
        """The most tokens that an answer might have."""
        return int(self.settings["max_tokens"])


def find_runs(paths: Sequence[Path]) -> list[MethodRun]:
    """Read the run folders given, and those inside of the other folders. Raises PastaError."""
    folders: list[Path] = []
    for path in paths:
        inside = [path] if (path / SETTINGS).is_file() else sorted(path.glob(f"*/{SETTINGS}"))
        found = [one if one.is_dir() else one.parent for one in inside]
        if not found:
            hint = "Give folders that `pasta eval generate` wrote, or the folder around them."
            raise PastaError(f"{path}: no run folder, and none in it", hint=hint)
        folders += [one for one in found if one.resolve() not in {f.resolve() for f in folders}]
    runs = [read_run(folder) for folder in folders]
    for number, run in enumerate(runs):
        for other in runs[:number]:
            if run.label == other.label:
                message = f"{other.folder} and {run.folder} are both called {run.label!r}"
                raise PastaError(message, hint="Rename one of the folders.")
    return runs


def read_run(folder: Path) -> MethodRun:
    """Read one run folder. Raises PastaError if it is none, or broken."""
    settings = read_json(folder / SETTINGS, dict)
    for key, kind in (("method", str), ("max_tokens", int)):
        if not isinstance(settings.get(key), kind):
            hint = "It must be one that `pasta eval generate` wrote."
            raise PastaError(f"{folder / SETTINGS} has no {key!r}", hint=hint)
    records = {row.id: row for row in read_records(folder / RECORDS)}
    if not records:
        hint = "Let `pasta eval generate` answer the prompts first."
        raise PastaError(f"{folder} holds no records", hint=hint)
    return MethodRun(
        folder=folder,
        settings=settings,
        records=records,
        quality={row.id: row for row in read_quality(folder / QUALITY)},
        annotations=_annotations(folder / ANNOTATIONS, records),
        rating=read_json(folder / RATING, dict) if (folder / RATING).exists() else {},
    )


def read_quality(path: Path) -> list[TextQuality]:
    """Return what quality.jsonl holds; nothing if there is none. Raises PastaError."""
    hint = "Remove it; the same `pasta eval rate` makes it again."
    what = "the quality of a text"
    return parse_lines(path, lambda line: TextQuality(**line), what=what, hint=hint)


def text_digest(text: str) -> str:
    """Return twelve hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


def baseline_of(runs: Sequence[MethodRun]) -> MethodRun:
    """Return the first sequential run. Raises PastaError if there is none."""
    found = [run for run in runs if run.method == BASELINE]
    if not found:
        labels = ", ".join(run.label for run in runs)
        hint = "Speedups need the answers of `pasta eval generate --method sequential`."
        raise PastaError(f"no run is sequential: {labels}", hint=hint)
    return found[0]


def beside_baseline(
    paths: Sequence[Path], baseline: Path | None
) -> tuple[MethodRun, list[MethodRun]]:
    """Return the run to compare with, and all runs found, in one order of prompts.

    baseline: its folder; None for the first sequential one found. Raises PastaError.
    """
    found = find_runs(paths)
    reference = read_run(baseline) if baseline else baseline_of(found)
    first, *others = same_prompts([reference, *found])
    return first, others


def same_prompts(runs: Sequence[MethodRun], *, common: bool = False) -> list[MethodRun]:
    """Return the runs, in one order of prompts. Raises PastaError if the prompts are not the same.

    common: keep the prompts that all of them have instead.
    """
    first = runs[0]
    shared = set(first.records).intersection(*(run.records for run in runs))
    if common and shared:
        return [_only(run, [one for one in first.records if one in shared]) for run in runs]
    for run in runs[1:]:
        if run.records.keys() != first.records.keys():
            raise _different(first, run)
    return [_only(run, list(first.records)) for run in runs]


def _only(run: MethodRun, ids: Sequence[str]) -> MethodRun:
    """Return the run with these prompts alone, in this order."""
    return replace(run, records={one: run.records[one] for one in ids})


def _different(first: MethodRun, second: MethodRun) -> PastaError:
    sides = []
    for run, other in ((first, second), (second, first)):
        lacking = [one for key, one in other.records.items() if key not in run.records]
        if lacking:
            such = " ".join(lacking[0].instruction.split())[:60]
            sides.append(f"{run.folder} has no answer to {len(lacking)} of them, such as {such!r}")
    message = f"{first.folder} and {second.folder} are of different prompts: {'; '.join(sides)}"
    hint = (
        "The same `pasta eval generate` goes on where it was stopped; "
        "`pasta eval report --common` takes the prompts that all runs have."
    )
    return PastaError(message, hint=hint)


def _annotations(path: Path, records: Mapping[str, Record]) -> dict[str, Annotation]:
    """Read annotations; the newest of an instruction counts."""
    if not path.exists():
        return {}
    by_instruction = {record.instruction: record for record in records.values()}
    found = {}
    for row in read_json(path, list):
        try:
            one = _annotation(row)
        except (TypeError, KeyError, ValueError) as error:
            hint = "It must be as the package alpaca_eval writes it."
            raise PastaError(f"{path}: not annotations: {error}", hint=hint) from error
        record = by_instruction.get(one.instruction)
        if record is not None:
            found[record.id] = one
    return found


def _annotation(row: Mapping[str, Any]) -> Annotation:
    preference = row["preference"]
    known = preference is not None and math.isfinite(preference)
    if known and not 1 <= preference <= 2:
        raise ValueError(f"the preference {preference!r} is not in [1, 2]")
    return Annotation(
        instruction=str(row["instruction"]),
        output_1=str(row["output_1"]),
        output_2=str(row["output_2"]),
        annotator=str(row["annotator"]),
        preference=float(preference) if known else None,
        difficulty=row.get("instruction_difficulty"),
    )


def read_json(path: Path, kind: type[Read]) -> Read:
    """Return the JSON value of a file. Raises PastaError if it cannot be read or is no `kind`."""
    try:
        found = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise PastaError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PastaError(f"{path} is not JSON: {error}", hint="Remove it, or repair it.") from error
    if not isinstance(found, kind):
        raise PastaError(f"{path} holds no JSON {kind.__name__}", hint="Remove it, or repair it.")
    return found
