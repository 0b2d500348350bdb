"""`pasta eval report`: every figure of a set of runs, as numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.bootstrap import Drawn, FloatArray
from pasta_decoding.evaluation.figures import (
    THEORETICAL,
    WALL_CLOCK,
    Figures,
    RecordPair,
    figures,
    geometric,
    speeds,
)
from pasta_decoding.evaluation.machine import commit
from pasta_decoding.evaluation.quality import (
    LC_WIN_RATE,
    TEXT_QUALITY,
    Faults,
    Quality,
    faults,
    qualities,
)
from pasta_decoding.evaluation.report.dominance import OURS, RIVALS, Contender, Dominance, dominance
from pasta_decoding.evaluation.runs import BASELINE, MethodRun, baseline_of, same_prompts

PAPER = (
    {"run": "PASTA, most for speed", "wall_clock": 1.93, "win_rate_change": -7.1},
    {"run": "PASTA, most for quality", "wall_clock": 1.21, "win_rate_change": 2.2},
)
"""The ends of the frontier that the paper's abstract states (arXiv 2502.11517v2): Gemma 7B on an
H100, AlpacaEval's 805 prompts, length-controlled win rate against its own sequential baseline."""

_ALIKE = ("engine", "file_type", "max_tokens", "max_seconds", "sampling")
"""Settings that all runs of a report have in common."""


