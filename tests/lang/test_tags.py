"""The law of parsing: no character is lost.

`SOURCE` is anything: tags, escaped tags, lookalikes, half tags and backslashes, mixed.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pasta_decoding.lang.tags import Sync, TagEvent, Text, escape, parse

# Promise lengths run past their limit.
PIECES = (
    st.sampled_from(["<async>", "</async>", "<sync/>", '<promise topic="a" tokens="20"/>'])
    | st.sampled_from(["<promise ", "<", ">", "<sync", "/>", "\\", "\\\\", "\\\\\\", "<b>"])
    | st.integers(245, 255).map(lambda count: f"<promise {'x' * count}>")
    | st.text('ab <>/"\\\n', max_size=5)
)
SOURCE = st.lists(PIECES).map("".join)


def printed(events: list[TagEvent]) -> str:
    """Return the text form of `events`; each must begin at its `pos`."""
    out = ""
    for event in events:
        assert event.pos == len(out)
        if isinstance(event, Text):
            out += escape(event.text, before_tag=event is not events[-1])
        else:
            out += event.source
    return out


@given(SOURCE | st.text())
@example("\\" * 9 + "<async>")
@example("<promise <promise ><promise " + "<" * 3)
def test_the_events_of_any_text_print_as_that_text(source: str) -> None:
    assert printed(parse(source)) == source


@given(SOURCE | st.text())
def test_any_text_survives_being_escaped(text: str) -> None:
    events: list[TagEvent] = [Text(0, text)] if text else []
    assert parse(escape(text, before_tag=False)) == events
    escaped = escape(text, before_tag=True)
    assert parse(escaped + "<sync/>") == [*events, Sync(len(escaped))]


@pytest.mark.parametrize("piece", ["\\", "<promise xx", "<", "ab <b> "])
def test_work_grows_with_the_text_and_not_with_its_square(piece: str) -> None:
    assert parse(piece * 50_000) == [Text(0, piece * 50_000)]
