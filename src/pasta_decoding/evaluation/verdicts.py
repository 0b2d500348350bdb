r"""What the package alpaca_eval put into a run folder.

    alpaca_eval --model_outputs runs/pasta/model_outputs.json \
        --reference_outputs runs/sequential/model_outputs.json --annotators_config NAME

writes runs/pasta/NAME/annotations.json and leaderboard.csv. A preference in [1, 2] is one for the
reference's answer (1) or for the model's (2).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import read_json
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.metrics import Interval, mean
from pasta_decoding.evaluation.records import Run

ANNOTATIONS, LEADERBOARD = "annotations.json", "leaderboard.csv"
LC_WIN_RATE, WIN_RATE = "lc_win_rate", "win_rate"


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What alpaca_eval's annotator said of a run's answers against a reference's.

    preferences: from 0 to 1 for the run, by the prompt's id; NaN without a verdict.
    win_rates:   in percent. The length-controlled one and its standard error are alpaca_eval's, if
                 it computed them. The plain one is the mean preference of the prompts with a
                 verdict: a missing verdict is no tie.
    """

    annotator: str
    preferences: Mapping[str, float]
    win_rates: Mapping[str, Interval]


def verdicts_of(run: Run, baseline: Run) -> Verdicts | None:
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
        instruction, texts, annotator, preference = _verdict(row, found[0])
        if (key := ids.get(instruction)) is None:
            continue
        if texts != [one.records[key].text.strip() for one in (baseline, run)]:
            raise PastaError(
                f"{found[0]} is of other answers to {instruction[:60]!r} than "
                f"{baseline.folder} and {run.folder} hold: run alpaca_eval again"
            )
        preferences[key] = preference
        annotators.add(annotator)
    rates = {WIN_RATE: mean([100 * one for one in preferences.values()])}
    rates |= _length_controlled(found[0].with_name(LEADERBOARD), run.label)
    return Verdicts(", ".join(sorted(annotators)), preferences, rates)


def _verdict(row: Any, path: Path) -> tuple[str, list[str], str, float]:
    """Return the instruction, both texts, who judged, and the preference from 0 to 1 or NaN."""
    try:
        texts = [row["output_1"].strip(), row["output_2"].strip()]
        instruction, annotator, preference = row["instruction"], row["annotator"], row["preference"]
        value = math.nan if preference is None else float(preference) - 1
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PastaError(f"{path}: not alpaca_eval's annotations: {error!r}") from error
    if value < 0 or value > 1:
        raise PastaError(f"{path}: the preference {preference} is not in [1, 2]")
    return str(instruction), texts, str(annotator), value


def _length_controlled(path: Path, label: str) -> dict[str, Interval]:
    if not path.exists():
        return {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if next(iter(row.values())) == label and row.get("length_controlled_winrate"):
                    value = float(row["length_controlled_winrate"])
                    reach = 1.96 * float(row["lc_standard_error"])
                    ends = (value - reach, value + reach) if 0 < reach < math.inf else ()
                    return {LC_WIN_RATE: Interval(value, *ends)}
    except (csv.Error, KeyError, ValueError) as error:
        raise PastaError(f"{path}: not alpaca_eval's leaderboard: {error!r}") from error
    return {}