@dataclass(frozen=True, slots=True)
class Line:
    """One run.

    log_speed_P: of each speedup, the logs prompt by prompt; see eval/figures.py.
    """

    run: MethodRun
    figures: Figures
    log_speed_P: Mapping[str, FloatArray]
    qualities: Mapping[str, Quality]
    faults: Faults | None

    def speed(self, name: str) -> Drawn:
        """Return a speedup with its resamples."""
        return geometric(self.log_speed_P[name])


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the tables and the pictures show.

    unanswered: prompts that a run has not come to yet.
    left_out:  prompts that a run has an answer to, but another one has not.
    speed:     the speedup that stands for all in the pictures: wall-clock where all were timed.
    dominance: for each measure of quality.
    judge:     what is to be said of whoever compared the answers.
    """

    baseline: MethodRun
    lines: Sequence[Line]
    unanswered: Mapping[str, int]
    left_out: Mapping[str, int]
    speed: str
    dominance: Mapping[str, Sequence[Dominance]]
    judge: str

    @property
    def measures(self) -> list[str]:
        """The measures of quality for the pictures: by a judge, and without one."""
        known = {name for line in self.lines for name in line.qualities}
        return [name for name in (LC_WIN_RATE, TEXT_QUALITY) if name in known]


def build(runs: Sequence[MethodRun], *, common: bool = False) -> Report:
    """Compute a report. Raises PastaError for runs that cannot be compared."""
    before = {run.label: len(run.records) for run in runs}
    unanswered = {run.label: run.unanswered for run in runs if run.unanswered}
    runs = same_prompts(runs, common=common)
    baseline = baseline_of(runs)
    for run in runs:
        _check_alike(run, baseline)
    lines = sorted((_line(RecordPair(run, baseline)) for run in runs), key=_reading_order)
    _check_judges(lines)
    timed = all(WALL_CLOCK in line.log_speed_P for line in lines)
    speed = WALL_CLOCK if timed else THEORETICAL
    left_out = {run.label: before[run.label] - len(run.records) for run in runs}
    return Report(
        baseline=baseline,
        lines=lines,
        unanswered=unanswered,
        left_out={label: count for label, count in left_out.items() if count},
        speed=speed,
        dominance=_dominance(lines, speed),
        judge=_about_judges(lines),
    )


def _reading_order(line: Line) -> tuple[int, float]:
    """The baseline first, then ours, then the rivals; the fastest last."""
    methods = (BASELINE, OURS, *RIVALS)
    method = line.run.method
    place = methods.index(method) if method in methods else len(methods)
    return place, line.speed(THEORETICAL).value


def _line(pair: RecordPair) -> Line:
    return Line(pair.run, figures(pair), speeds(pair), qualities(pair), faults(pair))


def _check_alike(run: MethodRun, baseline: MethodRun) -> None:
    """Refuse runs whose speedups would be of something else than their methods."""
    # A server holds a checkpoint of its own for each method.
    keys = _ALIKE if baseline.settings.get("engine") == "remote" else ("model", *_ALIKE)
    for key in keys:
        ours, theirs = run.settings.get(key), baseline.settings.get(key)
        if ours != theirs:
            message = f"{baseline.folder} has {key} {theirs!r}, {run.folder} has {ours!r}"
            raise PastaError(message, hint="Give both methods to one `pasta eval generate`.")


def _check_judges(lines: Sequence[Line]) -> None:
    """Refuse to set figures of different judges side by side."""
    first: dict[str, tuple[str, str]] = {}
    for line in lines:
        for name, quality in line.qualities.items():
            label, by = first.setdefault(name, (line.run.label, quality.by))
            if by != quality.by:
                message = f"{label} was rated by {by!r}, {line.run.label} by {quality.by!r}"
                raise PastaError(message, hint="Rate all runs alike with `pasta eval rate`.")


def _dominance(lines: Sequence[Line], speed: str) -> dict[str, list[Dominance]]:
    found = {}
    for measure in (LC_WIN_RATE, TEXT_QUALITY):
        contenders = [
            Contender(
                line.run.label,
                line.run.method,
                line.speed(speed),
                line.qualities[measure].drawn,
            )
            for line in lines
            if measure in line.qualities
        ]
        if rows := dominance(contenders):
            found[measure] = rows
    return found


def _about_judges(lines: Sequence[Line]) -> str:
    judged = sorted({q.by for line in lines for n, q in line.qualities.items() if n == LC_WIN_RATE})
    if judged:
        return f"compared by {judged[0]}"
    return "judge: not used, because none was given to `pasta eval rate`"


# Numbers


def numbers(report: Report) -> dict[str, Any]:
    """Return the whole report as what JSON can hold."""
    return {
        "baseline": report.baseline.label,
        "prompts": len(report.baseline.records),
        "unanswered": dict(report.unanswered),
        "left_out": dict(report.left_out),
        "judge": report.judge,
        "commit": commit(),
        "runs": {line.run.label: _numbers_of(line) for line in report.lines},
        "dominance": {
            measure: [asdict(row) for row in rows] for measure, rows in report.dominance.items()
        },
        "paper": list(PAPER),
    }


def _numbers_of(line: Line) -> dict[str, Any]:
    judged = {
        name: asdict(quality.interval)
        | {"rated": quality.rated, "missing": quality.missing, "by": quality.by}
        for name, quality in line.qualities.items()
    }
    return {
        "settings": dict(line.run.settings),
        **asdict(line.figures),
        "quality": judged,
        "faults": asdict(line.faults) if line.faults else None,
    }


def runs_csv(report: Report) -> str:
    """Return a line a run; an interval is three columns."""
    return _csv([_flat_line(line) for line in report.lines])


def _flat_line(line: Line) -> dict[str, Any]:
    found = _numbers_of(line)
    for key in ("settings", "by_length", "by_dataset", "by_end"):
        del found[key]
    return {"run": line.run.label, "method": line.run.method, **_flat(found)}


def _flat(found: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, Mapping):
            row |= _flat(value, f"{prefix}{key}.")
        else:
            row[f"{prefix}{key}"] = value
    return row


def prompts_csv(report: Report) -> str:
    """Return a line a run and prompt."""
    rows = []
    for line in report.lines:
        for place, (key, record) in enumerate(line.run.records.items()):
            rated, verdict = line.run.quality.get(key), line.run.annotations.get(key)
            rows.append(
                {
                    "run": line.run.label,
                    "id": key,
                    "dataset": record.dataset,
                    "error": record.error,
                    "plain_tokens": record.plain_tokens,
                    "critical_path": record.critical_path,
                    "chunks": record.chunks,
                    "syncs": record.syncs,
                    "hit_limit": record.hit_limit,
                    **{name: _ratio(log_P[place]) for name, log_P in line.log_speed_P.items()},
                    "nats": rated.nats if rated else None,
                    "baseline_nats": rated.baseline_nats if rated else None,
                    "preference": verdict.preference if verdict else None,
                }
            )
    return _csv(rows)


def _ratio(log: float) -> float | None:
    return float(np.exp(log)) if np.isfinite(log) else None


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
