"""The parser's laws: how the text was cut never matters, and no character is lost.

`SOURCE` is anything: tags, escaped tags, lookalikes, half tags and backslashes, mixed.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pasta_decoding.lang.parser import Parser, merged, parse
from pasta_decoding.lang.tags import AsyncOpen, Event, Promise, Sync, Text, escape

# Promise lengths run past the limit on held text, where cutting could start to matter.
PIECES = (
    st.sampled_from(["<async>", "</async>", "<sync/>", '<promise topic="a" tokens="20"/>'])
    | st.sampled_from(["<promise ", "<", ">", "<sync", "/>", "\\", "\\\\", "\\\\\\", "<b>"])
    | st.integers(245, 255).map(lambda count: f"<promise {'x' * count}>")
    | st.text('ab <>/"\\\n', max_size=5)
)
SOURCE = st.lists(PIECES).map("".join)


def in_pieces(pieces: list[str]) -> list[Event]:
    parser = Parser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return [*events, *parser.finish()]


def printed(events: list[Event]) -> str:
    """Print `events` and assert on the way that each stands where its `pos` says."""
    out = ""
    for place, event in enumerate(events, start=1):
        assert event.pos == len(out)
        if isinstance(event, Text):
            out += escape(event.text, before_tag=place < len(events))
        else:
            out += event.source
    return out


@given(SOURCE, st.data())
def test_a_cut_at_any_place_gives_the_same_events(source: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(source)))
    assert merged(in_pieces([source[:cut], "", source[cut:]])) == parse(source)


@given(SOURCE | st.text())
@example("\\" * 9 + "<async>")
@example("<promise <promise ><promise " + "<" * 3)
def test_the_events_of_any_text_print_as_that_text(source: str) -> None:
    assert printed(parse(source)) == source


@given(SOURCE | st.text())
def test_any_text_survives_being_escaped(text: str) -> None:
    events: list[Event] = [Text(0, text)] if text else []
    assert parse(escape(text, before_tag=False)) == events
    shown = escape(text, before_tag=True)
    assert parse(shown + "<sync/>") == [*events, Sync(len(shown))]


@given(st.lists(PIECES.map(lambda piece: piece.replace("\\", ""))).map("".join))
def test_at_most_259_characters_are_held_back(source: str) -> None:
    parser = Parser()
    released = 0
    for seen, char in enumerate(source, start=1):
        for event in parser.feed(char):
            released += len(event.text if isinstance(event, Text) else event.source)
        assert seen - released <= 259


def test_text_that_only_looks_like_a_tag_is_released_as_soon_as_that_is_certain() -> None:
    parser = Parser()
    assert parser.feed("2 <s") == [Text(0, "2 ")]
    assert parser.feed("even") == [Text(2, "<seven")]
    assert parser.feed(" \\") == [Text(8, " ")]
    assert parser.feed("x") == [Text(9, "\\x")]


def test_a_tag_is_released_with_its_last_character() -> None:
    parser = Parser()
    assert parser.feed("<sync/") == []
    assert parser.feed(">") == [Sync(0)]
    assert parser.feed('<promise topic="a" tokens="20"/') == []
    tag = '<promise topic="a" tokens="20"/>'
    assert parser.feed("><async>") == [Promise(7, "a", 20, tag), AsyncOpen(39)]


@pytest.mark.parametrize("piece", ["\\", "<promise xx", "<", "ab <b> "])
def test_work_grows_with_the_text_and_not_with_its_square(piece: str) -> None:
    [text] = merged(in_pieces([piece] * 50_000))
    assert text == Text(0, piece * 50_000)
