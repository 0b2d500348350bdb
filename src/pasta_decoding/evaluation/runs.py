r"""Run folders as `pasta eval report` reads them, and what the package alpaca_eval put into them.

    alpaca_eval --model_outputs runs/pasta/model_outputs.json \
        --reference_outputs runs/sequential/model_outputs.json --annotators_config NAME

writes runs/pasta/NAME/annotations.json and leaderboard.csv. A preference in [1, 2] is one for the
reference's answer (1) or for the model's (2).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.records import RECORDS, SETTINGS, Record, read_records

BASELINES = ("sequential", "hf")
ANNOTATIONS, LEADERBOARD = "annotations.json", "leaderboard.csv"
_ALIKE = ("engine", "file_type", "max_tokens", "max_seconds", "sampling")
"""Settings that runs must have in common to be compared."""

Read = TypeVar("Read", list[Any], dict[str, Any])


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What alpaca_eval's annotator said of a run's answers against a reference's.

    preferences:       from 0 to 1 for the run, by the prompt's id; NaN without a verdict.
    length_controlled: the win rate at equal length and its standard error, in percent; None if
                       alpaca_eval computed none.
    """

    annotator: str
    preferences: Mapping[str, float]
    length_controlled: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class MethodRun:
    """One method's answers to a set of prompts, by their ids."""

    folder: Path
    settings: Mapping[str, Any]
    records: Mapping[str, Record]

    @property
    def label(self) -> str:
        """The name of the run: its folder's."""
        return self.folder.resolve().name

    @property
    def method(self) -> str:
        """The name of the method, as `eval generate` takes it."""
        return str(self.settings["method"])

    @property
    def max_tokens(self) -> int:
        """The most tokens that an answer might have."""
        return int(self.settings["max_tokens"])

    @property
    def unanswered(self) -> int:
        """How many prompts of its file the run has not come to yet."""
        number = (self.settings.get("prompts") or {}).get("number", 0)
        return max(0, number - len(self.records))


def find_runs(paths: Sequence[Path]) -> list[MethodRun]:
    """Read the run folders given, and those inside of the other folders. Raises PastaError."""
    folders: dict[Path, Path] = {}
    for path in paths:
        one = [path] if (path / SETTINGS).is_file() else []
        found = one or [settings.parent for settings in sorted(path.glob(f"*/{SETTINGS}"))]
        if not found:
            raise PastaError(f"{path}: no run folder of `pasta eval generate`, and none in it")
        folders |= {folder.resolve(): folder for folder in found}
    runs = [read_run(folder) for folder in folders.values()]
    labels = [run.label for run in runs]
    for label in labels:
        if labels.count(label) > 1:
            raise PastaError(f"several run folders are called {label!r}: rename one")
    return runs


def read_run(folder: Path) -> MethodRun:
    """Read one run folder. Raises PastaError if it is none, or broken."""
    settings = read_json(folder / SETTINGS, dict)
    for key, kind in (("method", str), ("max_tokens", int)):
        if not isinstance(settings.get(key), kind):
            raise PastaError(f"{folder / SETTINGS} has no {key!r}")
    records = {row.id: row for row in read_records(folder / RECORDS)}
    if not records:
        raise PastaError(f"{folder} holds no records")
    return MethodRun(folder, settings, records)


def baseline_of(runs: Sequence[MethodRun]) -> MethodRun:
    """Return the first sequential run. Raises PastaError if there is none."""
    for method in BASELINES:
        if found := [run for run in runs if run.method == method]:
            return found[0]
    labels = ", ".join(run.label for run in runs)
    raise PastaError(
        f"no run is sequential: {labels}",
        hint="Speedups need the answers of `pasta eval generate --method sequential`.",
    )


