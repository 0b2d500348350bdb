"""The judge: verdicts in both orders, their confidence, and an endpoint that fails in between."""

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.data.endpoint import Endpoint, EndpointError
from pasta_decoding.data.judge import AnswerPair, Preference, judge_pairs
from pasta_decoding.errors import PastaError
from tests.chatserver import Act, Body, ChatServer, Raw, Script, chat_server, failure, in_turn

GOOD = "Oats."
BAD = "Oats oats oats"
NO_VERDICT = Preference(None, None)
NO_LOGPROBS = Raw(b'{"error": {"message": "You may not request logprobs"}}', 403)


def pair(number: int = 0, answer: str = GOOD, rival: str = BAD) -> AnswerPair:
    return AnswerPair(str(number), f"Breakfast {number}?", answer, rival)


def judge(
    server: ChatServer, pairs: Sequence[AnswerPair], path: Path, **settings: Any
) -> list[Preference]:
    endpoint = Endpoint(server.base_url, "m", max_retries=0, concurrency=2)
    return judge_pairs(endpoint, pairs, path, **settings)


def judged(script: Script, pairs: Sequence[AnswerPair], path: Path) -> list[Preference]:
    with chat_server(script) as server:
        return judge(server, pairs, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "verdicts.jsonl"


def reads_good_first(body: Body) -> bool:
    question = body["messages"][0]["content"]
    return bool(question.index(f"\n{GOOD}\n") < question.index(f"\n{BAD}\n"))


def prefers_good(_number: int, body: Body) -> Act:
    return "A" if reads_good_first(body) else "B"


def with_logprobs(text: str, *tokens_at: dict[str, float]) -> Raw:
    """A completion with the probabilities of the tokens at each place, the written one first."""
    content = []
    for probabilities in tokens_at:
        tokens = [{"token": token, "logprob": math.log(p)} for token, p in probabilities.items()]
        content.append(tokens[0] | {"top_logprobs": tokens[::-1]})
    choice = {"message": {"content": text}, "logprobs": {"content": content}}
    return Raw(json.dumps({"choices": [choice]}).encode())


# What a verdict is worth


def test_a_preference_is_the_mean_of_both_orders_and_says_whether_they_agree(path: Path) -> None:
    other = pair(1, answer=BAD, rival=GOOD)
    assert judged(prefers_good, [pair(), other], path) == [
        Preference(1.0, agreed=True),
        Preference(0.0, agreed=True),
    ]
    assert judged(in_turn(["A"]), [pair(2)], path) == [Preference(0.5, agreed=False)]
    assert judged(in_turn(["C"]), [pair(3)], path) == [Preference(0.5, agreed=True)]


def test_the_probability_of_the_verdict_is_its_confidence_and_is_requested_once(path: Path) -> None:
    def script(_number: int, body: Body) -> Act:
        if reads_good_first(body):
            return with_logprobs("A", {"A": 0.6, " A": 0.1, "B": 0.2, "C": 0.1})
        thought = {"I": 0.5, "A": 0.5}
        return with_logprobs("Hm\nVerdict: B", thought, {" b": 0.3, "A": 0.5, "The": 0.2})

    with chat_server(script) as server:
        [preference] = judge(server, [pair()], path)
    assert preference.probability == pytest.approx(((1 + 0.7 - 0.2) / 2 + 1 - (1 + 0.2) / 2) / 2)
    assert preference.agreed is False
    assert len(server.bodies) == 2
    assert all(body["logprobs"] and body["temperature"] == 1 for body in server.bodies)


def test_without_log_probabilities_repeated_verdicts_are_the_confidence(path: Path) -> None:
    verdicts = {True: iter("ABA"), False: iter(["**B**", "Both are weak.\n(c)", "Verdict: B."])}

    def script(_number: int, body: Body) -> Act:
        return NO_LOGPROBS if "logprobs" in body else next(verdicts[reads_good_first(body)])

    [preference] = judged(script, [pair()], path)
    assert preference.probability == pytest.approx((2 / 3 + 5 / 6) / 2)
    assert preference.agreed is True


def test_answers_that_read_the_same_are_a_tie_that_nobody_is_asked_about(path: Path) -> None:
    with chat_server(in_turn(["A"])) as server:
        preferences = judge(server, [pair(answer=GOOD, rival=f"{GOOD}\n")], path)
    assert (preferences, server.bodies) == ([Preference(0.5, agreed=True)], [])


@pytest.mark.parametrize("reply", ["", "D", "Neither A nor B", "I prefer the one about oats, a"])
def test_a_reply_without_a_verdict_is_asked_for_again_and_then_is_none(
    path: Path, reply: str
) -> None:
    with chat_server(in_turn([reply])) as server:
        assert judge(server, [pair()], path) == [NO_VERDICT]
        assert len(server.bodies) == 4
        assert judge(server, [pair()], path) == [NO_VERDICT]
        assert len(server.bodies) == 4
    assert judged(in_turn([reply, "C"]), [pair(1)], path) == [Preference(0.5, agreed=True)]


# The file of verdicts


def test_what_the_file_holds_is_not_asked_again(path: Path) -> None:
    pairs = [pair(number) for number in range(5)]
    with chat_server(prefers_good) as server:
        progress: list[int] = []
        first = judge(server, [*pairs, pairs[0]], path, progress=progress.append)
        assert (len(server.bodies), sum(progress)) == (2 * 5 * 3, 12)
        contents = path.read_text()
        path.write_text(contents[:-9])  # a kill while the last line was written
        assert judge(server, [*pairs, pairs[0]], path) == first
        assert len(server.bodies) == 2 * 5 * 3 + 1
        changed = AnswerPair("0", pairs[0].instruction, GOOD, "Rice.")
        judge(server, [changed, *pairs], path, verdicts=1)
        assert len(server.bodies) == 2 * 5 * 3 + 1 + 2
    assert judge(server, pairs, path) == first[:5], "the server is gone"


@pytest.mark.parametrize("line", ['{"key": "x"}', "[]", "first: 1.5", 'first: "A"'])
def test_a_file_of_something_else_is_refused_and_left_alone(path: Path, line: str) -> None:
    if line.startswith("first: "):
        reply = {"key": "k", "id": "0", "order": "o", "judge": "m", "has_logprobs": True}
        line = json.dumps(reply | {"first": json.loads(line.removeprefix("first: "))})
    path.write_text(line + "\n")
    with pytest.raises(PastaError, match=r"verdicts\.jsonl:1: not a"):
        judged(prefers_good, [pair()], path)
    assert path.read_text() == line + "\n"


# A bad endpoint


def test_comparisons_run_at_the_same_time(path: Path) -> None:
    together = threading.Barrier(2)

    def script(number: int, body: Body) -> Act:
        together.wait(timeout=120)
        return prefers_good(number, body)

    with chat_server(script) as server:
        judge(server, [pair(number) for number in range(3)], path)
    assert server.busiest == 2


@pytest.mark.parametrize(
    "broken", [failure(401), failure(429), failure(503), Raw(b"<html>"), Raw(hang_up=True)]
)
def test_an_endpoint_that_breaks_down_loses_nothing_and_the_next_run_goes_on(
    path: Path, broken: Raw
) -> None:
    pairs = [pair(number) for number in range(12)]

    def breaks_down(number: int, body: Body) -> Act:
        return prefers_good(number, body) if number < 20 else broken

    with chat_server(breaks_down) as server:
        with pytest.raises(EndpointError) as caught:
            judge(server, pairs, path)
        assert "\n" not in str(caught.value)
    replies = len(path.read_text().splitlines())
    assert replies in (19, 20), "a refusal ends the run while one more reply is on its way"
    with chat_server(prefers_good) as server:
        assert judge(server, pairs, path) == [Preference(1.0, agreed=True)] * 12
        assert len(server.bodies) == 12 * 2 * 3 - replies


def test_a_pair_that_the_endpoint_fails_on_has_no_verdict_until_the_next_run(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(number: int, body: Body) -> Act:
        hard = "Breakfast 1?" in body["messages"][0]["content"]
        return failure(400) if hard else prefers_good(number, body)

    pairs = [pair(0), pair(1)]
    with chat_server(script) as server:
        assert judge(server, pairs, path) == [Preference(1.0, agreed=True), NO_VERDICT]
        message = f"2 of 4 comparisons were not answered, the first: {server.base_url} failed"
        assert caplog.messages[0].startswith(message)
        server.script = prefers_good
        assert judge(server, pairs, path)[1] == Preference(1.0, agreed=True)
