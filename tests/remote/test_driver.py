"""The async driver: what it writes at a server is what an engine in this process would write."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pasta_decoding.answer.events import Event, Finished, Progress
from pasta_decoding.answer.guided import PROTOCOL, write_params
from pasta_decoding.answer.record import Answer, ServerUsage
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.engines.base import FloatArray
from pasta_decoding.lang.layout import PromiseRun, SyncRun
from pasta_decoding.remote import driver
from pasta_decoding.remote.stream import RemoteError
from pasta_decoding.vllm.batch import GuidedRows, ServedModel
from tests.answer.play import ID, SIZE
from tests.law.world import ASYNC, CLOSE, CONTROL, END, OPEN, P20, P50, SYNC
from tests.remote.fake import Body, Fake, serving, until
from tests.remote.writing import (
    RULES,
    assert_same,
    ending,
    locally,
    request_for,
    scripted,
    service_of,
    write,
    written,
)
from tests.scheduling.machine import ordered
from tests.scripted import follow
from tests.vllm.tokens import Tokenizer

A, B, C, SPACE_A = (ID[text] for text in ("a", "b", "c", " a"))
ENDLESS = follow((A, B), (B, A), vocabulary_size=SIZE, otherwise=A)
PROMPTS = [(11, 12, 13 + n) for n in range(4)]


def test_answers_are_those_of_the_step_scheduler_token_by_token() -> None:
    requests = [request_for(prompt) for prompt in PROMPTS]
    with serving(scripted()) as fake:
        answers = write(service_of(fake), requests)
        assert fake.live == 0
    for request, answer in zip(requests, answers, strict=True):
        assert_same(answer, locally(request, ending(7)))
    assert sum(len(answer.layouts) > 1 for answer in answers) > 1
    assert sum(answer.chunks for answer in answers) > 5
    assert not any(answer.truncated for answer in answers)


def test_sequential_answers_bring_no_control_token_in_one_request_each() -> None:
    rules = Rules(max_tokens=60, parallel=False)
    requests = [request_for(prompt, rules=rules) for prompt in PROMPTS]
    with serving(scripted()) as fake:
        answers = write(service_of(fake), requests)
        assert len(fake.bodies) == len(requests)
        banned = {str(token) for token in CONTROL.ids}
        assert all(set(body["logit_bias"]) == banned for body in fake.bodies)
    for request, answer in zip(requests, answers, strict=True):
        assert_same(answer, locally(request, ending(7)))
        assert answer.interventions == 0


LAST = ID["b."]
TWO_CHUNKS = follow(
    (LAST, A, OPEN, B, P20, SPACE_A, OPEN, C, P50, B, SYNC),
    (P20, ASYNC, C, A, CLOSE),
    (P50, ASYNC, C, C, C, C, CLOSE),
    (SYNC, C, A, END),
    vocabulary_size=SIZE,
)
"""Main: a, a promise on b, ' a', one on c, b, SYNC, c a. The chunks write c a and c c c c."""
LONG_PROMPT = (*[A, B, C, A, C, B] * 8, LAST)


def usage(answer: Answer) -> ServerUsage:
    assert answer.trace.server_usage is not None
    return answer.trace.server_usage


def test_every_request_begins_with_what_an_earlier_one_has_computed() -> None:
    with serving(Fake(TWO_CHUNKS, SIZE, END)) as fake:
        [answer] = write(service_of(fake), [request_for(LONG_PROMPT)])
        bodies = fake.bodies
    assert answer.annotated == (
        'a<promise topic="b" tokens="20"/><async>ca</async> a'
        '<promise topic="c" tokens="50"/><async>cccc</async>b<sync/>ca'
    )
    assert answer.layouts == locally(request_for(LONG_PROMPT), TWO_CHUNKS).layouts
    # The requests of the chunks leave one right behind the other, and may overtake each other.
    assert sorted((body["prompt"][len(LONG_PROMPT) :] for body in bodies), key=len) == [
        [],
        [A, OPEN, B, P20, ASYNC],
        [A, OPEN, B, P20, SPACE_A, OPEN, C, P50, ASYNC],
        # In reading order, with all tags.
        [
            *(A, OPEN, B, P20, ASYNC, C, A, CLOSE, SPACE_A),
            *(OPEN, C, P50, ASYNC, C, C, C, C, CLOSE, B, SYNC),
        ],
    ]
    assert usage(answer).requests == 4
    assert usage(answer).corrections == 0
    assert usage(answer).prompt_tokens == sum(len(body["prompt"]) for body in bodies)
    cached_tokens = usage(answer).cached_tokens
    assert cached_tokens is not None
    assert cached_tokens > 3 * len(LONG_PROMPT)


@pytest.mark.parametrize("stops", [(), ("acc",)])
def test_a_reader_gets_each_event_with_its_step_on_the_critical_path(
    stops: tuple[str, ...],
) -> None:
    events: list[Event] = []
    steps: list[int] = []

    def on_news(news: Progress) -> None:
        events.extend(news.events)
        steps.extend([news.step] * len(news.events))

    with serving(Fake(TWO_CHUNKS, SIZE, END)) as fake:
        [answer] = write(
            service_of(fake),
            [request_for(LONG_PROMPT, stop=stops)],
            on_news=on_news,
        )
    assert events == list(answer.events)
    assert isinstance(answer.events[-1], Finished)
    assert steps == sorted(steps)
    assert answer.stopped is bool(stops)
    assert answer.text.endswith(stops or "ca")
    assert ordered(answer.events) == answer.text
    assert answer.text == locally(request_for(LONG_PROMPT, stop=stops), TWO_CHUNKS).text
    assert bool(stops) or steps[-1] == answer.critical_path


def test_equal_seeds_give_equal_answers_and_another_choice_number_gives_another() -> None:
    def request(choice: int) -> Request:
        sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.9, seed=5), request=choice)
        return Request(PROMPTS[0], sampler, RULES)

    with serving(scripted()) as fake:
        once, again, other = (write(service_of(fake), [request(n)])[0] for n in (0, 0, 1))
        seeds = {body["seed"] for body in fake.bodies}
    assert once.segments == again.segments != other.segments
    assert len(seeds) > 2, "each request draws its own noise"
    assert {body["top_p"] for body in fake.bodies} == {0.9}


def test_at_the_time_limit_the_text_up_to_then_remains() -> None:
    with serving(Fake(ENDLESS, SIZE, END, token_s=0.01)) as fake:
        request = request_for(PROMPTS[0], max_seconds=1, rules=Rules(max_tokens=4000))
        [answer] = write(service_of(fake), [request])
        until(lambda: fake.live == 0, seconds=20)  # all of it would take 40
    assert answer.truncated
    assert answer.text.startswith("ab")
    assert isinstance(answer.events[-1], Finished)


def test_an_answer_that_is_cancelled_ends_all_its_requests() -> None:
    async def cancel(fake: Fake) -> None:
        task = asyncio.create_task(written(service_of(fake), [request_for((A, LAST))]))
        await asyncio.to_thread(until, lambda: fake.live > 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    script = follow((LAST, A, OPEN, B, P20, A), (P20, ASYNC, A), vocabulary_size=SIZE, otherwise=A)
    with serving(Fake(script, SIZE, END, token_s=0.01)) as fake:
        asyncio.run(cancel(fake))
        until(lambda: fake.live == 0)


def test_a_token_that_may_not_stand_there_is_taken_back_at_the_price_of_a_request() -> None:
    """Main wants to close a promise that it has not opened; next to that, a."""

    def script(seen: tuple[int, ...]) -> FloatArray:
        logits_V = np.zeros(SIZE, dtype=np.float32)
        logits_V[[P20, A if len(seen) < 8 else END]] = (10, 5)
        return logits_V

    with serving(Fake(script, SIZE, END)) as fake:
        [answer] = write(service_of(fake), [request_for(PROMPTS[0])])
        corrections = [body for body in fake.bodies if body["max_tokens"] == 1]
    assert answer.text == "a" * 5
    assert answer.interventions == len(corrections) == 6
    assert usage(answer).corrections == 6
    banned = {str(token) for token in CONTROL.ids - {OPEN}}
    for body in corrections:
        assert {token for token, bias in body["logit_bias"].items() if bias < 0} == banned


def test_tokens_that_are_forbidden_at_this_position_come_first_among_the_biases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every topic wants to be a, else b, else c; a request has room for three biases."""

    def script(seen: tuple[int, ...]) -> FloatArray:
        logits_V = np.zeros(SIZE, dtype=np.float32)
        logits_V[[A, B, C]] = (7, 6, 5)
        after = {OPEN: P20, ASYNC: CLOSE}.get(seen[max(-2, -len(seen))])
        otherwise = OPEN if seen.count(OPEN) < 3 else END
        logits_V[A if seen[-1] in (OPEN, ASYNC) else after or otherwise] = 9
        return logits_V

    monkeypatch.setattr(driver, "MAX_BIASES", 3)
    with serving(Fake(script, SIZE, END)) as fake:
        [answer] = write(service_of(fake), [request_for(PROMPTS[0])])
        biases = [body["logit_bias"] for body in fake.bodies if body["max_tokens"] == 1]
    promises = [segment for segment in answer.segments if isinstance(segment, PromiseRun)]
    assert [promise.ids[1] for promise in promises] == [A, B, C]
    assert len(biases) == answer.interventions == 2
    assert all(len(bias) <= 3 for bias in biases)
    assert biases[-1].keys() == {str(A), str(B)}


