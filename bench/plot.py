"""Draw what the benchmarks found, from bench/results into docs/: the latest line of each kind.

python bench/plot.py [RESULTS [DOCS]]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import RESULTS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

DOCS = Path(__file__).parents[1] / "docs"

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("docs", type=Path, nargs="?", default=DOCS)
    options = parser.parse_args()
    for draw, source in DRAWN.items():
        path = options.results / f"{source}.jsonl"
        if path.exists():
            save(draw, path, options.docs / f"{draw.__name__}.png")


def save(draw: Callable[[Axes, list[Line]], None], source: Path, target: Path) -> None:
    """Draw one figure; the file is written whole or not at all."""
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["machine"] == lines[-1]["machine"]]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, lines)
    axes.grid(alpha=0.3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    axes.legend(fontsize="small")
    axes.set_title(f"{lines[-1]['machine']}, {lines[-1]['date']}", fontsize="small")
    partial = target.with_name(f".{target.name}")
    figure.savefig(partial, format="png", dpi=150)
    partial.replace(target)
    print(target)


def throughput(axes: Axes, lines: list[Line]) -> None:
    """Tokens a second against requests at once."""
    for engine in names(lines, "engine"):
        for mode, style in (("sequential", "--"), ("parallel", "-")):
            requests, values = series(
                lines,
                "requests",
                lambda line: line["plain_tokens_per_s"],
                engine=engine,
                mode=mode,
            )
            axes.plot(requests, values, style, marker="o", label=f"{engine}, {mode}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("plain tokens a second")
    axes.set_ylim(bottom=0)


def join(axes: Axes, lines: list[Line]) -> None:
    """Milliseconds of a join against the tokens that it joins."""
    for engine in names(lines, "engine"):
        tokens, values = series(
            lines, "joined_tokens", lambda line: line["seconds"]["median"] * 1e3, engine=engine
        )
        axes.plot(tokens, values, marker="o", label=engine)
    axes.set_xlabel("joined tokens")
    axes.set_ylabel("milliseconds of a join")
    axes.set_ylim(bottom=0)


def serve_load(axes: Axes, lines: list[Line]) -> None:
    """Tokens a second of a server against its clients."""
    _by_clients(axes, lines, lambda line: line["plain_tokens_per_s"]["median"])
    axes.set_ylabel("plain tokens a second")
    axes.set_ylim(bottom=0)


def serve_latency(axes: Axes, lines: list[Line]) -> None:
    """Seconds that half of a server's answers take, against its clients."""
    answered = [line for line in lines if line["latency_s"] is not None]
    _by_clients(axes, answered, lambda line: line["latency_s"]["p50"])
    axes.set_ylabel("seconds an answer, median")
    axes.set_yscale("log", base=2)


def _by_clients(axes: Axes, lines: list[Line], value: Callable[[Line], float]) -> None:
    closed = [line for line in lines if "clients" in line]
    for server in names(closed, "server"):
        for mode, style in (("sequential", "--"), ("ban", ":"), ("eager", "-."), ("governor", "-")):
            clients, values = series(closed, "clients", value, server=server, mode=mode)
            if clients:
                axes.plot(clients, values, style, marker="o", label=f"{server}, {mode}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("clients")


DRAWN: dict[Callable[[Axes, list[Line]], None], str] = {
    throughput: "throughput",
    join: "join",
    serve_load: "serve_load",
    serve_latency: "serve_load",
}
"""What is drawn, and the benchmark whose lines it is drawn from."""


def names(lines: Iterable[Line], key: str) -> list[str]:
    """Return the different values of a key, sorted."""
    return sorted({line[key] for line in lines})


def series(
    lines: Iterable[Line], over: str, value: Callable[[Line], float], **fixed: object
) -> tuple[list[int], list[float]]:
    """Return `over` and `value` of the lines with these fields, the latest of each, sorted."""
    found = {
        line[over]: value(line)
        for line in lines
        if all(line[key] == wanted for key, wanted in fixed.items())
    }
    pairs = sorted(found.items())
    return [x for x, _ in pairs], [y for _, y in pairs]


if __name__ == "__main__":
    main()
