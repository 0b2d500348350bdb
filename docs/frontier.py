"""Draw the first table of docs/results.md with a picture: python docs/frontier.py."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (.+?) \| ([\d.]+)(?: \((.*?)\))? \| (\d+)(?: \((.*?)\))? \|$", re.M)


def around(middle: str, interval: str) -> list[list[float]] | None:
    """Return how far an interval such as `1.1 to 1.4` reaches below and above its middle."""
    ends = [float(end) for end in interval.split(" to ")] if interval else []
    return [[float(middle) - ends[0]], [ends[1] - float(middle)]] if ends else None


def main() -> None:
    """Write frontier.svg, with intervals as lines."""
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "pasta", "font.size": 9}
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.axhline(50, color="#999", linewidth=0.8)
    table = (HERE / "results.md").read_text().split("\n## ")[1]
    for name, speed, speed_ends, share, share_ends in ROW.findall(table):
        color = "#999" if name.startswith("paper") else "#0969da"
        x_ends, y_ends = around(speed, speed_ends), around(share, share_ends)
        axes.errorbar(
            float(speed),
            float(share),
            y_ends,
            x_ends,
            "o",
            color=color,
            ecolor=color,
            linewidth=0.6,
        )
        # To the left where names would meet.
        side = -1 if name.endswith(("good", "8")) else 1
        place = {"xytext": (6 * side, 6), "textcoords": "offset points"}
        aligned = "right" if side < 0 else "left"
        axes.annotate(name.replace("`", ""), (float(speed), float(share)), ha=aligned, **place)
    axes.set(xlabel="speedup over the baseline", xlim=(0.95, 2.5), ylim=(10, 70))
    axes.set_ylabel("preferred to the baseline, %")
    figure.savefig(HERE / "frontier.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
