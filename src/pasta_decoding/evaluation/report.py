"""`pasta eval report`: one page with a plot, a table and the answers; the numbers as JSON."""

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
from pasta_decoding.evaluation.methods import OF_HF
from pasta_decoding.evaluation.metrics import Figures, Interval, Verdicts
from pasta_decoding.evaluation.records import Record, RunFolder
from pasta_decoding.lang.tree import Chunk, Span, Sync, read

BASELINES = ("sequential", "hf")
_ALIKE = ("model", "engine", "file_type", "max_tokens", "max_seconds", "sampling")
"""Settings that runs must have in common to be compared."""
_NAMES = {
    metrics.TOKENS_PER_STEP: "tokens per step",
    metrics.SPEEDUP_IN_STEPS: "speedup in steps",
    ENDED_SPEEDUP_IN_STEPS: "speedup in steps where both ended",
    metrics.WALL_CLOCK: "wall-clock speedup",
    metrics.LC_WIN_RATE: "length-controlled win rate, %",
    metrics.WIN_RATE: "win rate, %",
    ENDED_WIN_RATE: "win rate where both ended, %",
}

VerdictsOf = Callable[[RunFolder, RunFolder], Verdicts]
"""Judge a run against the baseline, or read what a judge left in its folder."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run."""

    run: RunFolder
    figures: Figures
    verdicts: Verdicts
    ended: EndedFigures

    @property
    def intervals(self) -> dict[str, Interval]:
        return {**self.figures.speedups, **self.verdicts.win_rates, **self.ended.intervals}


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Runs of the same prompts, the baseline first. `notes` names what is not in the figures."""

    baseline: RunFolder
    lines: Sequence[RunSummary]
    notes: Sequence[str]


def build_report(
    found: Sequence[RunFolder], verdicts_of: VerdictsOf = metrics.verdicts_of
) -> EvaluationReport:
    """Compute a report. Raises PastaError for runs that cannot be compared."""
    baseline = baseline_run(found)
    runs = [baseline, *(_alike(run, baseline) for run in found if run is not baseline)]
    lines = [_summary(run, baseline, verdicts_of) for run in runs]
    return EvaluationReport(baseline, lines, list(_notes(lines)))


def _summary(run: RunFolder, baseline: RunFolder, verdicts_of: VerdictsOf) -> RunSummary:
    figures = metrics.measure_run(run, baseline)
    verdicts = verdicts_of(run, baseline)
    return RunSummary(run, figures, verdicts, where_both_ended(run, baseline, verdicts))


def baseline_run(runs: Sequence[RunFolder]) -> RunFolder:
    """Return the first sequential run. Raises PastaError if there is none."""
    for method in BASELINES:
        if found := [run for run in runs if run.settings["method"] == method]:
            return found[0]
    labels = ", ".join(run.label for run in runs)
    raise PastaError(
        f"no run is sequential: {labels}",
        hint="Speedups need the answers of `pasta eval generate --method sequential`.",
    )


def _alike(run: RunFolder, baseline: RunFolder) -> RunFolder:
    """Return the run in the baseline's order. Raises PastaError if their settings differ."""
    both = baseline.records | run.records
    if lacking := [key for key in both if key not in baseline.records.keys() & run.records.keys()]:
        such = " ".join(both[lacking[0]].instruction.split())[:60]
        raise PastaError(
            f"{len(lacking)} prompts are in one of {baseline.folder} and {run.folder} only, such "
            f"as {such!r}",
            hint="The same command of `pasta eval generate` goes on with a run.",
        )
    # Servers hold a checkpoint of its own for each method; transformers is an engine of its own.
    free = {"model"} if baseline.settings.get("engine") == "remote" else set()
    if any(one.settings["method"] in OF_HF for one in (run, baseline)):
        free = {"engine", "file_type"}
    wanted = {key: baseline.settings.get(key) for key in _ALIKE if key not in free}
    hint = "Give both methods to one `pasta eval generate`."
    refuse_other_settings(run.folder, run.settings, wanted, hint=hint)
    return replace(run, records={key: run.records[key] for key in baseline.records})


