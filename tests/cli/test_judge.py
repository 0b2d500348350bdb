"""`pasta judge train` and `pasta judge eval`, on made-up preferences and a made-up endpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pasta_decoding.eval.judge.base import fold
from pasta_decoding.eval.judge.local import load_judge
from tests.chatserver import Act, Body, chat_server, failure
from tests.cli.conftest import Pasta
from tests.judging import made_up, write_pairs

EVAL = ("judge", "eval", "--no-damaged")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Forty prompts, two pairs each."""
    return write_pairs(tmp_path / "people.jsonl.gz", made_up(40))


def test_a_judge_is_trained_on_three_quarters_of_the_prompts_and_examined_on_the_rest(
    pasta: Pasta, pairs: Path, tmp_path: Path
) -> None:
    judge = tmp_path / "judge.json"
    trained = pasta("judge", "train", "--pairs", pairs, "--no-damaged", "--out", judge)
    held_out = sum(fold(pair.prompt) == 0 for pair in made_up(40))
    assert trained.status == 0
    assert f"{judge}: {80 - held_out} pairs, {40 - held_out // 2} prompts, " in trained.err
    assert load_judge(judge).trained_on == {"people": 80 - held_out}
    found = pasta(*EVAL, "--judge", judge, "--pairs", pairs, "--json")
    [source] = found.object["sources"]
    assert (source["source"], source["asked"], source["missing"]) == ("people", held_out, 0)
    assert source["every"]["accuracy"]["value"] > 0.6
    assert f"{80 - held_out} of 80 pairs left out: {judge} has seen their prompts" in found.err


def test_without_a_judge_every_pair_is_judged_by_one_that_has_not_seen_its_prompt(
    pasta: Pasta, pairs: Path
) -> None:
    found = pasta(*EVAL, "--pairs", pairs)
    assert found.status == 0
    line = next(line for line in found.out.splitlines() if line.startswith("people"))
    assert line.split()[1] == "80"
    assert found.out.endswith("usable for training by every source: yes\n")


def test_answers_damaged_on_purpose_are_sources_like_any_other(pasta: Pasta, pairs: Path) -> None:
    found = pasta("judge", "eval", "--pairs", pairs, "--json")
    sources = {one["source"]: one for one in found.object["sources"]}
    kinds = {"damaged-looped", "damaged-shuffled", "damaged-swapped"}
    assert set(sources) == {"people"} | kinds
    # Made-up words have no order and no subject, so there is only one that can be seen.
    assert sources["damaged-looped"]["every"]["accuracy"]["value"] > 0.9
    assert not found.object["usable_for_training"]


def test_pairs_may_be_examined_without_being_trained_on(
    pasta: Pasta, pairs: Path, tmp_path: Path
) -> None:
    others = write_pairs(tmp_path / "others.jsonl", made_up(30, source="others"))
    alone = pasta(*EVAL, "--pairs", pairs, "--json").object["sources"]
    beside = pasta(*EVAL, "--pairs", pairs, "--unseen", others, "--json").object["sources"]
    assert [one["source"] for one in beside] == ["others", "people"]
    assert beside[1] == alone[0]


def test_a_prompt_that_another_fold_spells_another_way_is_left_out(
    pasta: Pasta, tmp_path: Path
) -> None:
    pairs = made_up(40)
    first = next(pair for pair in pairs if fold(pair.prompt) != fold(pair.prompt.upper()))
    twin = replace(first, prompt=first.prompt.upper())
    path = write_pairs(tmp_path / "people.jsonl", [*pairs, twin])
    found = pasta(*EVAL, "--pairs", path, "--json")
    [source] = found.object["sources"]
    assert (source["asked"], source["missing"]) == (78, 0)
    assert "3 pairs left out: " in found.err


def test_a_limit_takes_the_same_pairs_of_each_source_every_time(
    pasta: Pasta, pairs: Path, tmp_path: Path
) -> None:
    others = write_pairs(tmp_path / "others.jsonl", made_up(30))
    command = [*EVAL, "--pairs", pairs, "--pairs", others, "--limit", "50", "--json"]
    first, second = pasta(*command), pasta(*command)
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
    assert source["calibration_error"] < 0.1
    assert "slope of the calibration: " in found.err


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


@pytest.mark.parametrize("command", ["train", "eval"])
def test_no_pairs_are_told(command: str, pasta: Pasta, tmp_path: Path) -> None:
    out = ["--out", tmp_path / "judge.json"] if command == "train" else []
    message = "pasta: no pairs to judge"
    hint = "Give --pairs FILE or --alpaca-eval FOLDER."
    assert pasta("judge", command, *out).complaint == (2, message, hint)


def test_a_judge_that_has_seen_every_prompt_cannot_be_examined(
    pasta: Pasta, pairs: Path, tmp_path: Path
) -> None:
    judge = tmp_path / "judge.json"
    pasta("judge", "train", "--pairs", pairs, "--no-damaged", "--out", judge)
    seen = write_pairs(tmp_path / "seen.jsonl", [pair for pair in made_up(40) if fold(pair.prompt)])
    found = pasta(*EVAL, "--judge", judge, "--pairs", seen)
    assert found.status == 2
    assert found.err.endswith("pasta: no pair is left\nGive pairs on other prompts.\n")


def test_an_endpoint_without_a_model_is_told(pasta: Pasta, pairs: Path) -> None:
    found = pasta(*EVAL, "--pairs", pairs, "--base-url", "http://localhost:1/v1")
    assert (found.status, found.err) == (2, "pasta: an endpoint needs --model\nGive its name.\n")


def test_a_folder_that_is_not_there_is_told_before_the_work(
    pasta: Pasta, pairs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "nowhere" / "judge.json"
    found = pasta("judge", "train", "--pairs", pairs, "--out", out)
    assert (found.status, found.err) == (
        2,
        f"pasta: cannot write {out}: No such file or directory\n",
    )


def test_nothing_but_the_judge_is_left_behind(pasta: Pasta, pairs: Path, tmp_path: Path) -> None:
    pasta("judge", "train", "--pairs", pairs, "--out", tmp_path / "judge.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["judge.json", pairs.name]
    assert json.loads((tmp_path / "judge.json").read_text())["format"] == "pasta-judge-1"
