"""The wire: the body of a request, and a reader that believes nothing of the reply."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_decoding.answer.guided import XARG, GuidedParams, GuideKind, read_params
from pasta_decoding.answer.settings import SamplingParams
from pasta_decoding.remote.stream import MAX_LINE_BYTES, Completion, CompletionReader, RemoteError
from tests.law.world import CONTROL, OPEN, SYNC
from tests.remote.fake import data_line, event, usage

STOP = 7
OTHER_STOP = 8
END = 9
COMPLETION = Completion(prompt=(1, 2, 3), max_tokens=4, stops=(STOP, OTHER_STOP, END), end=END)
DONE = b"data: [DONE]\n\n"
GOOD = (
    event(4, prompt_token_ids=[1, 2, 3])
    + b": a comment\n\n"
    + event(5, 6)
    + event(STOP, finish_reason="stop", stop_reason=STOP)
    + usage(3, 4, cached=2)
    + DONE
)


def reader() -> CompletionReader:
    return CompletionReader(COMPLETION, vocabulary_size=20)


def read(data: bytes) -> list[int]:
    completion_reader = reader()
    return [*completion_reader.feed(data), *completion_reader.end()]


@given(st.lists(st.integers(0, len(GOOD)), max_size=8))
def test_how_the_stream_was_cut_never_matters(cuts: list[int]) -> None:
    completion_reader = reader()
    ids: list[int] = []
    for start, end in pairwise([0, *sorted(cuts), len(GOOD)]):
        ids += completion_reader.feed(GOOD[start:end])
    assert [*ids, *completion_reader.end()] == [4, 5, 6, STOP]
    assert completion_reader.cached_tokens == 2


def test_a_stop_token_comes_out_only_when_the_stream_has_ended_well() -> None:
    completion_reader = reader()
    assert completion_reader.feed(event(4) + event(STOP, finish_reason="stop")) == [4]
    with pytest.raises(RemoteError, match="counts 3"):
        completion_reader.feed(usage(3, 3))
    assert reader().feed(GOOD) == [4, 5, 6]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop_reason": None}, END),
        ({"stop_reason": OTHER_STOP}, OTHER_STOP),
        ({"stop_reason": 5}, END),
        ({"stop_reason": "###"}, END),
    ],
)
def test_an_end_that_was_not_streamed_is_returned_as_well(
    fields: dict[str, object], expected: int
) -> None:
    for counted_tokens in (1, 2):  # without the end, or with it
        ending = event(finish_reason="stop", **fields) + usage(3, counted_tokens) + DONE
        assert read(event(4) + ending) == [4, expected]


@pytest.mark.parametrize("between", [{"completion_tokens": 2}, None])
def test_other_forms_of_a_stream_are_understood(between: object) -> None:
    """A server may send counts before the end, and may leave out `[DONE]`."""
    ending = event(6, 4, finish_reason="length") + usage(3, 4)
    assert read(event(4, 5) + data_line({"choices": [], "usage": between}) + ending) == [4, 5, 6, 4]


FINISHED = event(4, finish_reason="length")
BAD: dict[str, tuple[bytes, str]] = {
    "a page": (b"<html>Hello</html>\n", "it sent no completion: b'<html>Hello</html>'"),
    "no JSON": (b"data: {nonsense\n\n", "it sent no completion: b'{nonsense'"),
    "a line without an end": (b"x" * (MAX_LINE_BYTES + 1), "it sent no completion: a line without"),
    "deep nesting": (b"data: " + b"[" * 100_000 + b"\n", "it sent no completion: b'[[[["),
    "no choices": (data_line({"text": "hello"}), "it sent no completion: choices None"),
    "text alone": (data_line({"choices": [{"text": "hi"}]}), "it streams no token ids"),
    "an id that is text": (event().replace(b"[]", b'["4"]', 1), "it sent '4' for a token id"),
    "a negative id": (event().replace(b"[]", b"[-1]", 1), "it sent -1 for a token id"),
    "an id past the vocabulary": (event().replace(b"[]", b"[20]", 1), "it sent 20 for a token id"),
    "an error": (data_line({"error": {"message": "out of memory"}}), "it failed: out of memory"),
    "an abort": (event(4, finish_reason="abort"), "it gave up: abort"),
    "an early end": (event(4), "it ended its reply early"),
    "done too soon": (event(4) + DONE, "it ended its reply early"),
    "too many tokens": (event(4, 5, 6, 4, 5), "it sent more than the 4 tokens"),
    "more behind a stop": (event(STOP) + event(4), "it went on behind a stop token"),
    "more behind its end": (FINISHED + event(5), "it went on behind a stop token"),
    "repeated tokens": (
        event(4) + event(4) + event(5, finish_reason="length") + usage(3, 2),
        "it streamed 3 token ids and counts 2: some were lost or came twice",
    ),
    "no count": (FINISHED + DONE, "it did not say how many tokens it sent"),
    "a count of nothing": (
        FINISHED + data_line({"choices": [], "usage": {"prompt_tokens": 3}}),
        "it streamed 1 token ids and counts None",
    ),
    "lost tokens": (FINISHED + usage(3, 3), "it streamed 1 token ids and counts 3"),
    "another prompt": (event(4, prompt_token_ids=[0, 1, 2, 3]), "it changed the prompt"),
    "a longer prompt": (FINISHED + usage(4, 1), "it read a prompt of 4 tokens where 3 were sent"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_good_stream_is_refused(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(RemoteError) as caught:
        read(data)
    assert str(caught.value).startswith(message)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        read(b"data: " + data)
        read(data)
    except RemoteError:
        pass


def test_the_body_has_all_sampling_settings_and_names_ids_as_openai_does() -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.9)
    completion = Completion((1,), 2, (STOP,), END, {3: -100.0}, sampling, seed=11)
    body = completion.body("tiny", guided=False)
    expected = {"logit_bias": {"3": -100.0}, "top_k": -1, "repetition_penalty": 1.0, "seed": 11}
    expected |= {"temperature": 0.5, "top_p": 0.9, "stop_token_ids": [STOP]}
    assert body | expected == body
    nearly_greedy = Completion((1,), 2, (), END, sampling=SamplingParams(temperature=1e-6))
    assert nearly_greedy.body("tiny", guided=False)["temperature"] == 0.0
    assert nearly_greedy.body("tiny", guided=False)["logit_bias"] is None


def test_the_biases_of_tags_go_into_the_request_where_no_processor_reads_them() -> None:
    params = GuidedParams(GuideKind.main, CONTROL, (END,), eagerness=3.0, sync_bias=-1.0)
    eager = Completion((1,), 2, (), END, {OPEN: 1.0}, params=params)
    assert eager.body("tiny", guided=False)["logit_bias"] == {str(OPEN): 4.0, str(SYNC): -1.0}
    guided = eager.body("tiny", guided=True)
    assert guided["logit_bias"] == {str(OPEN): 1.0}
    assert read_params(guided["vllm_xargs"][XARG]) == params
