"""Annotating through an endpoint: what of its answers is taken, and what happens to the rest."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from pasta_decoding.data.annotate.base import Annotated, RuleAnnotator
from pasta_decoding.data.annotate.llm import (
    AnswerError,
    LlmAnnotator,
    accept,
    demonstrations,
    guide,
    introduction,
)
from pasta_decoding.data.annotate.structure import find_parts
from pasta_decoding.data.dataset import Row
from pasta_decoding.data.endpoint import Endpoint, EndpointError
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Sync, read, strip
from tests.chatserver import Act, Body, ChatServer, Raw, Script, chat_server, failure, in_turn

PLAIN = "Eat oats for breakfast. Sleep well at night."
GOOD = (
    '<promise topic="diet" tokens="10"/><async>Eat oats for breakfast.</async> '
    '<promise topic="sleep" tokens="10"/><async>Sleep well at night.</async>'
)


def words(text: str) -> int:
    return len(text.split())


def test_the_guide_names_every_tag_and_the_demonstrations_obey_it() -> None:
    assert all(tag in guide() for tag in ("<promise ", "<async>", "</async>", "<sync/>"))
    shown = demonstrations()
    trees = [read(row.response) for row in shown]
    chunks = [[node for node in tree if isinstance(node, Chunk)] for tree in trees]
    assert len(shown) == 7
    assert [check(row.response) for row in shown] == [[]] * 7
    assert not any("<promise" in strip(tree) or "<async" in strip(tree) for tree in trees)
    assert sum(Sync() in tree for tree in trees) == 1
    assert sum(not some for some in chunks) == 1
    for some in chunks:
        assert len({chunk.topic for chunk in some}) == len(some)
        assert all(15 <= words(chunk.text) <= 80 for chunk in some)


def test_the_demonstrations_promise_the_lengths_they_have(
    default_tokenizer: PreTrainedTokenizerBase,
) -> None:
    def count(text: str) -> int:
        return len(default_tokenizer.encode(text, add_special_tokens=False))

    for row in demonstrations():
        assert accept(row.response, strip(read(row.response)), count) == row.response


def test_every_conversation_begins_with_the_guide_and_seven_answered_questions() -> None:
    turns = introduction()
    assert [turn["role"] for turn in turns] == ["system", *["user", "assistant"] * 7]
    assert "<promise" not in "".join(turn["content"] for turn in turns if turn["role"] == "user")


# Whatever the layout rule makes of these is an answer that a perfect model could give.
PIECES = st.sampled_from(
    [
        "- Fresh fruit keeps the body supplied with vitamins through most of a long winter.\n",
        "- A short walk after each meal steadies the blood sugar of most healthy adults.\n",
        "\n",
        " ",
        "\r\n",
        "\\",
        "```",
        "<sync/>",
        "</async>",
        '<promise topic="a" tokens="10"/>',
        "Well",
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join).filter(str.strip))
def test_a_correct_answer_is_taken_whatever_stands_around_it(response: str) -> None:
    [done] = RuleAnnotator(find_parts, words).annotate([Row("1", "", "", response)])
    annotated = done.row.response
    for around in ("{}", "Here it is:\n\n{}\n", "```\n{}\n```", "Sure!\n```text\n{}\n```\nDone."):
        answer = around.replace("{}", annotated.strip())
        assert accept(answer, response, words) == annotated


def test_promised_lengths_are_counted_here_whatever_the_model_wrote() -> None:
    for wrong in ('tokens="7"', 'tokens="many"', "tokens=20", 'tokens="990"', ""):
        answer = GOOD.replace('tokens="10"', wrong)
        assert accept(answer, PLAIN, words) == GOOD
    assert accept(GOOD, PLAIN, lambda _: 41) == GOOD.replace('"10"', '"50"')
    assert accept(GOOD.replace("/><async>", "><async>"), PLAIN, words) == GOOD


def test_white_space_at_the_edges_of_the_response_is_kept() -> None:
    assert accept(GOOD, f"\n {PLAIN}\t\n", words) == f"\n {GOOD}\t\n"


def test_a_plain_answer_is_an_answer() -> None:
    assert accept(PLAIN, PLAIN, words) == PLAIN


def test_a_literal_tag_must_keep_its_backslash() -> None:
    response = f"{PLAIN} Write <sync/> then."
    assert accept(f"{GOOD} Write \\<sync/> then.", response, words).endswith("\\<sync/> then.")
    with pytest.raises(AnswerError, match=r"goes on with '<sync/> then.', your answer with ' then"):
        accept(f"{GOOD} Write <sync/> then.", response, words)


def test_another_text_is_refused_and_the_place_is_named() -> None:
    with pytest.raises(AnswerError) as found:
        accept(GOOD.replace("oats", "rice"), PLAIN, words)
    assert found.value.kind == "text differs"
    assert str(found.value) == (
        "Without its tags your answer is not the response: behind 'Eat ' the response goes on "
        "with 'oats for breakfast. Sleep well at night.', "
        "your answer with 'rice for breakfast. Sleep well at night.'."
    )
    with pytest.raises(AnswerError, match=r"goes on with 't.', your answer with the end"):
        accept(PLAIN[:-2], PLAIN, words)


BROKEN = {
    "unclosed-async": GOOD.removesuffix("</async>"),
    "space-in-chunk": GOOD.replace("</async> ", " </async>"),
    "async-without-promise": GOOD.replace('<promise topic="diet" tokens="10"/>', ""),
    "promise-without-async": GOOD.replace("<async>Eat", "Eat"),
    "long-topic": GOOD.replace("diet", "what to eat now"),
    "missing-topic": GOOD.replace('topic="diet" ', ""),
    "idle-sync": f"<sync/>{GOOD}",
    "tag-in-chunk": GOOD.replace("oats", "<sync/>oats"),
    "same topic": GOOD.replace("sleep", "diet"),
    "text differs": "I cannot do that.",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_answer_is_refused_by_the_rule_that_it_breaks(kind: str) -> None:
    with pytest.raises(AnswerError) as found:
        accept(BROKEN[kind], PLAIN, words)
    assert found.value.kind == kind


def rows(count: int, response: str = PLAIN) -> list[Row]:
    return [Row(str(n), "s", f"Question {n}?", response) for n in range(count)]


def patient(server: ChatServer, **settings: float) -> Endpoint:
    endpoint = Endpoint(server.base_url, "m", api_key="", max_retries=0, timeout_s=120)
    return replace(endpoint, **settings)  # type: ignore[arg-type]


def results(
    script: Script, todo: Sequence[Row], retries: int = 2, **settings: float
) -> tuple[dict[str, Annotated], list[Body]]:
    """Annotate `todo` with a server that follows `script`; return results by id, and requests."""
    with chat_server(script) as server:
        annotator = LlmAnnotator(patient(server, **settings), words, retries=retries)
        found = list(annotator.annotate(todo))
    assert Counter(one.row.id for one in found) == Counter(row.id for row in todo)
    return {one.row.id: one for one in found}, server.bodies


def one(acts: list[Act], **settings: float) -> tuple[Annotated, list[Body]]:
    found, bodies = results(in_turn(acts), rows(1), **settings)  # type: ignore[arg-type]
    return found["0"], bodies


def test_rows_are_annotated_and_their_cost_is_counted() -> None:
    found, bodies = results(in_turn([GOOD]), rows(20))
    assert {one.row.response for one in found.values()} == {GOOD}
    assert {one.rejected for one in found.values()} == {None}
    cost = {"requests": 1, "prompt_tokens": 10, "completion_tokens": words(GOOD)}
    assert all(one.cost == cost for one in found.values())
    asked = {body["messages"][-1]["content"] for body in bodies}
    assert asked == {f"Question:\n\nQuestion {n}?\n\nResponse:\n\n{PLAIN}" for n in range(20)}


def test_a_wrong_answer_is_asked_for_again_with_the_reason() -> None:
    wrong, broken = PLAIN.replace("oats", "rice"), BROKEN["long-topic"]
    found, bodies = one([wrong, broken, GOOD])
    assert (found.row.response, found.rejected) == (GOOD, None)
    assert found.cost["requests"] == 3
    assert found.cost["retries: text differs"] == 1
    assert found.cost["retries: long-topic"] == 1
    conversation = bodies[2]["messages"]
    assert conversation[: len(bodies[0]["messages"])] == bodies[0]["messages"]
    first, reason, second, rule = conversation[len(bodies[0]["messages"]) :]
    assert (first["content"], second["content"]) == (wrong, broken)
    assert "goes on with 'oats for" in reason["content"]
    assert rule["content"] == (
        "At line 1, column 1: a topic has at most 3 words. "
        "Write the whole annotated response again."
    )


def test_a_row_without_a_right_answer_stays_plain_with_the_last_reason() -> None:
    found, bodies = one([PLAIN.replace("oats", "rice"), "", BROKEN["idle-sync"]], retries=2)
    assert (found.row.response, found.rejected) == (PLAIN, "idle-sync")
    assert found.cost["retries: text differs"] == 2
    assert len(bodies) == found.cost["requests"] == 3
    assert one(["no"], retries=0)[0].rejected == "text differs"


def test_a_rejected_row_keeps_its_literal_tags_escaped() -> None:
    found, bodies = results(in_turn(["no"]), rows(1, "Write <sync/> here."), retries=0)
    assert found["0"].row.response == "Write \\<sync/> here."
    assert bodies[0]["messages"][-1]["content"].endswith("Write \\<sync/> here.")


ENDPOINT_FAILS: dict[str, Act] = {
    "timeout": Raw(wait_s=30),
    "status 500": failure(500),
    "status 429": failure(429, Retry_After="0.1"),
    "no completion": Raw(b'{"choices": [{"mess'),
    "connection": Raw(hang_up=True),
}


@pytest.mark.parametrize("kind", ENDPOINT_FAILS)
def test_a_row_that_the_endpoint_fails_on_stays_plain_and_the_others_do_not(kind: str) -> None:
    def script(_number: int, body: Body) -> Act:
        hard = "Question 1?" in body["messages"][-1]["content"]
        return ENDPOINT_FAILS[kind] if hard else GOOD

    found, _ = results(script, rows(4), timeout_s=2 if kind == "timeout" else 120)
    reasons = {name: one.rejected for name, one in found.items()}
    assert reasons == {"0": None, "1": f"endpoint: {kind}", "2": None, "3": None}
    assert found["1"].row.response == PLAIN


def test_a_server_that_is_busy_is_asked_again_when_it_says() -> None:
    found, bodies = one([failure(429, Retry_After="0.1"), GOOD], max_retries=1)
    assert (found.rejected, found.cost["requests"], len(bodies)) == (None, 2, 2)


def test_no_more_rows_are_asked_about_at_once_than_allowed() -> None:
    together = threading.Barrier(3)

    def script(_number: int, _body: Body) -> Act:
        together.wait(timeout=120)  # nobody is answered before three have asked
        return GOOD

    with chat_server(script) as server:
        annotator = LlmAnnotator(patient(server, concurrency=3), words)
        assert len(list(annotator.annotate(rows(9)))) == 9
    assert server.busiest == 3


def test_a_wrong_key_ends_the_run_at_once_and_keeps_what_was_done() -> None:
    with chat_server(in_turn([GOOD, GOOD, failure(401)])) as server:
        found = LlmAnnotator(patient(server, concurrency=1), words).annotate(rows(9))
        assert [next(found).row.id, next(found).row.id] == ["0", "1"]
        with pytest.raises(EndpointError, match="refuses the key"):
            next(found)
        assert len(server.bodies) == 3


def test_an_endpoint_that_is_down_ends_the_run_and_its_rows_can_be_asked_again() -> None:
    with chat_server(in_turn([GOOD, failure(503)])) as server:
        found = LlmAnnotator(patient(server, concurrency=1), words).annotate(rows(99))
        assert next(found).row.id == "0"
        with pytest.raises(EndpointError, match="status 503"):
            next(found)
        assert len(server.bodies) == 11


def test_a_consumer_may_leave_at_any_time() -> None:
    with chat_server(in_turn([GOOD, Raw(wait_s=30)])) as server:
        found = LlmAnnotator(patient(server), words).annotate(rows(5))
        next(found)
        found.close()  # type: ignore[attr-defined]
        assert next(found, None) is None
