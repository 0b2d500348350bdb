"""The data in the repository is what its page says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pasta_decoding.data.asked import read_all_asked, read_asked
from pasta_decoding.data.contamination import normalised, runs_of_words
from pasta_decoding.data.dataset import Row, is_held_out, read_rows
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Sync, read, strip

FOLDER = Path(__file__).parents[2] / "data"
ROWS = {
    "annotated_clean": 1233,
    "annotated_written": 716,
    "annotated_demands": 1600,
    "training_sample": 200,
}

ASKED = "preference_prompts.jsonl", "open_prompts.jsonl"
"""Prompts that models of ours answered, to learn from what they wrote."""


def shipped(name: str) -> list[Row]:
    return list(read_rows(FOLDER / f"{name}.jsonl.gz"))


@pytest.mark.parametrize(("name", "count"), ROWS.items())
def test_every_row_is_there_and_well_formed(name: str, count: int) -> None:
    rows = shipped(name)
    assert len(rows) == count
    assert [row.id for row in rows if check(row.response)] == []


def test_the_training_sample_holds_nothing_that_is_for_judging() -> None:
    held_out = {row.id for row in shipped("annotated_clean") if is_held_out(row.id)}
    assert len(held_out) == 296
    assert held_out.isdisjoint(row.id for row in shipped("training_sample"))


def test_each_part_of_the_written_rows_has_the_tags_that_its_source_says() -> None:
    found = Counter(
        (
            row.source,
            any(isinstance(n, Chunk) for n in tree),
            sum(isinstance(n, Sync) for n in tree),
        )
        for row in shipped("annotated_written")
        for tree in [read(row.response)]
    )
    assert found == {
        ("written/sync", True, 1): 260,
        ("written/parts", True, 0): 295,
        ("written/plain", False, 0): 161,
    }


@pytest.mark.parametrize(("name", "count", "plain"), [("checked", 200, 40), ("unseen", 450, 89)])
def test_the_prompts_for_checking_can_all_be_checked(name: str, count: int, plain: int) -> None:
    asked = read_asked(FOLDER / f"{name}_prompts.jsonl")
    assert (len(asked), sum(one.plain for one in asked)) == (count, plain)
    assert all(one.checks for one in asked)
    assert len({one.name for one in asked}) == len({one.instruction for one in asked}) == count


def test_the_prompts_for_syncs_are_half_of_each_kind() -> None:
    asked = read_asked(FOLDER / "sync_prompts.jsonl")
    assert Counter(one.needs_sync for one in asked) == {True: 60, False: 60}
    assert not any(one.behind for one in asked if not one.needs_sync)


def test_the_prompts_of_stage_2_say_what_their_answers_have_to_do() -> None:
    asked = read_all_asked(FOLDER / "preference_prompts.jsonl")
    assert len({one.id for one in asked}) == len(asked) == 1250
    counts = sum(bool(one.checks) for one in asked), sum(one.plain for one in asked)
    assert (*counts, sum(one.needs_sync is True for one in asked)) == (943, 289, 90)


def test_the_open_prompts_are_questions_alone() -> None:
    asked = read_all_asked(FOLDER / "open_prompts.jsonl")
    assert len({one.id for one in asked}) == len({one.instruction for one in asked}) == 691
    assert not any(one.checks or one.plain or one.needs_sync for one in asked)


def test_no_prompt_of_an_evaluation_shares_eight_words_with_a_row() -> None:
    rows = [row for name in ROWS for row in shipped(name)]
    exact = {normalised(row.instruction) for row in rows}
    texts = [text for row in rows for text in (row.asked, strip(read(row.response)))]
    sampled = [one.instruction for name in ASKED for one in read_all_asked(FOLDER / name)]
    exact |= set(map(normalised, sampled))
    runs = {run for text in [*texts, *sampled] for run in runs_of_words(text)}
    for name in ("checked_prompts", "unseen_prompts", "sync_prompts"):
        for one in read_asked(FOLDER / f"{name}.jsonl"):
            assert normalised(one.instruction) not in exact, one.name
            assert runs.isdisjoint(runs_of_words(one.instruction)), one.name


def test_no_unseen_prompt_shares_five_words_with_a_prompt_that_was_looked_at() -> None:
    seen = [row.instruction for name in ROWS for row in shipped(name)]
    seen += [one.instruction for name in ASKED for one in read_all_asked(FOLDER / name)]
    seen += [one.instruction for one in read_asked(FOLDER / "checked_prompts.jsonl")]
    runs = {run for text in seen for run in _fives(text)}
    shared = [
        one.name
        for one in read_asked(FOLDER / "unseen_prompts.jsonl")
        if not runs.isdisjoint(_fives(one.instruction))
    ]
    assert shared == []


def _fives(text: str) -> set[tuple[str, ...]]:
    words = normalised(text).split()
    return {tuple(words[first : first + 5]) for first in range(len(words) - 4)}