def same_prompts(runs: Sequence[MethodRun], *, common: bool = False) -> list[MethodRun]:
    """Return the runs, in one order of prompts. Raises PastaError if the prompts are not the same.

    common: keep the prompts that all of them have instead.
    """
    first, *others = runs
    shared = set(first.records).intersection(*(run.records for run in others))
    if not (common and shared):
        for run in others:
            if run.records.keys() != first.records.keys():
                raise _different(first, run)
    ids = [one for one in first.records if one in shared]
    return [replace(run, records={one: run.records[one] for one in ids}) for run in runs]


def _different(first: MethodRun, second: MethodRun) -> PastaError:
    sides = []
    for run, other in ((first, second), (second, first)):
        lacking = [one for key, one in other.records.items() if key not in run.records]
        if lacking:
            such = " ".join(lacking[0].instruction.split())[:60]
            sides.append(f"{run.folder} has no answer to {len(lacking)} of them, such as {such!r}")
    return PastaError(
        f"{first.folder} and {second.folder} are of different prompts: {'; '.join(sides)}",
        hint="`pasta eval generate` resumes a run; `pasta eval report --common` takes the prompts "
        "that all runs have.",
    )


def check_alike(run: MethodRun, baseline: MethodRun) -> None:
    """Raise PastaError for runs that differ in more than their methods."""
    # Servers hold a checkpoint of its own for each method.
    keys = _ALIKE if baseline.settings.get("engine") == "remote" else ("model", *_ALIKE)
    for key in keys:
        ours, theirs = run.settings.get(key), baseline.settings.get(key)
        if ours != theirs:
            raise PastaError(
                f"{baseline.folder} has {key} {theirs!r}, {run.folder} has {ours!r}",
                hint="Give both methods to one `pasta eval generate`.",
            )


def verdicts_of(run: MethodRun, baseline: MethodRun) -> Verdicts | None:
    """Return what alpaca_eval left in a run's folder; None if nothing is there.

    Raises PastaError if it is broken, or of other answers than the two runs hold now.
    """
    found = [*run.folder.glob(ANNOTATIONS), *sorted(run.folder.glob(f"*/{ANNOTATIONS}"))]
    if len(found) > 1:
        raise PastaError(f"{run.folder} holds annotations of several judges: keep one of {found}")
    if not found or run is baseline:
        return None
    preferences = dict.fromkeys(run.records, math.nan)
    ids = {record.instruction: key for key, record in run.records.items()}
    annotators = set()
    for row in read_json(found[0], list):
        try:
            key, preference = ids.get(row["instruction"]), row["preference"]
            texts, annotator = [row["output_1"].strip(), row["output_2"].strip()], row["annotator"]
            value = math.nan if preference is None else float(preference) - 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PastaError(f"{found[0]}: not alpaca_eval's annotations: {error!r}") from error
        if value < 0 or value > 1:
            raise PastaError(f"{found[0]}: the preference {preference} is not in [1, 2]")
        if key is None:
            continue
        if texts != [one.records[key].text.strip() for one in (baseline, run)]:
            raise PastaError(
                f"{found[0]} is of other answers to {row['instruction'][:60]!r} than "
                f"{baseline.folder} and {run.folder} hold: run alpaca_eval again"
            )
        preferences[key] = value
        annotators.add(str(annotator))
    controlled = _length_controlled(found[0].with_name(LEADERBOARD), run.label)
    return Verdicts(", ".join(sorted(annotators)), preferences, controlled)


def _length_controlled(path: Path, label: str) -> tuple[float, float] | None:
    if not path.exists():
        return None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if next(iter(row.values())) == label and row.get("length_controlled_winrate"):
                    return float(row["length_controlled_winrate"]), float(row["lc_standard_error"])
    except (csv.Error, KeyError, ValueError) as error:
        raise PastaError(f"{path}: not alpaca_eval's leaderboard: {error!r}") from error
    return None


def read_json(path: Path, kind: type[Read]) -> Read:
    """Return the JSON value of a file. Raises PastaError if it cannot be read or is no `kind`."""
    try:
        found = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise PastaError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PastaError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, kind):
        raise PastaError(f"{path} holds no JSON {kind.__name__}")
    return found
