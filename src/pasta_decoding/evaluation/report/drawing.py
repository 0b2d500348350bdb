"""How pictures are drawn and written, with matplotlib.

Colours come from a palette: real ones for PNG files; for the page, stand-ins that become CSS
variables, so that one SVG serves light and dark alike.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pasta_decoding.evaluation.report.build import Report

MARKERS = "osD^vPX*"
_WIDTH_INCHES = 5.4  # narrow enough that its text can be read on a phone


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


def as_svg(name: str, plot: Plot, report: Report) -> str | None:
    """Return a picture as an SVG element whose colours are CSS variables."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
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


def legend(axes: Axes, colours: Palette) -> None:
    """Write the names of the runs above the plot."""
    axes.legend(
        frameon=False,
        fontsize=9,
        labelcolor=colours.ink,
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        borderaxespad=0.2,
    )


def new_figure(
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
