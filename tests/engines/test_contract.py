"""The engine contract. Every engine that passes this file is a supported engine.

The law: whatever is forked, fed, joined and closed, each row of logits is the one computed without
a cache from the tokens that the branch must see. The named cases below are special cases of it.
"""

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from hypothesis import example, given
from hypothesis import strategies as st

from pasta_decoding.engines.base import Branch, Feed
from pasta_decoding.engines.kv_cache import CachedEngine
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.engines.weights import ModelWeights
from pasta_decoding.errors import PastaError
from tests.engines.oracle import TOLERANCE, Recorder, assert_equals_recompute, dense
from tests.engines.subjects import MARKS, SUBJECTS, Subject, fast
from tests.examples import few
from tests.tiny import VOCABULARY, tiny_llama

PROMPT = (5, 17, 42, 8)
# Stand-ins for control tokens: to an engine they are ids like any other.
PROMISE_CLOSE = 90
ASYNC_OPEN = 91
SYNC = 92


def subjects(*names: str) -> list[ParameterSet]:
    return [pytest.param(name, marks=MARKS.get(name, ())) for name in names]


@pytest.fixture(params=subjects(*SUBJECTS))
def subject(request: pytest.FixtureRequest) -> Subject:
    return SUBJECTS[request.param]()


def feed(branch: Branch, *ids: int, at: int) -> Feed:
    return Feed((branch,), ids, tuple(range(at, at + len(ids))))


# --- logits equal recompute ---------------------------------------------------------------------


def joined(record: Recorder, *, backwards: bool = False) -> Branch:
    """Return main, after two children wrote and were joined, and SYNC was fed behind them."""
    main = record.open(PROMPT)
    children = [record.fork(main), record.fork(main)]
    record.step(
        feed(main, 10, at=4), feed(children[0], 20, 30, at=4), feed(children[1], 21, 30, at=4)
    )
    record.step(feed(main, 11, at=5), feed(children[1], 31, at=6))
    record.join(main, children[::-1] if backwards else children)
    record.step(feed(main, SYNC, at=7))
    return main


def forked_greedy_decode(record: Recorder) -> None:
    main = record.open(PROMPT)
    threads = [main, record.fork(main), record.fork(main)]
    logits = record.step(*(feed(thread, 20 + i, at=4) for i, thread in enumerate(threads)))
    for position in range(5, 12):
        logits = record.greedy(*threads, positions=[position] * 3, logits_FV=logits)


def a_parent_before_the_join(record: Recorder) -> None:
    main = record.open(PROMPT)
    child = record.fork(main)
    record.step(feed(child, 30, 31, at=4))
    record.step(feed(main, 32, at=4))


def after_a_join(record: Recorder) -> None:
    main = joined(record)
    child = record.fork(main)
    record.step(feed(child, 40, at=8), feed(main, 13, at=8))


def a_fork_before_a_shared_feed_in_one_step(record: Recorder) -> None:
    main = record.open(PROMPT)
    child = record.fork(main)
    record.step(Feed((main, child), (PROMISE_CLOSE,), (4,)), feed(child, ASYNC_OPEN, at=5))
    assert record.engine.slots_in_use == len(PROMPT) + 2
    record.step(feed(main, 10, at=5), feed(child, 20, at=6))


def several_ids_in_one_feed(record: Recorder) -> None:
    main = record.open((5, 17))
    record.step(Feed((main,), (42, 8, 9), (2, 3, 4), wants_logits=False))
    child = record.fork(main)
    record.step(feed(child, 20, 21, 22, at=5), feed(main, 10, 11, at=5))
    record.step(feed(main, 12, at=7), feed(main, 13, at=8), feed(child, 23, 24, at=8))


def requests_share_nothing(record: Recorder) -> None:
    first = record.open(PROMPT)
    second = record.open((1, 2))
    child = record.fork(first)
    record.step(feed(second, 50, at=2), feed(first, 10, at=4), feed(second, 51, at=3))
    record.step(feed(child, 20, at=4), feed(second, 52, at=4))
    record.close(first, child)
    record.step(feed(second, 53, at=5))


