"""The pictures of a report: a function each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pasta_decoding.evaluation.bootstrap import FloatArray, Interval
from pasta_decoding.evaluation.figures import OWN, PER_TOKEN, THEORETICAL, WALL_CLOCK, total_widths
from pasta_decoding.evaluation.quality import EQUAL, LC_WIN_RATE, LIKELIHOOD, TEXT_QUALITY, WIN_RATE
from pasta_decoding.evaluation.report.build import PAPER, Line, Report
from pasta_decoding.evaluation.report.dominance import OURS
from pasta_decoding.evaluation.report.drawing import MARKERS, Palette, Plot, legend, new_figure
from pasta_decoding.evaluation.report.promises import promises
from pasta_decoding.evaluation.report.timeline import Bar, telling_sample, timeline

SPEED_NAMES = {
    OWN: "own speedup",
    THEORETICAL: "theoretical speedup",
    WALL_CLOCK: "wall-clock speedup",
    PER_TOKEN: "wall-clock speedup per token",
}
QUALITY_NAMES = {
    LC_WIN_RATE: "length-controlled win rate, %",
    WIN_RATE: "win rate, %",
    TEXT_QUALITY: "text quality gained, nats a token",
    LIKELIHOOD: "likelihood gained, nats a token",
}
_WIDTHS = (("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5-8", 5, 8), ("9 or more", 9, 10**9))
SHOWN_SPEEDUPS = (0.25, 16.0)
"""Speedups of prompts beyond these are drawn at the edge."""


def plots(report: Report) -> dict[str, Plot]:
    """Return the pictures of a report by name."""
    return {
        **{f"frontier_{measure}": frontier(measure) for measure in report.measures},
        "speedups": speedups,
        "lengths": lengths,
        "widths": widths,
        "timelines": timelines,
        "promises": promises,
    }


def frontier(measure: str) -> Plot:
    """Return the plot of speed against one measure of quality, a point a run."""

    def plot(report: Report, colours: Palette) -> Figure | None:
        lines = [
            line
            for line in report.lines
            if measure in line.qualities
            and line.qualities[measure].interval.value is not None
            and line.figures.speedups[report.speed].value is not None
        ]
        if not lines:
            return None
        figure, [axes] = new_figure(colours, 3.9)
        _cross_at_baseline(axes, EQUAL[measure], report.baseline.label, colours)
        family = [_point(line, measure, report.speed) for line in lines if line.run.method == OURS]
        axes.plot(*np.array(sorted(family)).reshape(-1, 2).T, color=colours.pasta, alpha=0.35)
        for line in lines:
            _draw_run(axes, line, measure, report.speed, colours)
        if measure == LC_WIN_RATE and report.speed == WALL_CLOCK:
            _draw_paper(axes, colours)
        axes.set_xlabel(f"{SPEED_NAMES[report.speed]}, times")
        axes.set_ylabel(QUALITY_NAMES[measure])
        axes.margins(0.12)
        return figure

    return plot


def _cross_at_baseline(axes: Axes, equal: float, label: str, colours: Palette) -> None:
    axes.axhline(equal, color=colours.muted, lw=0.9, ls=(0, (4, 3)))
    axes.axvline(1, color=colours.muted, lw=0.9, ls=(0, (4, 3)))
    axes.plot([1], [equal], "o", color=colours.sequential, ms=7)
    _name(axes, label, (1, equal), colours.sequential)


def _point(line: Line, measure: str, speed: str) -> tuple[float, float]:
    return line.figures.speedups[speed].value or 0, line.qualities[measure].interval.value or 0


def _draw_run(axes: Axes, line: Line, measure: str, speed: str, colours: Palette) -> None:
    colour = colours.of(line.run.method)
    x, y = _point(line, measure, speed)
    axes.errorbar(
        x,
        y,
        xerr=_reach(line.figures.speedups[speed]),
        yerr=_reach(line.qualities[measure].interval),
        fmt="o",
        ms=7,
        color=colour,
        lw=1.2,
        alpha=0.9,
    )
    _name(axes, line.run.label, (x, y), colour)


def _reach(one: Interval) -> list[list[float]]:
    """Return how far an interval reaches below and above its value, as matplotlib wants it."""
    value, low, high = one.value or 0, one.low, one.high
    return [[max(0.0, value - (value if low is None else low))],
            [max(0.0, (value if high is None else high) - value)]]  # fmt: skip


def _draw_paper(axes: Axes, colours: Palette) -> None:
    points = [
        (float(str(one["wall_clock"])), 50 + float(str(one["win_rate_change"]))) for one in PAPER
    ]
    axes.plot(*zip(*points, strict=True), "D", ms=6, mfc="none", color=colours.muted, alpha=0.8)
    _name(axes, "the paper (Gemma 7B, H100)", points[0], colours.muted)


def _name(axes: Axes, text: str, at: tuple[float, float], colour: str) -> None:
    axes.annotate(
        text,
        at,
        xytext=(7, 6),
        textcoords="offset points",
        color=colour,
        fontsize=9.5,
        zorder=5,
        parse_math=False,
    )


def speedups(report: Report, colours: Palette) -> Figure | None:
    """Draw a row a run: every prompt's own and theoretical speedup, and their middle halves."""
    lines = _without_baseline(report)
    if not lines:
        return None
    names = [OWN, report.speed]
    figure, panels = new_figure(colours, 1.3 + 0.45 * len(lines), panels=2, share_y=True)
    for axes, name in zip(panels, names, strict=True):
        for row, line in enumerate(reversed(lines)):
            log_P = line.log_speed_P[name]
            shown_P = np.clip(np.exp(log_P[np.isfinite(log_P)]), *SHOWN_SPEEDUPS)
            _draw_spread(axes, row, shown_P, colours.of(line.run.method))
        axes.axvline(1, color=colours.muted, lw=0.9, ls=(0, (4, 3)))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlabel(f"{SPEED_NAMES[name]}, times")
        axes.set_yticks(range(len(lines)), [line.run.label for line in reversed(lines)])
        axes.grid(axis="y", visible=False)
    return figure


