"""What a reader sees: the text in reading order, up to the first stop string."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pasta_decoding.engines.scripted import follow
from pasta_decoding.runtime.events import StopFilter
from tests.runtime.machine import LINES, greedy, machine
from tests.runtime.play import SIZE

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.lists(LETTERS, max_size=5), STOPS)
@example(["ba", "b"], ["bab", "a"])
def test_however_the_text_is_cut_it_ends_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    text, visible = "".join(pieces), StopFilter(stops)
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    shown = "".join(map(visible.add, pieces)) + visible.finish()
    assert shown == text[: min(found, default=(0, len(text)))[1]]
    assert visible.stopped is bool(found)


def test_text_that_cannot_become_a_stop_is_shown_at_once() -> None:
    visible = StopFilter(["END"])
    assert visible.add("one E") == "one "
    assert visible.add("two") == "Etwo"
    assert not visible.stopped


@pytest.mark.parametrize(
    ("stop", "text", "stopped"),
    [("a a", "c", True), ("ac", "ca ", True), ("cb", "ca ac", False), ("c", "", True)],
)
def test_a_stop_ends_the_text_of_an_answer_wherever_it_stands(
    stop: str, text: str, stopped: bool
) -> None:
    """The answer is `ca ac`, of which the first two letters are a chunk."""
    _, scheduler = machine(follow(*LINES, vocabulary_size=SIZE))
    number, shown = scheduler.add(replace(greedy(), stops=(stop,))), ""
    while (answer := scheduler.result(number)) is None:
        scheduler.step()
        if progress := scheduler.drain(number):
            shown += progress.text
            assert text.startswith(shown)
    assert (shown, answer.stopped) == (text, stopped)
