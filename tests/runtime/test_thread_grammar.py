"""A thread that knows the others from its params alone may write what the interpreter lets it."""

from __future__ import annotations

import random

import pytest

from pasta_decoding.lang.layout import MAIN, Joining, SyncRun
from pasta_decoding.runtime.constraints import Constraint
from pasta_decoding.runtime.events import Fork, Rewrite
from pasta_decoding.runtime.guided import ThreadGrammar, guided_params, read_params, write_params
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.request import Rules
from pasta_decoding.runtime.vocabulary import Ids
from tests.law.world import END, OPEN, SCHEME, SYNC
from tests.runtime.play import PROMPT, SIZE, VOCABULARY

WANTED = {OPEN: 3, SYNC: 2, END: 0}


def sent(interpreter: Interpreter, thread: int) -> ThreadGrammar:
    params = guided_params(interpreter, thread)
    assert params is not None
    return ThreadGrammar(VOCABULARY, read_params(write_params(params)))


def assert_same(found: Constraint, expected: Constraint) -> None:
    def ids(one: Ids | None) -> list[int] | None:
        return None if one is None else sorted(set(one.tolist()))

    assert ids(found.banned) == ids(expected.banned)
    assert ids(found.only) == ids(expected.only)
    assert ids(found.instead) == ids(expected.instead)
    assert found.bias == expected.bias


def written(rules: Rules, seed: int, *, max_positions: int | None = None) -> Interpreter:
    """Write an answer of random tokens, and compare at each of them.

    Now and then a thread's request ends, and another one goes on.
    """
    dice = random.Random(seed)
    interpreter = Interpreter(
        VOCABULARY, SCHEME, rules, len(PROMPT), max_positions, Joining.text, ()
    )
    threads = {MAIN: sent(interpreter, MAIN)}
    while not interpreter.finished:
        thread = dice.choice(interpreter.writing)
        if dice.random() < 0.2:
            threads[thread] = sent(interpreter, thread)
        expected = interpreter.constraint(thread)
        if not expected.forced:
            assert_same(threads[thread].constraint(), expected)
        token = chosen(expected, dice)
        threads[thread].on_token(token)
        for action in interpreter.on_token(thread, token):
            match action:
                case Fork(chunk):
                    threads[chunk] = sent(interpreter, chunk)
                case Rewrite():
                    threads[MAIN] = sent(interpreter, MAIN)
    return interpreter


def chosen(allowed: Constraint, dice: random.Random) -> int:
    ids = [token for token in range(SIZE) if allowed.admits(token)]
    return dice.choices(ids, [WANTED.get(token, 1) + 0.01 for token in ids])[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "rules",
    [
        Rules(max_tokens=200, max_topic_tokens=3, min_chunk_tokens=4, eagerness=1.5),
        Rules(max_tokens=200, max_chunks=3, topics_begin_apart=False),
        Rules(max_tokens=120, topic=False),
    ],
)
def test_its_constraints_are_those_of_the_interpreter(rules: Rules, seed: int) -> None:
    written(rules, seed)


def test_they_are_where_positions_run_out() -> None:
    rules = Rules(max_tokens=200, max_topic_tokens=3, min_chunk_tokens=4)
    answers = [written(rules, seed, max_positions=len(PROMPT) + 202) for seed in range(4)]
    assert max(len(answer.budget.chunks) for answer in answers) == 2
    assert any(isinstance(segment, SyncRun) for one in answers for segment in one.segments)


def test_sequential_decoding_needs_no_params() -> None:
    interpreter = Interpreter(VOCABULARY, SCHEME, Rules(parallel=False), len(PROMPT))
    assert guided_params(interpreter, MAIN) is None
