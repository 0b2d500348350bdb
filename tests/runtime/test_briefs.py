"""Briefs on the wire: whatever comes, it is read exactly or refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.briefs import PROTOCOL, Brief, Kind, read_brief, write_brief
from tests.law.world import CONTROL, END, ENDS

BRIEF = Brief(
    Kind.main,
    CONTROL,
    ENDS,
    promises=3,
    sync=True,
    topics=("diet", "long walks \N{SNOWMAN}"),
    beginnings=(11, 12),
    topic_ids=(13,),
)
GOOD: dict[str, Any] = json.loads(write_brief(BRIEF))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def refusal(found: object) -> str:
    with pytest.raises(PastaError) as error:
        read_brief(found)
    said = str(error.value)
    assert "\n" not in said
    assert len(said) < 1000
    return said


@pytest.mark.parametrize(
    "brief",
    [
        BRIEF,
        replace(BRIEF, topic=False, topics_begin_apart=False, topic_ids=None),
        Brief(Kind.chunk, CONTROL, (END,), begun=True),
        Brief(Kind.check, CONTROL, ENDS, verdicts=(20, 21, 22, 23)),
    ],
)
def test_what_is_written_is_read(brief: Brief) -> None:
    assert read_brief(write_brief(brief)) == brief


@given(st.text() | JSON | JSON.map(json.dumps))
def test_garbage_is_refused(found: object) -> None:
    refusal(found)


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_garbage_in_one_field_is_refused_or_read(name: str, value: object) -> None:
    """A value of the right form is none: then the brief holds it."""
    try:
        brief = read_brief(json.dumps({**GOOD, name: value}))
    except PastaError:
        refusal(json.dumps({**GOOD, name: value}))
    else:
        assert json.loads(write_brief(brief))[name] == value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "side"}, "`kind` is none of main, chunk, check"),
        ({"promises": -1}, "`promises` holds what is no number from 0 to 2147483647"),
        ({"promises": True}, "`promises` holds what is no number from 0 to 2147483647"),
        ({"sync": 1}, "`sync` is neither true nor false"),
        ({"ends": []}, "`ends` names no id"),
        ({"topics": ["diet", 3]}, "`topics` holds what is no text"),
        ({"beginnings": [0] * 5000}, "`beginnings` is no list of at most 4096"),
        ({"control": [1, 2, 3, 4, 5]}, "`control` does not name every part of a tag once"),
        ({"control": [1, 2, 3, 4, 5, 5]}, "`control` does not name every part of a tag once"),
        ({"buckets": [20, 20]}, "`buckets` has a length twice"),
        ({"kind": "check", "verdicts": [1, 2, 3, 3]}, "`verdicts` are not 4 ids"),
    ],
)
def test_a_refusal_says_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    assert refusal(json.dumps(GOOD | changes)) == (
        f"the request's argument `pasta` is not what Pasta writes: {said}"
    )


@pytest.mark.parametrize("found", ["[" * 100_000, "1" * 10_000, "x" * 300_000, "NaN", 3, None])
def test_what_is_no_object_is_refused(found: object) -> None:
    assert refusal(found).startswith("the request's argument `pasta` is not what Pasta writes: it")


@pytest.mark.parametrize("protocol", [PROTOCOL + 1, 0, "1", None])
def test_another_protocol_is_named(protocol: object) -> None:
    assert refusal(json.dumps(GOOD | {"protocol": protocol})) == (
        "this server's logits processor speaks protocol 1 of Pasta and the request another: "
        "install the same version of Pasta on both sides"
    )
