"""Tables of a page: rows of values become HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from pasta_decoding.evaluation.bootstrap import Interval


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell that is already HTML."""

    html: str


Value = str | float | None | Interval | Cell


def table(columns: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    """Return a table; the first value of a row is its name."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr><th>{_cell(row[0])}</th>{''.join(f'<td>{_cell(one)}</td>' for one in row[1:])}</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Value) -> str:
    match value:
        case None:
            return "-"
        case Cell(html):
            return html
        case Interval():
            return interval_html(value, 2)
        case float():
            return f"{value:.2f}"
        case _:
            return escape(str(value))


def interval_html(found: Interval, digits: int) -> str:
    """Return a figure above its interval."""
    if found.value is None or found.low is None or found.high is None:
        return "-"
    value, low, high = (f"{one:.{digits}f}" for one in (found.value, found.low, found.high))
    return f"{value}<small>{low} to {high}</small>"


def percent(value: float | None) -> str | None:
    """Return a share as a percentage."""
    return None if value is None else f"{100 * value:.1f} %"
