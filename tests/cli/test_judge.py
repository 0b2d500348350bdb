"""`pasta judge`: made-up preferences, a made-up endpoint, and pairs for people."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.chatserver import Act, Body, chat_server, failure
from tests.cli.conftest import Pasta
from tests.judging import made_up, write_pairs
from tests.runfolders import PLAIN, failed, parallel, record, write_run

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


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs beside the baseline: one wrote the other's first answer, and failed once."""
    write_run(tmp_path / "runs/sequential", "sequential", [record(n) for n in range(8)])
    ours = [parallel(n, text=f"{PLAIN} {n}") for n in range(8)]
    write_run(tmp_path / "runs/pasta", "pasta", ours)
    others = [ours[0], *(parallel(n, text=f"{n}! {PLAIN}") for n in range(1, 7)), failed(7)]
    write_run(tmp_path / "runs/pasta-fast", "pasta", others)
    return tmp_path / "runs"


def sheet(path: Path) -> list[dict[str, str | None]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_people_get_every_pair_once_and_cannot_tell_who_wrote_what(
    pasta: Pasta, runs: Path
) -> None:
    out = runs.parent / "pairs.jsonl"
    assert pasta("judge", "pairs", runs, "-o", out).err == "14 pairs\n"
    lines = sheet(out)
    assert [sorted(line) for line in lines] == 14 * [
        ["label", "prompt", "response_a", "response_b"]
    ]
    assert {line["label"] for line in lines} == {None}
    about = Counter(line["prompt"] for line in lines)
    assert about == {f"What about {n}?": 1 if n in (0, 7) else 2 for n in range(8)}
    first = [str(line["response_a"]).startswith("This") for line in lines]
    assert 0 < sum(first) < 14
    assert [line["prompt"] for line in lines] != sorted(str(line["prompt"]) for line in lines)


def test_in_both_orders_the_second_half_is_the_first_the_other_way_round(
    pasta: Pasta, runs: Path
) -> None:
    out = runs.parent / "pairs.jsonl"
    pasta("judge", "pairs", runs, "-o", out, "--both-orders")
    shown = [(line["prompt"], line["response_a"], line["response_b"]) for line in sheet(out)]
    swapped = [(prompt, b, a) for prompt, a, b in shown[14:]]
    assert len(shown) == 28
    assert Counter(shown[:14]) == Counter(swapped)


def test_what_people_said_is_not_written_over(pasta: Pasta, runs: Path) -> None:
    out = runs.parent / "pairs.jsonl"
    out.write_text("{}\n")
    status, message, hint = pasta("judge", "pairs", runs, "-o", out).complaint
    assert (status, message) == (2, f"pasta: {out} is there already")
    assert hint == "Somebody may have judged some of it; move it away, or give another name."
    assert out.read_text() == "{}\n"
    packed = pasta("judge", "pairs", runs, "-o", runs.parent / "pairs.jsonl.gz").complaint
    assert packed[1:] == (f"pasta: {out}.gz is for people to write in", "Leave the .gz out.")


def test_the_baseline_alone_is_nothing_to_compare(pasta: Pasta, runs: Path) -> None:
    found = pasta("judge", "pairs", runs / "sequential", "-o", runs.parent / "pairs.jsonl")
    assert found.complaint[:2] == (2, "pasta: no two answers to compare")
