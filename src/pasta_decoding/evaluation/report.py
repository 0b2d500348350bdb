"""`pasta eval report`: one page with a plot, a table and the answers, and the numbers as JSON."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

from pasta_decoding.data.lines import refuse_other_settings
from pasta_decoding.errors import PastaError, require
from pasta_decoding.evaluation import metrics
from pasta_decoding.evaluation.judged import (
    ENDED_SPEEDUP_IN_STEPS,
    ENDED_WIN_RATE,
    EndedFigures,
    where_both_ended,
)
from pasta_decoding.evaluation.methods import TRANSFORMERS_METHODS
from pasta_decoding.evaluation.metrics import Figures, Interval, Verdicts
from pasta_decoding.evaluation.records import Record, RunFolder
from pasta_decoding.lang.tree import Chunk, Span, Sync, read

BASELINES = ("sequential", "hf")
"""Methods that can be the baseline, the preferred one first."""
_SHARED_SETTINGS = ("model", "engine", "file_type", "max_tokens", "max_seconds", "sampling")
"""Settings that runs must have in common to be compared."""
_FIGURE_NAMES = {
    metrics.TOKENS_PER_STEP: "tokens per step",
    metrics.SPEEDUP_IN_STEPS: "speedup in steps",
    ENDED_SPEEDUP_IN_STEPS: "speedup in steps where both ended",
    metrics.WALL_CLOCK: "wall-clock speedup",
    metrics.LC_WIN_RATE: "length-controlled win rate, %",
    metrics.WIN_RATE: "win rate, %",
    ENDED_WIN_RATE: "win rate where both ended, %",
}

VerdictsOf = Callable[[RunFolder, RunFolder], Verdicts]
"""Judges a run against the baseline, or reads the verdicts that a judge left in its folder."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run, its figures, and the verdicts on its answers."""

    run: RunFolder
    figures: Figures
    verdicts: Verdicts
    ended: EndedFigures

    @property
    def intervals(self) -> dict[str, Interval]:
        """The figures of `_FIGURE_NAMES` that this run has."""
        return {**self.figures.speedups, **self.verdicts.win_rates, **self.ended.intervals}


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Runs of the same prompts, the baseline first. `notes` says what the figures leave out."""

    baseline: RunFolder
    summaries: Sequence[RunSummary]
    notes: Sequence[str]


def build_report(
    runs: Sequence[RunFolder], verdicts_of: VerdictsOf = metrics.verdicts_of
) -> EvaluationReport:
    """Compute a report. Raises PastaError for runs that cannot be compared."""
    baseline = baseline_run(runs)
    others = [_comparable(run, baseline) for run in runs if run is not baseline]
    summaries = [_summary(run, baseline, verdicts_of) for run in (baseline, *others)]
    return EvaluationReport(baseline, summaries, list(_notes(summaries)))


def _summary(run: RunFolder, baseline: RunFolder, verdicts_of: VerdictsOf) -> RunSummary:
    figures = metrics.measure_run(run, baseline)
    verdicts = verdicts_of(run, baseline)
    return RunSummary(run, figures, verdicts, where_both_ended(run, baseline, verdicts))


def baseline_run(runs: Sequence[RunFolder]) -> RunFolder:
    """Return the first sequential run. Raises PastaError if there is none."""
    for method in BASELINES:
        for run in runs:
            if run.settings["method"] == method:
                return run
    labels = ", ".join(run.label for run in runs)
    raise PastaError(
        f"no run is sequential: {labels}",
        hint="Speedups need the answers of `pasta eval generate --method sequential`.",
    )


def _comparable(run: RunFolder, baseline: RunFolder) -> RunFolder:
    """Return the run with its records in the baseline's order.

    Raises PastaError if the two have other prompts or other settings.
    """
    _refuse_other_prompts(run, baseline)
    expected = {key: baseline.settings.get(key) for key in _compared_settings(run, baseline)}
    hint = "Give both methods to one `pasta eval generate`."
    refuse_other_settings(run.folder, run.settings, expected, hint=hint)
    return replace(run, records={key: run.records[key] for key in baseline.records})


def _refuse_other_prompts(run: RunFolder, baseline: RunFolder) -> None:
    all_records = baseline.records | run.records
    shared_keys = baseline.records.keys() & run.records.keys()
    unshared = [record for key, record in all_records.items() if key not in shared_keys]
    if unshared:
        example = " ".join(unshared[0].instruction.split())[:60]
        raise PastaError(
            f"{len(unshared)} prompts are in one of {baseline.folder} and {run.folder} only, such "
            f"as {example!r}",
            hint="The same command of `pasta eval generate` goes on with a run.",
        )


def _compared_settings(run: RunFolder, baseline: RunFolder) -> list[str]:
    methods = {run.settings["method"], baseline.settings["method"]}
    if not methods.isdisjoint(TRANSFORMERS_METHODS):
        may_differ = {"engine", "file_type"}  # transformers is an engine of its own
    elif baseline.settings.get("engine") == "remote":
        may_differ = {"model"}  # a server has one checkpoint, and methods need different ones
    else:
        may_differ = set()
    return [key for key in _SHARED_SETTINGS if key not in may_differ]


def _notes(summaries: Sequence[RunSummary]) -> Iterator[str]:
    baseline = summaries[0]
    baseline_engine = baseline.run.settings.get("engine")
    for summary in summaries:
        label = summary.run.label
        engine = summary.run.settings.get("engine")
        if engine != baseline_engine:
            yield f"{label} ran on {engine}, the baseline on {baseline_engine}"
        prompt_file = summary.run.settings.get("prompts") or {}
        unanswered = prompt_file.get("number", 0) - len(summary.run.records)
        if unanswered > 0:
            yield f"{label}: {unanswered} prompts of its file are not answered yet"
        unjudged = sum(map(math.isnan, summary.verdicts.preferences.values()))
        if unjudged:
            yield f"{label}: {unjudged} prompts without a verdict"
    if baseline.figures.no_baseline:
        prompts = baseline.figures.no_baseline
        yield f"{prompts} prompts have no speedup against the baseline: it failed there"
    annotators = {summary.verdicts.annotator for summary in summaries} - {""}
    if len(annotators) > 1:
        yield f"win rates are of different judges: {', '.join(sorted(annotators))}"
    if not annotators:
        yield (
            "no win rates: give --judge-base-url and --judge-model, or run alpaca_eval on the "
            "model_outputs.json of two run folders"
        )


def numbers(report: EvaluationReport) -> dict[str, Any]:
    """Return the report as JSON has it; answers are left out."""
    return {
        "baseline": report.baseline.label,
        "prompts": len(report.baseline.records),
        "notes": list(report.notes),
        "runs": {summary.run.label: _run_numbers(summary) for summary in report.summaries},
    }


def _run_numbers(summary: RunSummary) -> dict[str, Any]:
    win_rates = {**summary.verdicts.win_rates, **summary.ended.intervals}
    return {
        "settings": dict(summary.run.settings),
        **asdict(summary.figures),
        **{name: asdict(interval) for name, interval in win_rates.items()},
        "both_ended": summary.ended.prompts,
        "judge": summary.verdicts.annotator or None,
        "ties": summary.verdicts.ties,
        "agreement": summary.verdicts.agreement,
    }


# The page


def render(report: EvaluationReport) -> str:
    """Return the page: one HTML file without scripts, which loads nothing else."""
    from jinja2 import Environment
    from markupsafe import Markup

    source = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    figures = {name for summary in report.summaries for name in summary.intervals}
    answers = [
        (base, [(summary, summary.run.records[key]) for summary in report.summaries])
        for key, base in report.baseline.records.items()
    ]
    return page.render(
        report=report,
        plot=Markup(plot(report)),  # safe: matplotlib escapes names
        columns=[name for name in _FIGURE_NAMES if name in figures],
        names=_FIGURE_NAMES,
        in_both_orders=any(summary.verdicts.agreement is not None for summary in report.summaries),
        pieces=answer_pieces,
        prompts=answers,
    )


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A stretch of an answer as the page shows it.

    css_class: "" for text of the main thread.
    title:     appears under the pointer.
    hue:       of a chunk's background, in degrees.
    """

    text: str
    css_class: str = ""
    title: str = ""
    hue: int = 0