def _draw_spread(axes: Axes, row: int, value_P: FloatArray, colour: str) -> None:
    jitter_P = np.random.default_rng(row).uniform(-0.28, 0.28, len(value_P))
    if not len(value_P):
        return
    axes.plot(value_P, row + jitter_P, ".", color=colour, ms=4, alpha=0.45, mew=0)
    low, middle, high = np.percentile(value_P, [25, 50, 75])
    axes.plot([low, high], [row, row], color=colour, lw=5, alpha=0.55, solid_capstyle="round")
    axes.plot([middle], [row], "o", color=colour, ms=6.5)


def lengths(report: Report, colours: Palette) -> Figure | None:
    """Draw the speedup against the tokens of the baseline's answer."""
    lines = _without_baseline(report)
    if not lines:
        return None
    figure, [axes] = new_figure(colours, 3.6)
    bins = list(lines[0].figures.by_length)
    if not bins:
        return None
    for number, line in enumerate(lines):
        intervals = [line.figures.by_length[name].speedups[report.speed] for name in bins]
        places = np.arange(len(bins)) + 0.09 * (number - (len(lines) - 1) / 2)
        reach = np.concatenate([_reach(one) for one in intervals], axis=1)
        axes.errorbar(
            places,
            [one.value or np.nan for one in intervals],
            yerr=reach,
            fmt=MARKERS[number % len(MARKERS)] + "-",
            color=colours.of(line.run.method),
            ms=5,
            lw=1.1,
            label=line.run.label,
        )
    counts = [lines[0].figures.by_length[name].prompts for name in bins]
    axes.set_xticks(
        range(len(bins)), [f"{name}\n{n} prompts" for name, n in zip(bins, counts, strict=True)]
    )
    axes.axhline(1, color=colours.muted, lw=0.9, ls=(0, (4, 3)))
    axes.set_xlabel("tokens of the baseline's answer")
    axes.set_ylabel(f"{SPEED_NAMES[report.speed]}, times")
    legend(axes, colours)
    return figure


def widths(report: Report, colours: Palette) -> Figure | None:
    """Draw a row a run: which share of its steps had how many live threads."""
    found = {
        line.run.label: (line.run.method, total_widths(list(line.run.records.values())))
        for line in _without_baseline(report)
    }
    found = {label: one for label, one in found.items() if one[1]}
    if not found:
        return None
    figure, [axes] = new_figure(colours, 1.2 + 0.42 * len(found))
    for row, (method, steps) in enumerate(reversed(found.values())):
        left, total = 0.0, sum(steps.values())
        for shade, (name, low, high) in enumerate(_WIDTHS):
            part = sum(count for width, count in steps.items() if low <= width <= high) / total
            alpha = 0.14 + 0.2 * shade
            axes.barh(row, part, 0.62, left, color=colours.of(method), alpha=alpha, lw=0)
            if part > 0.06:
                axes.text(
                    left + part / 2,
                    row,
                    name,
                    color=colours.ink,
                    fontsize=9,
                    ha="center",
                    va="center",
                )
            left += part
    axes.set_yticks(range(len(found)), list(reversed(found)))
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f} %")
    axes.set_xlabel("share of all steps, by live threads")
    axes.grid(visible=False)
    return figure


def timelines(report: Report, colours: Palette) -> Figure | None:
    """Draw the threads of one telling answer of each run that writes chunks."""
    samples = [
        (line, record)
        for line in _who_promises(report)
        if (record := telling_sample(line.run.records.values()))
    ]
    if not samples:
        return None
    bars = [timeline(record) for _, record in samples]
    rows = [max(bar.thread for bar in some) + 1 for some in bars]
    figure, panels = new_figure(colours, 0.8 * len(rows) + 0.21 * sum(rows), rows=rows)
    for axes, (line, record), some in zip(panels, samples, bars, strict=True):
        _draw_threads(axes, some, colours.of(line.run.method), colours)
        axes.set_xlim(0, 1.3 * max(bar.end for bar in some))
        said = " ".join(record.instruction.split())
        title = f"{line.run.label}: {said[:48]}{'...' if len(said) > 48 else ''}"
        axes.set_title(title, loc="left", color=colours.ink, fontsize=9.5, parse_math=False)
    panels[-1].set_xlabel("steps at unlimited width")
    return figure


def _who_promises(report: Report) -> list[Line]:
    """Return our first and last run, and the rival whose chunks grow from the main thread, too."""
    ours = [line for line in report.lines if line.run.method == OURS]
    return [
        *ours[:1],
        *ours[1:][-1:],
        *(line for line in report.lines if line.run.method == "apar"),
    ]


def _draw_threads(axes: Axes, bars: Sequence[Bar], colour: str, colours: Palette) -> None:
    for bar in bars:
        shade = colours.ink if bar.thread == 0 else colour
        axes.barh(bar.thread, bar.end - bar.start, 0.62, bar.start, color=shade, alpha=0.75, lw=0)
        if bar.label:
            axes.annotate(
                bar.label,
                (bar.end, bar.thread),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=colours.muted,
                fontsize=8.5,
                parse_math=False,
            )
    axes.set_yticks([0], ["main"])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _without_baseline(report: Report) -> list[Line]:
    return [line for line in report.lines if line.run is not report.baseline]
