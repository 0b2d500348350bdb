"""Many clients, many of whom leave: nothing leaks, and who stays gets the right answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from pasta_decoding.engines.scripted import shuffled
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling
from tests.server.hammering import hammer
from tests.server.running import running
from tests.server.scripts import Forgetful, with_engine

TOKENS = 24
PROMPTS = ["Hello", "What now?", "Count.", "And then?"]
FEW_AND_MANY = [150, pytest.param(1000, marks=pytest.mark.slow)]


def right_answers(decoder: LocalDecoder, prompts: Sequence[str], tokens: int) -> dict[str, str]:
    """Return what the engine alone answers, greedily."""
    rules = Rules(max_tokens=tokens)
    requests = {prompt: decoder.request(prompt, rules, Sampling()) for prompt in prompts}
    return {prompt: decoder.answer(request).text for prompt, request in requests.items()}


@pytest.mark.parametrize("requests", FEW_AND_MANY)
def test_random_disconnects_and_timeouts_leave_nothing_behind(
    requests: int, decoder: LocalDecoder
) -> None:
    scripted = with_engine(decoder, shuffled(decoder.engine.vocabulary_size), Forgetful)
    expected = right_answers(scripted, PROMPTS, TOKENS)
    before = threading.active_count()
    with running(scripted, max_requests=4, max_queue=6) as server:
        ends = hammer(server, requests, TOKENS, expected)
    assert threading.active_count() == before
    assert ends.total() == requests
    assert all(ends[end] > 0 for end in ("right", "left", "busy", "refused"))


@pytest.mark.parametrize("requests", FEW_AND_MANY)
def test_a_model_under_the_hammer_answers_as_it_does_alone(
    requests: int, decoder: LocalDecoder
) -> None:
    expected = right_answers(decoder, PROMPTS, TOKENS)
    with running(decoder, max_requests=4, max_queue=20) as server:
        ends = hammer(server, requests, TOKENS, expected)
    assert all(ends[end] > 0 for end in ("right", "left", "refused"))
