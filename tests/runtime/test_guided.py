"""Guided params on the wire: whatever comes, it is read exactly or refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.guided import PROTOCOL, GuidedParams, Kind, read_params, write_params
from tests.examples import few
from tests.law.world import CONTROL, END, ENDS

PARAMS = GuidedParams(
    Kind.main,
    CONTROL,
    ENDS,
    promises=3,
    eagerness=-1.5,
    sync=True,
    topics=("diet", "long walks \N{SNOWMAN}"),
    beginnings=(11, 12),
    topic_ids=(13,),
)
HEAD = f"{PROTOCOL} "
GOOD: dict[str, Any] = json.loads(write_params(PARAMS).removeprefix(HEAD))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def refusal(found: object) -> str:
    with pytest.raises(PastaError) as error:
        read_params(found)
    said = str(error.value)
    assert "\n" not in said
    assert len(said) < 1000
    return said


@pytest.mark.parametrize(
    "params",
    [
        PARAMS,
        replace(PARAMS, topic=False, topics_begin_apart=False, topic_ids=None),
        GuidedParams(Kind.chunk, CONTROL, (END,), begun=True),
        GuidedParams(Kind.check, CONTROL, ENDS, verdicts=(20, 21, 22, 23)),
    ],
)
def test_what_is_written_is_read(params: GuidedParams) -> None:
    assert read_params(write_params(params)) == params


@few(25)
@given(st.text() | JSON | JSON.map(json.dumps))
def test_garbage_is_refused(found: object) -> None:
    refusal(found)
    refusal(f"{HEAD}{found}")


@few(25)
@given(st.sampled_from(sorted(GOOD)), JSON)
def test_garbage_in_one_field_is_refused_or_read(name: str, value: object) -> None:
    """A value of the right form is none: then the params holds it."""
    found = HEAD + json.dumps({**GOOD, name: value})
    try:
        params = read_params(found)
    except PastaError:
        refusal(found)
    else:
        assert json.loads(write_params(params).removeprefix(HEAD))[name] == value


CLOSINGS = {**GOOD["control"], "promise_close": {}}
TWICE = {**GOOD["control"], "sync": GOOD["control"]["async_open"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "side"}, "`kind`"),
        ({"promises": -1}, "a number is negative or too large"),
        ({"promises": True}, "`promises`"),
        ({"eagerness": "2"}, "`eagerness`"),
        ({"eagerness": float("inf")}, "`eagerness`"),
        ({"sync": 1}, "`sync`"),
        ({"ends": []}, "`ends` names no id"),
        ({"ends": [2**40]}, "a number is negative or too large"),
        ({"topics": ["diet", 3]}, "`topics.1`"),
        ({"control": [1]}, "`control`"),
        ({"control": CLOSINGS}, "`control` names no closing"),
        ({"control": TWICE}, "`control` names an id twice"),
        ({"more": 1}, "`more`"),
        ({"kind": "check", "verdicts": [1, 2, 3, 3]}, "`verdicts` are not 4 ids"),
    ],
)
def test_a_refusal_says_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    assert refusal(HEAD + json.dumps(GOOD | changes)) == (
        f"the request's argument `pasta` is not what Pasta writes: {said}"
    )


@pytest.mark.parametrize(
    "found", [f"{HEAD}{'[' * 100_000}", f"{HEAD}{'1' * 10_000}", "x" * 300_000, 3, None]
)
def test_what_is_no_object_is_refused(found: object) -> None:
    assert refusal(found).startswith("the request's argument `pasta` is not what Pasta writes: it")


def test_another_protocol_is_named() -> None:
    assert {refusal(found) for found in ("", "4 {}", json.dumps({"protocol": 2}))} == {
        "this server's logits processor speaks protocol 3 of Pasta and the request another: "
        "install the same version of Pasta on both sides"
    }