# Servers with Pasta's logits processor: one check finds it, and then nothing is corrected


PROCESSOR = partial(GuidedRows, ServedModel(Tokenizer(), SIZE))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_costs_a_request_for_each_chunk_and_sync(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5))
    requests = [replace(request_for(prompt), sampler=sampler) for prompt in PROMPTS]
    with serving(replace(scripted(), processor=PROCESSOR)) as fake:
        answers = write(service_of(fake), requests)
    sessions = {body["session"] for body in fake.bodies}
    assert len(sessions - {None}) == len(requests), "one a session, for routers"
    assert sum(usage(answer).requests for answer in answers) == len(fake.bodies)
    for request, answer in zip(requests, answers, strict=True):
        syncs = sum(isinstance(segment, SyncRun) for segment in answer.segments)
        assert usage(answer).requests == 1 + answer.chunks + syncs
        assert usage(answer).corrections == 0
        if temperature == 0:
            assert_same(answer, locally(request, ending(7)))
    assert sum(answer.chunks for answer in answers) > len(requests)


def test_each_replica_is_checked_and_one_without_the_processor_gets_no_params() -> None:
    with serving(replace(scripted(), processor=PROCESSOR)) as guided, serving(scripted()) as plain:
        answers = write(service_of(guided, plain), [request_for(prompt) for prompt in PROMPTS])
    assert len(guided.checks) == len(plain.checks) == 1
    assert all("vllm_xargs" in body for body in guided.bodies)
    assert not any("vllm_xargs" in body for body in plain.bodies)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.segments == locally(request_for(prompt), ending(7)).segments
    assert sum(usage(answer).corrections for answer in answers) > 5, "by the plain server"


