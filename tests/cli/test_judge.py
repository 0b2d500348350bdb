"""`pasta judge eval`, on made-up preferences and a made-up endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chatserver import Act, Body, chat_server, failure
from tests.cli.conftest import Pasta
from tests.judging import made_up, write_pairs

EVAL = ("judge", "eval")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Forty prompts, two pairs each."""
    return write_pairs(tmp_path / "people.jsonl.gz", made_up(40))


def test_a_limit_takes_the_same_pairs_of_each_source_every_time(
    pasta: Pasta, pairs: Path, tmp_path: Path
) -> None:
    others = write_pairs(tmp_path / "others.jsonl", made_up(30))
    with chat_server(first_is_varied) as server:
        where = ["--base-url", server.base_url, "--model", "m"]
        files = [("--verdicts", tmp_path / name) for name in ("first.jsonl", "second.jsonl")]
        command = [*EVAL, *where, "--pairs", pairs, "--pairs", others, "--limit", "50", "--json"]
        first, second = (pasta(*command, *file) for file in files)
    assert first.out == second.out
    assert {one["source"]: one["asked"] for one in first.object["sources"]} == {
        "people": 50,
        "others": 50,
    }


def first_is_varied(_number: int, body: Body) -> Act:
    """Prefer the answer that does not repeat its first sentence."""
    text: str = body["messages"][0]["content"]
    first = text.partition("Answer A:\n<answer>\n")[2].partition("\n</answer>")[0]
    sentence = first.partition(".")[0]
    return "B" if first.count(sentence) > 1 else "A"


def test_an_endpoint_is_asked_in_both_orders_and_goes_on_from_its_verdicts(
    pasta: Pasta, pairs: Path, tmp_path: Path
) -> None:
    verdicts = tmp_path / "verdicts.jsonl"
    with chat_server(first_is_varied) as server:
        where = ["--base-url", server.base_url, "--model", "m", "--verdicts", verdicts]
        found = pasta(*EVAL, "--pairs", pairs, *where, "--json")
        asked = len(server.bodies)
        again = pasta(*EVAL, "--pairs", pairs, *where, "--json")
        assert len(server.bodies) == asked == 160
    assert found.out == again.out
    [source] = found.object["sources"]
    assert source["every"]["accuracy"]["value"] > 0.8


def test_missing_verdicts_are_counted_and_explained(
    pasta: Pasta, pairs: Path, tmp_path: Path
) -> None:
    def broken(number: int, body: Body) -> Act:
        return failure(400) if number < 8 else first_is_varied(number, body)

    with chat_server(broken) as server:
        where = ["--base-url", server.base_url, "--model", "m"]
        file = ["--verdicts", tmp_path / "verdicts.jsonl"]
        found = pasta(*EVAL, "--pairs", pairs, *where, *file, "--json")
    [source] = found.object["sources"]
    assert 4 / 80 <= source["missing"] <= 8 / 80
    assert "no verdict (8 times): " in found.err


def test_no_pairs_are_told(pasta: Pasta) -> None:
    message = "pasta: no pairs to judge"
    hint = "Give --pairs FILE or --alpaca-eval FOLDER."
    found = pasta(*EVAL, "--base-url", "http://localhost:1/v1", "--model", "m")
    assert found.complaint == (2, message, hint)


def test_a_judge_is_an_endpoint(pasta: Pasta, pairs: Path) -> None:
    found = pasta(*EVAL, "--pairs", pairs)
    assert found.status == 2
    assert "Missing option '--base-url'" in found.err
