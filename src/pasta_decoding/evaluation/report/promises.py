"""The picture of promises: what was written against what was promised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pasta_decoding.evaluation.bootstrap import FloatArray
from pasta_decoding.evaluation.report.build import Line, Report
from pasta_decoding.evaluation.report.drawing import MARKERS, Palette, legend, new_figure

LEAST = 5
"""Chunks that a length needs; a median of fewer says nothing."""
_TICKS = (1, 2, 5, 10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000)


def kept(line: Line) -> dict[int, list[int]]:
    """Return lengths promised -> lengths written, of the chunks that ended by themselves."""
    found: dict[int, list[int]] = {}
    for record in line.run.records.values():
        for promised, written in record.promises:
            found.setdefault(promised, []).append(written)
    return dict(sorted(found.items()))


def too_few(report: Report) -> str | None:
    """Say, of the runs that promise, what is too little to be drawn; None if nothing is."""
    said = []
    for line in report.lines:
        lengths = kept(line)
        drawn = sum(len(some) for some in lengths.values() if len(some) >= LEAST)
        chunks = sum(map(len, lengths.values()))
        if drawn < chunks:
            said.append(f"{line.run.label} {chunks - drawn} of {chunks}")
    if not said:
        return None
    return f"Too few chunks to say, fewer than {LEAST} of a length: {'; '.join(said)}."


def promises(report: Report, colours: Palette) -> Figure | None:
    """Draw medians and middle halves of each promised length; None where all have too few."""
    made = [(line, quartiles) for line in report.lines if (quartiles := _quartiles(line))]
    if not made:
        return None
    figure, [axes] = new_figure(colours, 3.8)
    for number, (line, quartiles) in enumerate(made):
        places = np.array(list(quartiles)) * 1.035 ** (number - (len(made) - 1) / 2)
        low, middle, high = np.array(list(quartiles.values())).reshape(-1, 3).T
        axes.errorbar(
            places,
            middle,
            yerr=[middle - low, high - middle],
            fmt=MARKERS[number % len(MARKERS)],
            ms=5,
            lw=1.4,
            color=colours.of(line.run.method),
            label=f"{line.run.label}, {sum(map(len, kept(line).values()))} chunks",
            alpha=0.9,
        )
    _draw_scales(axes, sorted({bucket for _, some in made for bucket in some}), colours)
    legend(axes, colours)
    return figure


def _quartiles(line: Line) -> dict[int, FloatArray]:
    return {
        bucket: np.percentile(some, [25, 50, 75])
        for bucket, some in kept(line).items()
        if len(some) >= LEAST
    }


def _draw_scales(axes: Axes, buckets: Sequence[int], colours: Palette) -> None:
    edge = [buckets[0], buckets[-1]]
    axes.plot(edge, edge, color=colours.muted, lw=0.9, ls=(0, (4, 3)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(buckets, [str(bucket) for bucket in buckets])
    least, most = axes.get_ylim()
    ticks = [tokens for tokens in _TICKS if least <= tokens <= most]
    axes.set_yticks(ticks, [str(tokens) for tokens in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens promised")
    axes.set_ylabel("tokens written")