def _notes(lines: Sequence[RunSummary]) -> Iterator[str]:
    engine = lines[0].run.settings.get("engine")
    for line in lines:
        if (own := line.run.settings.get("engine")) != engine:
            yield f"{line.run.label} ran on {own}, the baseline on {engine}"
        number = (line.run.settings.get("prompts") or {}).get("number", 0)
        if (left := number - len(line.run.records)) > 0:
            yield f"{line.run.label}: {left} prompts of its file are not answered yet"
        if missing := sum(map(math.isnan, line.verdicts.preferences.values())):
            yield f"{line.run.label}: {missing} prompts without a verdict"
    if lost := lines[0].figures.no_baseline:
        yield f"{lost} prompts have no speedup against the baseline: it failed there"
    annotators = {line.verdicts.annotator for line in lines} - {""}
    if len(annotators) > 1:
        yield f"win rates are of different judges: {', '.join(sorted(annotators))}"
    if not annotators:
        yield (
            "no win rates: give --judge-base-url and --judge-model, or run alpaca_eval on the "
            "model_outputs.json of two run folders"
        )


def numbers(report: EvaluationReport) -> dict[str, Any]:
    return {
        "baseline": report.baseline.label,
        "prompts": len(report.baseline.records),
        "notes": list(report.notes),
        "runs": {
            line.run.label: {
                "settings": dict(line.run.settings),
                **asdict(line.figures),
                **{name: asdict(one) for name, one in line.verdicts.win_rates.items()},
                **{name: asdict(rate) for name, rate in line.ended.intervals.items()},
                "both_ended": line.ended.prompts,
                "judge": line.verdicts.annotator or None,
                "ties": line.verdicts.ties,
                "agreement": line.verdicts.agreement,
            }
            for line in report.lines
        },
    }


# The page


def render(report: EvaluationReport) -> str:
    """Return the page: one HTML file without scripts that needs no other and no network."""
    from jinja2 import Environment
    from markupsafe import Markup

    source = files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return page.render(
        report=report,
        plot=Markup(plot(report)),  # ours: matplotlib escapes names
        columns=[name for name in _NAMES if any(name in one.intervals for one in report.lines)],
        names=_NAMES,
        in_both_orders=any(line.verdicts.agreement is not None for line in report.lines),
        threads=threads,
        prompts=[
            (base, [(line, line.run.records[key]) for line in report.lines])
            for key, base in report.baseline.records.items()
        ],
    )


def threads(record: Record) -> Iterator[tuple[str, str, str, int]]:
    """Yield the pieces of an answer as (class, title, text, hue); chunks have their own hues."""
    number = 0
    for node in read(record.annotated):
        match node:
            case Span(text):
                yield "", "", text, 0
            case Chunk(topic, tokens, text):
                number += 1
                title = f"thread {number}: {topic or 'no topic'}, {tokens} tokens promised"
                yield "chunk", title, text, round(170 + 137.5 * number) % 360  # the golden angle
            case Sync():
                yield "sync", "", "sync", 0


def plot(report: EvaluationReport) -> str:
    """Draw speed against win rate, a point a run, as SVG; "" without win rates."""
    judged = [line for line in report.lines if line.verdicts.win_rates]
    if not judged:
        return ""
    require("matplotlib", extra="plot", doing="drawing a report")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shared = set.intersection(*(set(line.intervals) for line in judged))
    speed = metrics.WALL_CLOCK if metrics.WALL_CLOCK in shared else metrics.SPEEDUP_IN_STEPS
    rate = metrics.LC_WIN_RATE if metrics.LC_WIN_RATE in shared else metrics.WIN_RATE
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pasta"}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.grid(color="#e4e7ea")
        axes.axhline(50, color="#667079", lw=0.9, ls="--")
        axes.axvline(1, color="#667079", lw=0.9, ls="--")
        _name(axes, report.baseline.label, 1, 50)
        for line in judged:
            x, y = line.intervals[speed], line.intervals[rate]
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
