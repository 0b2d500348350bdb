"""docs/language.md states what the code does: its rules, its escapes and its worked example."""

from pathlib import Path

import pytest

from pasta_decoding.lang.check import RULES, WARNINGS
from pasta_decoding.lang.layout import (
    ChunkRun,
    Layout,
    MainRun,
    PromiseRun,
    Segment,
    SyncRun,
    lay_out,
    sees,
)
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tags import Sync, Text, parse

PAGE = (Path(__file__).parents[2] / "docs" / "language.md").read_text(encoding="utf-8")

OPEN = "PROMISE_OPEN"
CLOSE = "PROMISE_CLOSE"
ASYNC = "ASYNC_OPEN"
TOKENS = (
    *("Hi", OPEN, "diet", CLOSE, ASYNC, "Eat", "oats."),
    *("(line break)", OPEN, "sleep", CLOSE, ASYNC, "Rest."),
    *("SYNC", "So:", OPEN, "plan", CLOSE, ASYNC, "Go."),
)


@pytest.mark.parametrize("rule", [*RULES, *WARNINGS])
def test_every_rule_is_explained(rule: str) -> None:
    assert f"| `{rule}`" in PAGE


@pytest.mark.parametrize("count", range(4))
def test_the_escapes_read_as_the_page_says(count: int) -> None:
    source = "a" + "\\" * count + "<sync/>"
    text, *tags = parse(source)
    assert isinstance(text, Text)
    meaning = f"`{text.text}`"
    if tags == [Sync(1 + count)]:
        meaning += ", a sync"
    rows = PAGE.replace("the text `", "`")
    assert f"| `{source}` | {meaning} |" in rows


def test_the_worked_example_is_what_the_layout_computes() -> None:
    assert drawing(worked_example()) in PAGE
    assert f"take {worked_example().critical_path} steps" in PAGE


def worked_example() -> Layout:
    """Return the layout of the example. A token's id is its index in reading order."""
    ids = tuple(range(len(TOKENS)))
    segments: list[Segment] = [
        PromiseRun(ids[1:4], 20),
        ChunkRun(ids[4:7]),
        MainRun(ids[7:8]),
        PromiseRun(ids[8:11], 20),
        ChunkRun(ids[11:13]),
        SyncRun(ids[13]),
        MainRun(ids[14:15]),
        PromiseRun(ids[15:18], 20),
        ChunkRun(ids[18:]),
    ]
    scheme = scheme_named("shared-max")
    return lay_out(ids[:1], segments, scheme, async_close=100, end=101)


def drawing(layout: Layout) -> str:
    """Draw the integers and the mask the way the page does."""
    columns = zip(
        layout.thread,
        layout.position,
        layout.visible_until,
        layout.visible_from,
        layout.step,
        strict=True,
    )
    lines = []
    for token, (thread, position, until, since, step) in enumerate(columns):
        seen = "".join(".x"[sees(layout, token, key)] for key in range(len(TOKENS)))
        lines.append(
            f"{token:3}  {TOKENS[token]:14} {thread:6} {position:8} {until:13} {since:12} {step:4}"
            f"  {seen}"
        )
    return "\n".join(lines)
