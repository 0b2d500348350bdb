"""Draw two recorded answers to one question as a moving SVG, on one clock and at their speeds.

python scripts/draw_race.py OUT.svg STILL.svg [--prompt "..."]
"""

from __future__ import annotations

import argparse
import time
from html import escape
from itertools import groupby
from pathlib import Path

from pasta_decoding import load
from pasta_decoding.answer.events import Delta, Opened
from pasta_decoding.files import write_text
from pasta_decoding.lang.layout import MAIN

Letter = tuple[str, int, float]  # a character, its thread, and the second in which it came
ADAPTERS = "qwen2.5-coder-1.5b-sequential", "qwen2.5-coder-1.5b"
COLUMNS, WIDTH, LINE, TOP, HOLD_S = 60, 7.8, 17, 78, 4
COLOURS = ("#24292f", "#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df", "#cf222e", "#0550ae")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("still", type=Path)
    parser.add_argument("--prompt", default="How can I learn a new language?")
    options = parser.parse_args()
    recorded = {name: record(name, options.prompt) for name in ADAPTERS}
    for moving, path in ((True, options.out), (False, options.still)):
        write_text(path, drawn(options.prompt, recorded, moving=moving))


def record(adapter: str, prompt: str) -> list[Letter]:
    """Return an answer in reading order."""
    written: dict[int, list[Letter | int]] = {MAIN: []}
    with load(adapter) as model:
        model.answer(prompt, max_tokens=8)  # the first answer warms up
        began = time.perf_counter()
        for event in model.events(prompt):
            now = time.perf_counter() - began
            if isinstance(event, Opened):
                written[MAIN].append(event.thread)
                written[event.thread] = []
            elif isinstance(event, Delta):
                written[event.thread] += [(letter, event.thread, now) for letter in event.text]
    chunks = ([one] if isinstance(one, tuple) else written[one] for one in written[MAIN])
    return [letter for chunk in chunks for letter in chunk if isinstance(letter, tuple)]


def drawn(prompt: str, recorded: dict[str, list[Letter]], *, moving: bool) -> str:
    """Return the SVG; each word appears when its last letter was written."""
    seconds = max(letter[2] for answer in recorded.values() for letter in answer) + HOLD_S
    parts, height = [text(20, 28, prompt, MAIN)], 0
    for panel, (name, answer) in enumerate(recorded.items()):
        left, row, column = 20 + panel * 500, 0, 0
        for blank, group in groupby(answer, key=lambda letter: letter[0].isspace()):
            letters = list(group)
            word = "".join(letter[0] for letter in letters)
            if blank:
                row, column = row + word.count("\n"), 0 if "\n" in word else column + len(word)
                continue
            if column + len(word) > COLUMNS:
                row, column = row + 1, 0
            _, thread, at_s = letters[-1]
            place = left + column * WIDTH, TOP + row * LINE
            parts.append(text(*place, word, thread, at_s if moving else None))
            column += len(word)
        last_s = max(letter[2] for letter in answer)
        parts.append(text(left, 52, f"{name}: {last_s:.1f} s", MAIN, last_s if moving else None))
        height = max(height, TOP + row * LINE + 20)
    if moving:
        parts.append(
            f'<rect width="1000" height="4" fill="{COLOURS[1]}"><animate id="clock" '
            f'attributeName="width" from="0" to="1000" dur="{seconds:.1f}s" '
            'begin="0s;clock.end"/></rect>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {height}" '
        'font-family="ui-monospace,monospace" font-size="13">'
        f'<rect width="1000" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def text(x: float, y: float, words: str, thread: int, at_s: float | None = None) -> str:
    """Return one piece of text, which a moving picture shows from a time on."""
    fill = COLOURS[thread and 1 + (thread - 1) % (len(COLOURS) - 1)]
    piece = f'<text x="{x:.0f}" y="{y}" fill="{fill}" textLength="{len(words) * WIDTH:.0f}"'
    if at_s is None:
        return f"{piece}>{escape(words)}</text>"
    begins = f'begin="clock.begin+{at_s:.2f}s" end="clock.end"'
    return (
        f'{piece} opacity="0">{escape(words)}<set attributeName="opacity" to="1" {begins}/></text>'
    )


if __name__ == "__main__":
    main()
