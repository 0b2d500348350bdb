"""The pictures of a report, drawn with matplotlib.

Colours come from a palette: real ones for PNG files; for the page, stand-ins that become CSS
variables, so that one SVG serves light and dark alike.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pasta_decoding.eval.bootstrap import FloatArray, Interval
from pasta_decoding.eval.dominance import OURS
from pasta_decoding.eval.figures import OWN, THEORETICAL, WALL_CLOCK, total_widths
from pasta_decoding.eval.quality import EQUAL, LC_WIN_RATE, LIKELIHOOD, TEXT_QUALITY, WIN_RATE
from pasta_decoding.eval.report import PAPER, Line, Report
from pasta_decoding.eval.timeline import Bar, telling_sample, timeline

SPEED_NAMES = {
    OWN: "own speedup",
    THEORETICAL: "theoretical speedup",
    WALL_CLOCK: "wall-clock speedup",
}
QUALITY_NAMES = {
    LC_WIN_RATE: "length-controlled win rate, %",
    WIN_RATE: "win rate, %",
    TEXT_QUALITY: "text quality gained, nats a token",
    LIKELIHOOD: "likelihood gained, nats a token",
}
_WIDTH_INCHES = 5.4  # narrow enough that its text can be read on a phone
_MARKERS = "osD^vPX*"
_WIDTHS = (("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5-8", 5, 8), ("9 or more", 9, 10**9))
_TICKS = (1, 2, 5, 10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000)
SHOWN_SPEEDUPS = (0.25, 16.0)
"""Speedups of prompts beyond these are drawn at the edge."""


@dataclass(frozen=True, slots=True)
class Palette:
    """A colour for each role; those of the methods are called as the methods are."""

    ink: str
    muted: str
    line: str
    page: str
    sequential: str
    pasta: str
    sot: str
    apar: str

    def of(self, method: str) -> str:
        """Return the colour of a method."""
        return str(getattr(self, method, self.muted))


LIGHT = Palette(
    ink="#1b1e23",
    muted="#667079",
    line="#dfe3e7",
    page="#ffffff",
    sequential="#667079",
    pasta="#1f63c6",
    sot="#c4510c",
    apar="#0b7f5c",
)
DARK = Palette(
    ink="#e7eaee",
    muted="#9aa4ae",
    line="#343a42",
    page="#16191d",
    sequential="#9aa4ae",
    pasta="#6ea8ff",
    sot="#ff9a52",
    apar="#43d6a2",
)
_STAND_INS = Palette(*(f"#0a0b{number:02x}" for number in range(len(fields(Palette)))))

Plot = Callable[[Report, Palette], Figure | None]
"""Draws a picture; None if the runs have nothing to show there."""


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


def as_svg(name: str, plot: Plot, report: Report) -> str | None:
    """Return a picture as an SVG element whose colours are CSS variables."""
    style = {"svg.fonttype": "none", "svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = plot(report, _STAND_INS)
        if figure is None:
            return None
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Ids are the same in every figure; several on one page would borrow each other's.
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    for one in fields(Palette):
        svg = svg.replace(getattr(_STAND_INS, one.name), f"var(--{one.name})")
    return svg


def as_png(plot: Plot, report: Report) -> bytes | None:
    """Return a picture as a PNG file."""
    figure = plot(report, LIGHT)
    if figure is None:
        return None
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=160, facecolor=LIGHT.page)
    return file.getvalue()


def frontier(measure: str) -> Plot:
    """Return the plot of speed against one measure of quality, a point a run."""

    def plot(report: Report, colours: Palette) -> Figure | None:
        lines = [line for line in report.lines if measure in line.qualities]
        figure, [axes] = _figure(colours, 3.9)
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
        text, at, xytext=(7, 6), textcoords="offset points", color=colour, fontsize=9.5, zorder=5
    )


def speedups(report: Report, colours: Palette) -> Figure | None:
    """Draw a row a run: every prompt's own and theoretical speedup, and their middle halves."""
    lines = _without_baseline(report)
    if not lines:
        return None
    names = [OWN, report.speed]
    figure, panels = _figure(colours, 1.3 + 0.45 * len(lines), panels=2, share_y=True)
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
    axes.plot(value_P, row + jitter_P, ".", color=colour, ms=4, alpha=0.45, mew=0)
    low, middle, high = np.percentile(value_P, [25, 50, 75])
    axes.plot([low, high], [row, row], color=colour, lw=5, alpha=0.55, solid_capstyle="round")
    axes.plot([middle], [row], "o", color=colour, ms=6.5)