def a_branch_keeps_what_it_sees_when_its_parent_closes(record: Recorder) -> None:
    main = record.open(PROMPT)
    child = record.fork(main)
    cancelled = record.fork(main)
    record.step(feed(child, 20, at=4), feed(cancelled, 30, at=4))
    record.close(main, cancelled)
    record.step(feed(child, 21, at=5))


LONG = tuple(range(20, 40))
"""Longer than the window of those that have one."""


def copies(record: Recorder) -> None:
    """While the request that they were copied from goes on, and after its end; a copy of a copy."""
    first = record.open(LONG)
    record.step(feed(first, 10, at=20))
    second = record.open_like(first, 21)
    record.step(feed(second, 50, at=21), feed(first, 11, at=21))
    third = record.open_like(second, 13)
    record.close(first)
    record.step(feed(third, 60, 61, at=13), feed(second, 51, at=22))
    child = record.fork(third)
    record.step(feed(child, 62, at=15), feed(third, 63, at=15))


def copies_of_a_shrunk_request(record: Recorder) -> None:
    """It had forked, joined and gone on; another then takes the slots that it gave back."""
    main = record.open(LONG)
    child = record.fork(main)
    cancelled = record.fork(main)
    record.step(feed(main, 10, at=20), feed(child, 30, 31, at=20), feed(cancelled, 40, at=20))
    record.join(main, [child])
    record.step(feed(main, SYNC, at=22))
    record.close(cancelled)
    record.shrink(main, 18)
    other = record.open((7, 8, 9))
    long_copy = record.open_like(main, 18)
    short_copy = record.open_like(main, 5)
    record.step(feed(long_copy, 50, 51, at=18), feed(short_copy, 50, 51, at=5))
    record.close(main)
    record.step(feed(long_copy, 52, at=20), feed(other, 1, at=3))


def rows_in_the_order_of_the_feeds_that_want_them(record: Recorder) -> None:
    main = record.open(PROMPT)
    other = record.open((1, 2))
    child = record.fork(main)
    logits_FV = record.step(
        feed(child, 20, at=4),
        feed(other, 50, 51, at=2),
        Feed((main,), (10,), (4,), wants_logits=False),
        feed(main, 11, at=5),
    )
    assert logits_FV.shape == (3, record.engine.vocabulary_size)
    assert logits_FV.dtype == np.float32
    assert record.step(Feed((main,), (10,), (6,), wants_logits=False)).shape == (0, VOCABULARY)
    assert record.step().shape == (0, VOCABULARY)
    record.step(feed(main, 12, at=7))


