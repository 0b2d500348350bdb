"""What a reader sees: the text in reading order, up to the first stop string."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.events import Closed, Delta, Event, Finished, Opened
from pasta_decoding.runtime.stops import StopFilter

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def shown(pieces: list[str], stops: list[str]) -> str:
    visible = StopFilter(stops)
    events: list[Event] = [*(Delta(MAIN, piece) for piece in pieces), Finished(truncated=False)]
    return "".join(visible.feed([event]) for event in events) + visible.finish()


@given(st.lists(LETTERS, max_size=5), STOPS)
@example(["ba", "b"], ["bab", "a"])
def test_however_the_text_is_cut_it_ends_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    text = "".join(pieces)
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert shown(pieces, stops) == text[: min(found, default=(0, len(text)))[1]]


def test_text_that_cannot_become_a_stop_is_shown_at_once() -> None:
    visible = StopFilter(["END"])
    assert visible.feed([Delta(MAIN, "one E")]) == "one "
    assert visible.feed([Delta(MAIN, "two")]) == "Etwo"
    assert not visible.stopped


def test_a_stop_may_begin_in_a_chunk_and_end_behind_it() -> None:
    visible = StopFilter(["ab"])
    assert visible.feed([Opened(1, "x", 20), Delta(MAIN, "b!"), Delta(1, "-")]) == "-"
    assert visible.feed([Delta(1, "a")]) == ""
    assert visible.feed([Closed(1, truncated=False)]) == ""
    assert visible.stopped
    assert visible.finish() == ""