@pytest.mark.parametrize(
    ("processor", "protocol", "message"),
    [
        (PROCESSOR, "0", "speaks protocol 5 of Pasta and the request another: install"),
        (
            partial(GuidedRows, ServedModel(Tokenizer(spare=frozenset({OPEN, SYNC})), SIZE)),
            PROTOCOL,
            "the model that it serves has not the reserved tokens",
        ),
    ],
)
def test_a_processor_that_cannot_be_used_is_named_before_the_first_request(
    processor: Callable[[], GuidedRows],
    protocol: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "pasta_decoding.remote.stream.write_params",
        lambda params: write_params(params).replace(PROTOCOL, protocol, 1),
    )
    with (
        serving(replace(scripted(), processor=processor)) as fake,
        pytest.raises(RemoteError, match=message),
    ):
        write(service_of(fake), [request_for(PROMPTS[0])])
    assert not fake.bodies


def test_a_server_that_refuses_unknown_arguments_works_as_one_without_the_processor() -> None:
    class Strict(Fake):
        def problem(self, body: Body) -> str | None:
            return "Unknown argument" if "vllm_xargs" in body else super().problem(body)

    with serving(Strict(ending(7), SIZE, END)) as fake:
        [answer] = write(service_of(fake), [request_for(PROMPTS[0])])
        assert len(fake.checks) == 1
    assert_same(answer, locally(request_for(PROMPTS[0]), ending(7)))
