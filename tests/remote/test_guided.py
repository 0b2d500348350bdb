"""Guided params: read exactly or refused in one sentence, and enough to obey every constraint."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from pasta_decoding.answer.constraints import Constraint
from pasta_decoding.answer.events import Fork, Rewrite
from pasta_decoding.answer.guided import (
    PROTOCOL,
    GuidedParams,
    GuideKind,
    ThreadGrammar,
    guided_params,
    read_params,
    write_params,
)
from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.settings import Rules
from pasta_decoding.answer.vocabulary import IdArray
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import MAIN, Joining, SyncRun
from tests.answer.play import PROMPT, SIZE, VOCABULARY
from tests.law.world import CONTROL, END, ENDS, OPEN, SCHEME, SYNC

PARAMS = GuidedParams(
    GuideKind.main,
    CONTROL,
    ENDS,
    promises=3,
    eagerness=-1.5,
    sync_bias=0.5,
    sync=True,
    topics=("diet", "long walks \N{SNOWMAN}"),
    beginnings=(11, 12),
    topic_ids=(13,),
)
HEAD = f"{PROTOCOL} "
GOOD: dict[str, Any] = json.loads(write_params(PARAMS).removeprefix(HEAD))


@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        replace(PARAMS, topic=False, topic_ids=None),
        GuidedParams(GuideKind.chunk, CONTROL, (END,), begun=True),
        GuidedParams(GuideKind.check, CONTROL, ENDS, verdicts=(20, 21, 22, 23)),
    ],
)
def test_what_is_written_is_read(params: GuidedParams) -> None:
    assert read_params(write_params(params)) == params


WRONG = "the request's argument `pasta` is not what Pasta writes: "
OTHER = "this server's logits processor speaks protocol 5 of Pasta and the request another: "
CLOSINGS = {**GOOD["control"], "promise_close": {}}
TWICE = {**GOOD["control"], "sync": GOOD["control"]["async_open"]}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"kind": "side"}, f"{WRONG}`kind`"),
        ({"promises": -1}, f"{WRONG}a number is negative or too large"),
        ({"promises": True}, f"{WRONG}`promises`"),
        ({"eagerness": float("inf")}, f"{WRONG}`eagerness`"),
        ({"ends": []}, f"{WRONG}`ends` names no id"),
        ({"ends": [2**40]}, f"{WRONG}a number is negative or too large"),
        ({"topics": ["diet", 3]}, f"{WRONG}`topics.1`"),
        ({"control": CLOSINGS}, f"{WRONG}`control` names no closing"),
        ({"control": TWICE}, f"{WRONG}`control` names an id twice"),
        ({"more": 1}, f"{WRONG}`more`"),
        ({"kind": "check", "verdicts": [1, 2, 3, 3]}, f"{WRONG}`verdicts` are not 4 ids"),
        *((text, WRONG) for text in (f"{HEAD}{'[' * 100_000}", f"{HEAD}{'1' * 10_000}")),
        *((value, WRONG) for value in ("x" * 300_000, 3, None)),
        *((text, OTHER) for text in ("", "0 {}", json.dumps({"protocol": 2}))),
    ],
)
def test_a_refusal_says_in_a_line_what_is_wrong(argument: object, message: str) -> None:
    """A dict replaces fields of `GOOD`; any other value is the argument itself."""
    if isinstance(argument, dict):
        argument = HEAD + json.dumps(GOOD | argument)
    with pytest.raises(PastaError) as error:
        read_params(argument)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


# The constraints of a thread


WEIGHTS = {OPEN: 3, SYNC: 2, END: 0}


def grammar_of_request(interpreter: Interpreter, thread: int) -> ThreadGrammar:
    params = guided_params(interpreter, thread)
    assert params is not None
    return ThreadGrammar(VOCABULARY, read_params(write_params(params)))


def assert_same(actual: Constraint, expected: Constraint) -> None:
    def sorted_ids(ids: IdArray | None) -> list[int] | None:
        return None if ids is None else sorted(set(ids.tolist()))

    assert sorted_ids(actual.banned) == sorted_ids(expected.banned)
    assert sorted_ids(actual.only) == sorted_ids(expected.only)
    assert sorted_ids(actual.substitutes) == sorted_ids(expected.substitutes)
    assert actual.bias == expected.bias


def written(rules: Rules, seed: int, *, max_positions: int = 10**6) -> Interpreter:
    """Write an answer of random tokens, and compare both constraints at each token.

    Now and then a thread's request ends, and another request continues the thread.
    """
    dice = random.Random(seed)
    interpreter = Interpreter(VOCABULARY, SCHEME, rules, len(PROMPT), max_positions, Joining.text)
    threads = {MAIN: grammar_of_request(interpreter, MAIN)}
    while not interpreter.finished:
        thread = dice.choice(interpreter.writing_threads)
        if dice.random() < 0.2:
            threads[thread] = grammar_of_request(interpreter, thread)
        expected = interpreter.constraint(thread)
        if not expected.forced:
            assert_same(threads[thread].constraint(), expected)
        token = chosen(expected, dice)
        threads[thread].on_token(token)
        for action in interpreter.on_token(thread, token):
            match action:
                case Fork(chunk):
                    threads[chunk] = grammar_of_request(interpreter, chunk)
                case Rewrite():
                    threads[MAIN] = grammar_of_request(interpreter, MAIN)
    return interpreter


def chosen(allowed: Constraint, dice: random.Random) -> int:
    ids = [token for token in range(SIZE) if allowed.admits(token)]
    return dice.choices(ids, [WEIGHTS.get(token, 1) + 0.01 for token in ids])[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "rules",
    [
        Rules(
            max_tokens=200, max_topic_tokens=3, min_chunk_tokens=4, eagerness=1.5, sync_bias=-1.0
        ),
        Rules(max_tokens=200, max_chunks=3),
        Rules(max_tokens=120, topic=False),
    ],
)
def test_its_constraints_are_those_of_the_interpreter(rules: Rules, seed: int) -> None:
    written(rules, seed)


def test_its_constraints_are_those_of_the_interpreter_where_positions_run_out() -> None:
    rules = Rules(max_tokens=200, max_topic_tokens=3, min_chunk_tokens=4)
    answers = [written(rules, seed, max_positions=len(PROMPT) + 202) for seed in range(4)]
    assert max(len(answer.budget.chunks) for answer in answers) == 2
    assert any(isinstance(segment, SyncRun) for answer in answers for segment in answer.segments)