CASES = (
    forked_greedy_decode,
    a_parent_before_the_join,
    after_a_join,
    a_fork_before_a_shared_feed_in_one_step,
    several_ids_in_one_feed,
    requests_share_nothing,
    a_branch_keeps_what_it_sees_when_its_parent_closes,
    copies,
    copies_of_a_shrunk_request,
    rows_in_the_order_of_the_feeds_that_want_them,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_row_equals_recompute(subject: Subject, case: Callable[[Recorder], object]) -> None:
    record = subject.record()
    case(record)
    assert_equals_recompute(record, subject.oracle)


@pytest.mark.parametrize("name", ["torch", "fast"])
def test_a_bfloat16_model_is_near_the_exact_one(name: str) -> None:
    model = tiny_llama().bfloat16()
    engine = TorchEngine(model) if name == "torch" else fast(ModelWeights(model))
    assert engine.name == f"{name} bfloat16"
    record = Recorder(engine)
    after_a_join(record)
    tokens, rows = zip(*record.rows, strict=True)
    exact_FV = dense(tiny_llama())(record)[list(tokens)]
    assert np.abs(np.stack(rows) - exact_FV).mean() < 0.05 * exact_FV.std()


def test_the_order_of_a_join_does_not_matter(subject: Subject) -> None:
    forwards = subject.record()
    backwards = subject.record()
    joined(forwards)
    joined(backwards, backwards=True)
    _, forwards_V = forwards.rows[-1]
    _, backwards_V = backwards.rows[-1]
    np.testing.assert_allclose(forwards_V, backwards_V, rtol=0, atol=TOLERANCE)


def test_copies_count_as_fed_and_a_shrunk_request_holds_no_more_than_it_says(
    subject: Subject,
) -> None:
    engine = subject.engine
    record = subject.record()
    main = record.open(LONG, room=200)
    copy = record.open_like(main, 15, room=5)
    assert engine.slots_in_use == 20 + 15
    refused(lambda: engine.step([feed(copy, *[1] * 6, at=15)]))
    record.close(copy)
    record.shrink(main, 12)
    assert engine.slots_in_use == 12
    refused(lambda: engine.step([feed(main, 1, at=12)]))
    if engine.max_slots is not None:
        engine.close(engine.open(reserved_tokens=engine.max_slots - 12))
    record.close(main)
    assert engine.slots_in_use == 0


def test_only_what_was_fed_before_the_first_fork_is_copied_and_kept(subject: Subject) -> None:
    engine = subject.engine
    record = subject.record()
    main = record.open(PROMPT)
    child = record.fork(main)
    record.step(feed(main, 10, at=4))
    empty = engine.open(reserved_tokens=9)
    with pytest.raises(AssertionError, match="before the first fork"):
        engine.copy(main, empty, 5)
    with pytest.raises(AssertionError, match="where nothing was fed"):
        engine.copy(main, record.open((1,)), 4)
    with pytest.raises(AssertionError, match="others see the slots"):
        engine.shrink(main, 4)
    engine.close(child)
    with pytest.raises(AssertionError, match="before the first fork"):
        engine.shrink(main, 5)


ACTION = st.tuples(st.integers(0, 7), st.integers(0, VOCABULARY - 1), st.integers(0, 3))


@given(program=st.lists(ACTION, max_size=16))
@example([(3, 54, 1), (3, 14, 0), (1, 66, 0), (1, 72, 1)])  # main is joined into its child
@example([(3, 0, 3)])  # positions further apart than there are tokens
@few(25)
@pytest.mark.parametrize(
    "name",
    subjects(
        "scripted",
        "torch-llama",
        "torch-qwen3",
        "torch-gemma3-paged",
        "fast-llama",
        "fast-gemma3",
        "llama-llama",
        "llama-qwen3",
    ),
)
def test_any_program_equals_recompute(name: str, program: list[tuple[int, int, int]]) -> None:
    """Forks, feeds, steps, joins, closes, copies and shrinks in any order."""
    subject = SUBJECTS[name]()
    record = subject.record()
    run(record, program)
    assert_equals_recompute(record, subject.oracle)
    assert subject.engine.slots_in_use == 0


def run(record: Recorder, program: list[tuple[int, int, int]]) -> None:
    """Do what the numbers say: an action, the branch and token, and how far positions jump."""
    requests = [[record.open(PROMPT, room=1000)], [record.open((3,), room=1000)]]
    for action, number, jump in program:
        branches = requests[number % len(requests)]
        branch = branches[number % len(branches)]
        if action == 0:
            branches.append(record.fork(branch))
        elif action == 1 and len(branches) > 2:
            branches.remove(branch)
            record.join(branches[0], [branch])
        elif action == 2 and len(branches) > 1:
            branches.remove(branch)
            record.close(branch)
        elif action == 3:
            twin = record.fork(branch)
            branches.append(twin)
            at = record.next_position(branch) + jump * record.engine.free_positions
            record.step(Feed((branch, twin), (number,), (at,)), feed(twin, 91, at=at + 1))
        elif action == 6:  # its first tokens, as many as the prompts had at least
            copied_tokens = 1 + jump if branch in requests[0] else 1
            requests.append([record.open_like(branch, copied_tokens)])
        elif action == 7 and branches is not requests[0]:
            record.close(*branches[1:])
            record.shrink(branches[0], 1)
            requests.append([record.open_like(branches[0], 1)])
            record.close(branches[0])
            requests.remove(branches)
        else:
            writers = [*chain(*requests)][: action * 2]
            record.step(*(feed_of(record, writer, number, jump) for writer in writers))
    record.close(*chain(*requests))


def feed_of(record: Recorder, writer: Branch, number: int, jump: int) -> Feed:
    """Return a feed of some tokens, at a position of before if the engine lets it be any."""
    at = 4 + jump if record.engine.free_positions else record.next_position(writer)
    return feed(writer, *[number] * (jump + 1), at=at)


# --- lives --------------------------------------------------------------------------------------


def test_closing_everything_frees_everything(subject: Subject) -> None:
    record = subject.record()
    first = record.open(PROMPT)
    second = record.open((1, 2))
    child = record.fork(first)
    record.step(feed(child, 20, at=4), feed(first, 10, at=4), feed(second, 50, at=2))
    assert subject.engine.slots_in_use == 4 + 2 + 3
    record.join(first, [child])
    record.close(second)
    assert subject.engine.slots_in_use == 4 + 2
    record.close(first)
    assert subject.engine.slots_in_use == 0


def test_what_no_caller_may_do_is_an_assertion(subject: Subject) -> None:
    engine = subject.engine
    main = engine.open(reserved_tokens=4)
    other = engine.open(reserved_tokens=4)
    closed = engine.fork(main)
    child = engine.fork(main)
    engine.join(main, [closed])
    engine.step([feed(main, 1, at=0)])
    bugs: list[tuple[str, Callable[[], object]]] = [
        ("own branches", lambda: engine.join(main, [other])),
        ("within its request", lambda: engine.step([Feed((main, other), (1,), (1,))])),
        ("fed together", lambda: engine.step([Feed((main, child), (2,), (1,))])),
        ("is not open", lambda: engine.close(closed)),
        ("is not open", lambda: engine.fork(closed)),
        ("is not open", lambda: engine.step([feed(closed, 1, at=0)])),
    ]
    for message, act in bugs:
        with pytest.raises(AssertionError, match=message):
            act()


# --- limits -------------------------------------------------------------------------------------


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(PastaError) as error:
        act()
    return str(error.value)


def test_a_prompt_that_the_model_cannot_take_is_refused(subject: Subject) -> None:
    engine = subject.engine
    main = engine.open(reserved_tokens=600)
    message = "position 512 is past the model's last, 511"
    assert refused(lambda: engine.step([feed(main, *[1] * 513, at=0)])) == message
    message = "token id 100 is outside the model's vocabulary of 100"
    assert refused(lambda: engine.step([feed(main, 1, 100, at=0)])) == message
    assert engine.slots_in_use == 0


def test_a_refused_step_leaves_no_trace(subject: Subject) -> None:
    record = subject.record()
    main = record.open(PROMPT, room=3)
    other = record.open((1,), room=50)
    good = feed(other, 9, at=1)
    no_room = "no room for 4 more tokens: the request holds 4 of at most 7"
    for bad, message in [
        (feed(main, 1, 2, 3, 4, at=4), no_room),
        (feed(main, 1, at=512), "position 512 is past the model's last, 511"),
        (feed(main, -1, at=4), "token id -1 is outside the model's vocabulary of 100"),
    ]:
        assert refused(lambda bad=bad: subject.engine.step([good, bad])) == message  # type: ignore[misc]
    assert subject.engine.slots_in_use == 5
    record.step(good, feed(main, 1, 2, 3, at=4))
    assert_equals_recompute(record, subject.oracle)


def test_a_room_that_is_not_there_is_refused_and_those_taken_count_in_full(
    subject: Subject,
) -> None:
    engine = subject.engine
    cells = engine.max_slots
    if cells is None:
        pytest.skip("this engine has as many cells as memory allows")
    main = engine.open(reserved_tokens=cells - 10)
    refused(lambda: engine.open(reserved_tokens=11))
    other = engine.open(reserved_tokens=10)
    engine.close(main)
    engine.close(other)
    engine.close(engine.open(reserved_tokens=cells))


def test_room_that_was_given_back_is_taken_again(subject: Subject) -> None:
    engine = subject.engine
    assert isinstance(engine, CachedEngine)
    first = engine.open(reserved_tokens=10)
    second = engine.open(reserved_tokens=1)
    engine.close(first)
    third = engine.open(reserved_tokens=10)
    assert engine._branch(third).request.start == 0
    assert engine._branch(second).request.start == 10


def test_branches_that_are_not_there_are_refused(subject: Subject) -> None:
    engine = subject.engine
    branches = engine.max_branches
    if branches is None:
        pytest.skip("this engine has as many branches as memory allows")
    main = engine.open(reserved_tokens=4)
    children = [engine.fork(main) for _ in range(branches - 1)]
    refused(lambda: engine.fork(main))
    refused(lambda: engine.open(reserved_tokens=4))
    engine.join(main, children[:1])
    engine.close(engine.fork(main))
