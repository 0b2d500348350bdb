"""Draw what `pasta run --show` shows of an answer, half-way and at its end, as an SVG.

python scripts/draw_lanes.py OUT.svg [--adapter balanced] [--prompt "..."] [--half-way 0.6]
"""

from __future__ import annotations

import argparse
import io
import os
from pathlib import Path

from rich.console import Console

from pasta_decoding import load
from pasta_decoding.cli.console import Lanes

PROMPT = "How do I start a small vegetable garden?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--adapter", default="balanced")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--half-way", type=float, default=0.6, help="which share of the events")
    parser.add_argument("--columns", type=int, default=118)
    options = parser.parse_args()
    with load(options.adapter, threads=options.threads) as model:
        stream = model.events(options.prompt)
        events = list(stream)
        result = stream.result
    console = Console(
        record=True, width=options.columns, height=40, file=io.StringIO(), force_terminal=True
    )
    console.print(f'[bold]$ pasta run --adapter {options.adapter} --show "{options.prompt}"[/]')
    console.print()
    lanes = Lanes()
    for number, event in enumerate(events):
        if number == int(options.half_way * len(events)):
            console.print(lanes)
            console.print("[dim]...[/]")
        lanes.feed(event)
    console.print(lanes)
    console.print()
    console.print(
        f"{result.usage.plain_tokens} tokens in {result.critical_path} steps "
        f"({result.tokens_per_step:.2f}x), {1 + len(result.threads)} threads",
        highlight=False,
    )
    partial = options.out.with_name(options.out.name + ".partial")
    partial.write_text(console.export_svg(title="pasta run --show"), encoding="utf-8")
    os.replace(partial, options.out)
    print(result.text)


if __name__ == "__main__":
    main()