def answer_pieces(record: Record) -> Iterator[AnswerPiece]:
    """Yield an answer in reading order; each chunk has a hue of its own."""
    thread = 0
    for node in read(record.annotated):
        match node:
            case Span(text):
                yield AnswerPiece(text)
            case Chunk(topic, tokens, text):
                thread += 1
                title = f"thread {thread}: {topic or 'no topic'}, {tokens} tokens promised"
                hue = round(170 + 137.5 * thread) % 360  # the golden angle: neighbours differ
                yield AnswerPiece(text, "chunk", title, hue)
            case Sync():
                yield AnswerPiece("sync", "sync")


def plot(report: EvaluationReport) -> str:
    """Draw speed against win rate, one point a run, as SVG; return "" without win rates."""
    judged = [summary for summary in report.summaries if summary.verdicts.win_rates]
    if not judged:
        return ""
    require("matplotlib", extra="plot", doing="drawing a report")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shared = set.intersection(*(set(summary.intervals) for summary in judged))
    speed = metrics.WALL_CLOCK if metrics.WALL_CLOCK in shared else metrics.SPEEDUP_IN_STEPS
    rate = metrics.LC_WIN_RATE if metrics.LC_WIN_RATE in shared else metrics.WIN_RATE
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pasta"}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.grid(color="#e4e7ea")
        axes.axhline(50, color="#667079", lw=0.9, ls="--")
        axes.axvline(1, color="#667079", lw=0.9, ls="--")
        _write_label(axes, report.baseline.label, 1, 50)
        for summary in judged:
            x = summary.intervals[speed]
            y = summary.intervals[rate]
            if x.value is not None and y.value is not None:
                x_error = _error_bar(x)
                y_error = _error_bar(y)
                axes.errorbar(x.value, y.value, xerr=x_error, yerr=y_error, fmt="o", ms=7)
                _write_label(axes, summary.run.label, x.value, y.value)
        axes.set_xlabel(f"{_FIGURE_NAMES[speed]}, times")
        axes.set_ylabel(_FIGURE_NAMES[rate])
        axes.margins(0.12)
        document = io.StringIO()
        figure.savefig(document, format="svg", metadata={"Date": None})
    svg = document.getvalue()
    return svg[svg.index("<svg") :]


def _error_bar(interval: Interval) -> list[list[float]]:
    """Return how far an interval reaches below and above its value, in matplotlib's shape."""
    value = interval.value or 0.0
    low = value if interval.low is None else interval.low
    high = value if interval.high is None else interval.high
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def _write_label(axes: Any, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), (7, 6), textcoords="offset points", parse_math=False)
