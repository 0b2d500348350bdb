"""From ids to text: whole characters only, no white space at a chunk's edge, stream equals tree."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pasta_decoding.answer.events import Delta, Event, Finished
from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.answer.text import AnswerText, ThreadText, stretch_text
from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.scheduling.scheduler import Scheduler
from tests.answer import play
from tests.examples import few
from tests.law.world import ASYNC, CLOSE, CONTROL, END, OPEN, P20, SCHEME, SYNC
from tests.scheduling.machine import LINES, greedy, machine, ordered
from tests.scripted import Script, ScriptedEngine, follow, shuffled

BROKEN = "\N{REPLACEMENT CHARACTER}"
TEXT = st.text("ab \n\té東😀", max_size=12)
# One token a byte, so that most characters are cut over tokens: a byte's id is the byte plus this.
FIRST_BYTE = 10
SIZE = FIRST_BYTE + 256


def decode(ids: Sequence[int]) -> str:
    encoded = bytes(token - FIRST_BYTE for token in ids if token >= FIRST_BYTE)
    return encoded.decode("utf-8", errors="replace")


def ids(text: str) -> list[int]:
    return [byte + FIRST_BYTE for byte in text.encode()]


TEXTS = tuple(decode([token]) for token in range(SIZE))
VOCABULARY = Vocabulary(TEXTS, decode, CONTROL, frozenset({END}), END)


def pieces(thread: ThreadText, tokens: Sequence[int]) -> list[str]:
    return [*(thread.add(token) for token in tokens), thread.end()]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (ids("é"), ["", "é", ""]),
        (ids("東"), ["", "", "東", ""]),
        (ids("😀"), ["", "", "", "😀", ""]),
        (ids("a😀")[:-1], ["a", "", "", "", BROKEN]),
        ([0x80 + FIRST_BYTE] * 8, [*[""] * 7, BROKEN * 8, ""]),
    ],
)
def test_a_cut_character_waits_for_its_last_token_but_not_for_ever(
    tokens: list[int], expected: list[str]
) -> None:
    assert pieces(ThreadText(decode), tokens) == expected


@given(TEXT.map(ids) | st.lists(st.integers(FIRST_BYTE, FIRST_BYTE + 255), max_size=12))
def test_any_bytes_are_streamed_as_they_are_stored(tokens: list[int]) -> None:
    assert "".join(pieces(ThreadText(decode), tokens)) == stretch_text(tokens, decode)
    prefixes = list(accumulate(pieces(ThreadText(decode, strip_end=True), tokens)))
    assert all(text == text.rstrip() for text in prefixes), "no white space is taken back"
    assert prefixes[-1] == stretch_text(tokens, decode).rstrip()


def test_a_topic_never_ends_within_a_character() -> None:
    rules = Rules(max_topic_tokens=3)
    interpreter = Interpreter(VOCABULARY, SCHEME, rules, 1, 1000)
    first, second = ids("é")
    for token in (OPEN, *ids("a"), first):
        interpreter.on_token(MAIN, token)
    banned = set(interpreter.constraint(MAIN).banned.tolist())
    # The topic may only close after a complete character, and no other character may begin here.
    assert {P20, first, second} <= banned
    assert not banned.issuperset(ids("b"))


# The stream of a whole answer


def decoded(script: Script, sampling: SamplingParams, *, steps: int = 40) -> Answer:
    """Answer for some steps, then cancel."""
    scheduler = Scheduler(ScriptedEngine(script, SIZE), VOCABULARY, SCHEME)
    rules = Rules(max_tokens=60, max_topic_tokens=3)
    generation = scheduler.add(Request((*ids("?"),), Sampler(sampling), rules))
    for _ in range(steps):
        scheduler.step()
    scheduler.close()
    answer = generation.result()
    assert answer is not None
    return answer


@few(30)
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_what_was_streamed_is_the_text_wherever_it_is_cut(seed: int, steps: int) -> None:
    plain = shuffled(SIZE, seed)
    leaning_V = np.zeros(SIZE, dtype=np.float32)
    leaning_V[[OPEN, CLOSE, SYNC, P20]] = 3
    sampling = SamplingParams(temperature=1, seed=seed)
    answer = decoded(lambda seen: plain(seen) + leaning_V, sampling, steps=steps)
    assert ordered(answer.events) == answer.text


@pytest.mark.parametrize("tag", [(SYNC,), (OPEN, *ids("u"), P20), (OPEN, *ids("v"), P20, SYNC)])
def test_a_tag_within_a_character_breaks_it_in_stream_and_tree(tag: tuple[int, ...]) -> None:
    first, second = ids("é")
    main = [*ids("?"), OPEN, *ids("t"), P20, *ids("a"), first, *tag, second, END]
    script = follow(main, (P20, ASYNC, *ids("b"), CLOSE), vocabulary_size=SIZE)
    answer = decoded(script, SamplingParams())
    assert answer.text.replace("b", "") == f"a{BROKEN}{BROKEN}"
    assert ordered(answer.events) == answer.text


# Stop strings

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.lists(LETTERS, max_size=5), STOPS)
@example(["ba", "b"], ["bab", "a"])
def test_however_the_text_is_cut_it_ends_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    text = "".join(pieces)
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    _, first_stop = min(matches, default=(0, len(text)))
    answer_text = AnswerText(stops)
    events: list[Event] = [*(Delta(MAIN, piece) for piece in pieces), Finished(truncated=False)]
    assert "".join(map(answer_text.feed, events)) == text[:first_stop]
    assert answer_text.stopped is bool(matches)


def test_text_that_cannot_become_a_stop_is_shown_at_once() -> None:
    visible = AnswerText(["END"])
    assert visible.feed(Delta(MAIN, "one E")) == "one "
    assert visible.feed(Delta(MAIN, "two")) == "Etwo"
    assert not visible.stopped


@pytest.mark.parametrize(
    ("stop", "text", "stopped"),
    [("a a", "c", True), ("ac", "ca ", True), ("cb", "ca ac", False), ("c", "", True)],
)
def test_a_stop_ends_the_text_of_an_answer_wherever_it_stands(
    stop: str, text: str, stopped: bool
) -> None:
    """The answer is `ca ac`, of which the first two letters are a chunk."""
    _, scheduler = machine(follow(*LINES, vocabulary_size=play.SIZE))
    generation = scheduler.add(greedy(stop=(stop,)))
    streamed = ""
    while (answer := generation.result()) is None:
        scheduler.step()
        if progress := generation.drain():
            streamed += progress.text
            assert text.startswith(streamed)
    assert streamed == text
    assert answer.stopped == stopped