def lengths(report: Report, colours: Palette) -> Figure | None:
    """Draw the theoretical speedup against the tokens of the baseline's answer."""
    lines = _without_baseline(report)
    if not lines:
        return None
    figure, [axes] = _figure(colours, 3.6)
    bins = list(lines[0].figures.by_length)
    for number, line in enumerate(lines):
        intervals = [line.figures.by_length[name].theoretical for name in bins]
        places = np.arange(len(bins)) + 0.09 * (number - (len(lines) - 1) / 2)
        reach = np.concatenate([_reach(one) for one in intervals], axis=1)
        axes.errorbar(
            places,
            [one.value or np.nan for one in intervals],
            yerr=reach,
            fmt=_MARKERS[number % len(_MARKERS)] + "-",
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
    axes.set_ylabel("theoretical speedup, times")
    _legend(axes, colours)
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
    figure, [axes] = _figure(colours, 1.2 + 0.42 * len(found))
    for row, (method, steps) in enumerate(reversed(found.values())):
        left, total = 0.0, sum(steps.values())
        for shade, (name, low, high) in enumerate(_WIDTHS):
            part = sum(count for width, count in steps.items() if low <= width <= high) / total
            alpha = 0.14 + 0.2 * shade
            axes.barh(row, part, 0.62, left, color=colours.of(method), alpha=alpha, lw=0)
            if part > 0.06:
                axes.text(left + part / 2, row, name, color=colours.ink, fontsize=9, **_CENTRE)
            left += part
    axes.set_yticks(range(len(found)), list(reversed(found)))
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f} %")
    axes.set_xlabel("share of all steps, by live threads")
    axes.grid(visible=False)
    return figure


_CENTRE = {"ha": "center", "va": "center"}


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
    figure, panels = _figure(colours, 0.8 * len(rows) + 0.21 * sum(rows), rows=rows)
    for axes, (line, record), some in zip(panels, samples, bars, strict=True):
        _draw_threads(axes, some, colours.of(line.run.method), colours)
        axes.set_xlim(0, 1.3 * max(bar.end for bar in some))
        said = " ".join(record.instruction.split())
        title = f"{line.run.label}: {said[:48]}{'...' if len(said) > 48 else ''}"
        axes.set_title(title, loc="left", color=colours.ink, fontsize=9.5)
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
            )
    axes.set_yticks([0], ["main"])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def promises(report: Report, colours: Palette) -> Figure | None:
    """Draw what was written against what was promised: medians and middle halves."""
    made = [
        (line, some)
        for line in report.lines
        if (some := [one for record in line.run.records.values() for one in record.promises])
    ]
    if not made:
        return None
    figure, [axes] = _figure(colours, 3.8)
    buckets = sorted({promised for _, some in made for promised, _ in some})
    for number, (line, some) in enumerate(made):
        quartiles = {
            bucket: np.percentile(real, [25, 50, 75])
            for bucket in buckets
            if len(real := [tokens for promised, tokens in some if promised == bucket]) > 2
        }
        places = np.array(list(quartiles)) * 1.035 ** (number - (len(made) - 1) / 2)
        low, middle, high = np.array(list(quartiles.values())).reshape(-1, 3).T
        axes.errorbar(
            places,
            middle,
            yerr=[middle - low, high - middle],
            fmt=_MARKERS[number % len(_MARKERS)],
            ms=5,
            lw=1.4,
            color=colours.of(line.run.method),
            label=line.run.label,
            alpha=0.9,
        )
    edge = [buckets[0], buckets[-1]]
    axes.plot(edge, edge, color=colours.muted, lw=0.9, ls=(0, (4, 3)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(buckets, [str(bucket) for bucket in buckets])
    low, high = axes.get_ylim()
    ticks = [tokens for tokens in _TICKS if low <= tokens <= high]
    axes.set_yticks(ticks, [str(tokens) for tokens in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens promised")
    axes.set_ylabel("tokens written")
    _legend(axes, colours)
    return figure


def _without_baseline(report: Report) -> list[Line]:
    return [line for line in report.lines if line.run is not report.baseline]


def _legend(axes: Axes, colours: Palette) -> None:
    axes.legend(
        frameon=False,
        fontsize=9,
        labelcolor=colours.ink,
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        borderaxespad=0.2,
    )


def _figure(
    colours: Palette,
    height: float,
    *,
    panels: int = 1,
    share_y: bool = False,
    rows: Sequence[int] = (),
) -> tuple[Figure, list[Axes]]:
    """Return a figure as wide as the page: some panels side by side, or rows of these heights."""
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    if rows:
        grid = figure.subplots(len(rows), 1, squeeze=False, height_ratios=list(rows))
    else:
        grid = figure.subplots(1, panels, squeeze=False, sharey=share_y)
    for axes in grid.flat:
        axes.set_facecolor("none")
        axes.grid(color=colours.line, lw=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=colours.muted, labelcolor=colours.ink, labelsize=9.5, length=0)
        axes.xaxis.label.set_color(colours.ink)
        axes.yaxis.label.set_color(colours.ink)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure, list(grid.flat)
