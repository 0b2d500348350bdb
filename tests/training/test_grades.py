"""Stage 2 by somebody's grades: the sheet, what it refuses, and pairs that follow it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.data.asked import asked_of
from pasta_decoding.errors import PastaError
from pasta_decoding.training.config import Weights
from pasta_decoding.training.grades import graded
from pasta_decoding.training.sample import Sample
from pasta_decoding.training.settings import refuse_misfits
from tests.training.test_preference import INSTRUCTIONS, World, lines, tiny

__all__ = ["tiny"]  # a fixture

WHY, HOW = asked_of("Why?"), asked_of("How?")


def sample(prompt: str, number: int, text: str) -> Sample:
    return Sample(
        prompt=prompt,
        number=number,
        seed=0,
        prompt_ids=(1,),
        segments=(),
        end=None,
        annotated=text,
        plain_tokens=1,
        critical_path=1,
        truncated=False,
        hit_limit=False,
        interventions=0,
        fed_tokens=1,
    )


TAGGED = '<promise topic="one" tokens="10"/>\n<async>So.</async>'
SAMPLES = [
    sample(WHY.id, 0, TAGGED),
    sample(WHY.id, 1, "No."),
    sample(WHY.id, 2, "No."),
    sample(HOW.id, 0, "Thus."),
]


def grade(sheet: Path, grades: list[Any]) -> None:
    rows = [line | {"grades": one} for line, one in zip(lines(sheet), grades, strict=True)]
    # As an editor leaves it: no line break at the end.
    sheet.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def test_the_sheet_has_each_text_once_without_tags_and_waits_for_grades(tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.jsonl"
    with pytest.raises(PastaError, match="no grades for answers to 2 of 2 prompts") as caught:
        graded(sheet, [WHY, HOW], SAMPLES, seed=0)
    assert caught.value.hint is not None
    assert "the same command then goes on" in caught.value.hint
    first, second = lines(sheet)
    assert (first["prompt"], second["prompt"]) == ("Why?", "How?")
    assert sorted(first["answers"]) == sorted({one.text for one in SAMPLES[:3]})
    assert second["answers"] == ["Thus."]
    assert "<" not in sheet.read_text(encoding="utf-8")

    grade(sheet, [[4, 2.5], None])
    with pytest.raises(PastaError, match="1 of 2 prompts"):
        graded(sheet, [WHY, HOW], SAMPLES, seed=0)
    grade(sheet, [[4, 2.5], [7]])
    rate = graded(sheet, [WHY, HOW], SAMPLES, seed=0)
    assert list(rate("Why?", first["answers"])) == [4, 2.5]
    assert list(rate("How?", ["Thus."])) == [7]


def test_answers_come_in_an_order_of_chance(tmp_path: Path) -> None:
    many = [sample(WHY.id, number, f"{number}.") for number in range(20)]
    orders = []
    for seed in (0, 1):
        with pytest.raises(PastaError):
            graded(tmp_path / f"{seed}.jsonl", [WHY], many, seed)
        orders.append(lines(tmp_path / f"{seed}.jsonl")[0]["answers"])
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    "wrong", [[1], [1, 2, 3], 5, ["good", "bad"], [1, float("nan")], [1, None]]
)
def test_a_line_with_wrong_grades_is_named(tmp_path: Path, wrong: Any) -> None:
    sheet = tmp_path / "sheet.jsonl"
    with pytest.raises(PastaError, match="no grades"):
        graded(sheet, [WHY, HOW], SAMPLES, seed=0)
    grade(sheet, [wrong, [1]])
    before = sheet.read_bytes()
    with pytest.raises(PastaError, match=r"sheet\.jsonl:1: not a line with grades"):
        graded(sheet, [WHY, HOW], SAMPLES, seed=0)
    assert sheet.read_bytes() == before


def test_a_round_waits_for_grades_and_prefers_what_they_prefer(tiny: World, tmp_path: Path) -> None:
    sheet, out = tmp_path / "sheet.jsonl", tmp_path / "run"
    config = replace(
        tiny.config,
        grades=str(sheet),
        weights=Weights(lambda_=None, length_control=False),
    )
    with pytest.raises(PastaError, match="has no grades"):
        tiny.train(out, config)
    loaded = len(tiny.loaded)
    grade(sheet, [[float(len(one)) for one in line["answers"]] for line in lines(sheet)])
    tiny.train(out, config)
    assert len(tiny.loaded) == loaded, "nothing is sampled again"

    ids = {asked_of(one).id for one in INSTRUCTIONS}
    texts = {
        (one["prompt"], one["number"]): Sample(**one | {"segments": ()}).text
        for one in lines(out / "round-1/samples.jsonl")
    }
    pairs = lines(out / "round-1/pairs.jsonl")
    assert pairs
    assert {pair["prompt"] for pair in pairs} <= ids
    sound = {(p["prompt"], p["number"]) for p in lines(out / "round-1/parts.jsonl") if p["sound"]}
    for pair in pairs:
        best = len(texts[pair["prompt"], pair["best"]])
        assert best == max(len(texts[key]) for key in sound if key[0] == pair["prompt"])
    assert (out / "adapter" / "pasta.json").exists()

    before = (out / "round-1/parts.jsonl").read_bytes()
    grade(sheet, [[1.0] * len(line["answers"]) for line in lines(sheet)])
    with pytest.raises(PastaError, match="are not those that this run began with"):
        tiny.train(out, config)
    assert (out / "round-1/parts.jsonl").read_bytes() == before


def test_a_sheet_is_no_archive(tiny: World) -> None:
    with pytest.raises(PastaError, match=r"sheet\.jsonl\.gz is for people to write in"):
        refuse_misfits(replace(tiny.config, grades="sheet.jsonl.gz"))


@pytest.mark.parametrize("other", [{"rounds": 2}, {"check": "two.jsonl"}])
def test_grades_are_of_one_round_and_no_check(tiny: World, other: dict[str, Any]) -> None:
    with pytest.raises(PastaError, match="of one round's samples"):
        refuse_misfits(replace(tiny.config, grades="sheet.jsonl", **other))
