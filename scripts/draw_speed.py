"""Draw README's picture from the table "All methods, side by side" of docs/results.md.

python scripts/draw_speed.py [RESULTS.md] [OUT.png]

Own speedup against the quality gained over the sequential baseline, a point a run, with 95 %
intervals, and beside each name the share of its answers that ran into the limit.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
HEAD = "| run | own speedup |"
PLACES = {"pasta-fast": (-108, 8), "sot-none": (-104, 6), "apar": (6, -13), "sot": (6, 10)}
"""Where the names of neighbours do not meet, in points from the point."""
Figures = tuple[float, float, float]
"""A value and the ends of its interval."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=DOCS / "results.md")
    parser.add_argument("out", type=Path, nargs="?", default=DOCS / "speed.png")
    options = parser.parse_args()
    rows = rows_of(options.results.read_text(encoding="utf-8"))
    figure = Figure(figsize=(7.2, 3.8), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="0.8", zorder=0)
    axes.axhline(0, color="0.8", zorder=0)
    for name, speed, quality, limit in rows:
        colour = "#c2410c" if name.startswith("pasta") else "0.35"
        low_high = [[one[0] - one[1]] for one in (speed, quality)]
        up = [[one[2] - one[0]] for one in (speed, quality)]
        axes.errorbar(
            speed[0], quality[0], xerr=[low_high[0], up[0]], yerr=[low_high[1], up[1]],
            marker="o", color=colour, elinewidth=0.8,
        )  # fmt: skip
        axes.annotate(
            f"{name} ({limit} cut off)", (speed[0], quality[0]),
            xytext=PLACES.get(name, (6, 6)), textcoords="offset points", color=colour,
            fontsize=8,
        )  # fmt: skip
    axes.set_xlabel("own speedup: tokens a step")
    axes.set_ylabel("quality gained over the baseline")
    axes.margins(0.14, 0.12)
    partial = options.out.with_name(f".{options.out.name}")
    figure.savefig(partial, format="png")
    partial.replace(options.out)


def rows_of(text: str) -> list[tuple[str, Figures, Figures, str]]:
    """Return name, own speedup, quality gained and limit rate of each run in the table."""
    table = text[text.index(HEAD) :].split("\n\n", maxsplit=1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    return [(row[0], figures(row[1]), figures(row[3]), row[5]) for row in cells]


def figures(cell: str) -> Figures:
    """Read `2.23 (2.14 to 2.32)`; a value alone has no width."""
    value, *ends = (float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", cell))
    low, high = ends or (value, value)
    return value, low, high


if __name__ == "__main__":
    main()
