"""`pasta eval report`: one page with a plot, a table and the answers; the numbers as JSON."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from pasta_decoding.evaluation.machine import commit
from pasta_decoding.evaluation.metrics import (
    SPEEDUP_IN_STEPS,
    TOKENS_PER_STEP,
    WALL_CLOCK,
    Figures,
    Interval,
    figures,
    mean,
)
from pasta_decoding.evaluation.records import Record
from pasta_decoding.evaluation.runs import (
    MethodRun,
    Verdicts,
    baseline_of,
    check_alike,
    same_prompts,
    verdicts_of,
)
from pasta_decoding.lang.tree import Chunk, Span, Sync, read

COLOURS = 8
"""Threads of an answer are told apart by this many colours, then the colours come again."""
LC_WIN_RATE, WIN_RATE = "lc_win_rate", "win_rate"
_NAMES = {
    TOKENS_PER_STEP: "tokens per step",
    SPEEDUP_IN_STEPS: "speedup in steps",
    WALL_CLOCK: "wall-clock speedup",
    LC_WIN_RATE: "length-controlled win rate, %",
    WIN_RATE: "win rate, %",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One run; `verdicts` is None if no judge compared its answers."""

    run: MethodRun
    figures: Figures
    verdicts: Verdicts | None
    win_rates: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class Report:
    """Runs of the same prompts, the baseline first. `notes` names what is not in the figures."""

    baseline: MethodRun
    lines: Sequence[Line]
    notes: Sequence[str]


def build(found: Sequence[MethodRun], *, common: bool = False) -> Report:
    """Compute a report. Raises PastaError for runs that cannot be compared."""
    runs = same_prompts(found, common=common)
    baseline = baseline_of(runs)
    for run in runs:
        check_alike(run, baseline)
    ordered = [baseline, *(run for run in runs if run is not baseline)]
    lines = [_line(run, baseline) for run in ordered]
    return Report(baseline, lines, list(_notes(found, lines)))


def _line(run: MethodRun, baseline: MethodRun) -> Line:
    verdicts = verdicts_of(run, baseline)
    return Line(run, figures(run, baseline), verdicts, win_rates(verdicts))


def win_rates(verdicts: Verdicts | None) -> dict[str, Interval]:
    """Return the win rates in percent.

    The length-controlled one and its standard error are alpaca_eval's. The plain one is the mean
    preference of the prompts with a verdict: a missing verdict is no tie.
    """
    if verdicts is None:
        return {}
    found = {WIN_RATE: mean([100 * one for one in verdicts.preferences.values()])}
    if verdicts.length_controlled is not None:
        value, error = verdicts.length_controlled
        reach = 1.96 * error if error > 0 else math.nan
        bounds = (value - reach, value + reach) if math.isfinite(reach) else (None, None)
        found[LC_WIN_RATE] = Interval(value, *bounds)
    return found


def _notes(found: Sequence[MethodRun], lines: Sequence[Line]) -> Iterator[str]:
    kept = lines[0].figures.prompts
    for run in found:
        if run.unanswered:
            yield f"{run.label}: {run.unanswered} prompts of its file are not answered yet"
        if len(run.records) > kept:
            yield f"{run.label}: {len(run.records) - kept} prompts left out, not in all runs"
    if lost := lines[0].figures.no_baseline:
        yield f"{lost} prompts have no speedup against the baseline: it failed there"
    yield from _notes_on_judges(lines)


def _notes_on_judges(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if line.verdicts and (missing := sum(map(math.isnan, line.verdicts.preferences.values()))):
            yield f"{line.run.label}: {missing} prompts without a verdict"
    annotators = {line.verdicts.annotator for line in lines if line.verdicts}
    if len(annotators) > 1:
        yield f"win rates are of different judges: {', '.join(sorted(annotators))}"
    if not annotators:
        yield "no win rates: run alpaca_eval on the model_outputs.json of two run folders"


def numbers(report: Report) -> dict[str, Any]:
    """Return the whole report as what JSON can hold."""
    return {
        "baseline": report.baseline.label,
        "prompts": len(report.baseline.records),
        "notes": list(report.notes),
        "commit": commit(),
        "runs": {
            line.run.label: {
                "settings": dict(line.run.settings),
                **asdict(line.figures),
                **{name: asdict(one) for name, one in line.win_rates.items()},
                "judge": line.verdicts and line.verdicts.annotator,
            }
            for line in report.lines
        },
    }


# The page


def render(report: Report) -> str:
    """Return the page: one HTML file without scripts that needs no other and no network."""
    from jinja2 import Environment
    from markupsafe import Markup

    source = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    figure = plot(report)
    return page.render(
        report=report,
        commit=commit(),
        plot=None if figure is None else Markup(figure),  # ours: matplotlib escapes names
        columns=[name for name in _NAMES if any(name in _intervals(one) for one in report.lines)],
        names=_NAMES,
        intervals=_intervals,
        threads=threads,
        prompts=[
            (base, [(line, line.run.records[key]) for line in report.lines])
            for key, base in report.baseline.records.items()
        ],
    )


def _intervals(line: Line) -> dict[str, Interval]:
    return {**line.figures.speedups, **line.win_rates}


def threads(record: Record) -> Iterator[tuple[str, str, str]]:
    """Yield the pieces of an answer as (class, title, text); each chunk has its own colour."""
    number = 0
    for node in read(record.annotated):
        match node:
            case Span(text):
                yield "", "", text
            case Chunk(topic, tokens, text):
                title = f"thread {number + 1}: {topic or 'no topic'}, {tokens} tokens promised"
                yield f"chunk c{number % COLOURS}", title, text
                number += 1
            case Sync():
                yield "sync", "", "sync"


def plot(report: Report) -> str | None:
    """Draw speed against win rate, a point a run, as SVG; None without win rates."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    judged = [line for line in report.lines if line.win_rates]
    if not judged:
        return None
    timed = all(WALL_CLOCK in line.figures.speedups for line in judged)
    speed = WALL_CLOCK if timed else SPEEDUP_IN_STEPS
    rate = LC_WIN_RATE if all(LC_WIN_RATE in line.win_rates for line in judged) else WIN_RATE
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pasta"}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.grid(color="#e4e7ea")
        axes.axhline(50, color="#667079", lw=0.9, ls="--")
        axes.axvline(1, color="#667079", lw=0.9, ls="--")
        _name(axes, report.baseline.label, 1, 50)
        for line in judged:
            x, y = line.figures.speedups[speed], line.win_rates[rate]
            if x.value is not None and y.value is not None:
                axes.errorbar(x.value, y.value, xerr=_reach(x), yerr=_reach(y), fmt="o", ms=7)
                _name(axes, line.run.label, x.value, y.value)
        axes.set_xlabel(f"{_NAMES[speed]}, times")
        axes.set_ylabel(_NAMES[rate])
        axes.margins(0.12)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _reach(one: Interval) -> list[list[float]]:
    """Return how far an interval reaches below and above its value, as matplotlib wants it."""
    value = one.value or 0.0
    low, high = (value if bound is None else bound for bound in (one.low, one.high))
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def _name(axes: Any, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), (7, 6), textcoords="offset points", parse_math=False)
