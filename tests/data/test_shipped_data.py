"""The data in the repository is what its page says."""

from pathlib import Path

import pytest

from pasta_decoding.data.build import normalised, runs_of_words
from pasta_decoding.data.rows import Row, read_prompts, read_rows
from pasta_decoding.lang.check import check, warn
from pasta_decoding.lang.tree import read, strip

FOLDER = Path(__file__).parents[2] / "data"
ROWS = {
    "annotated_clean": 1233,
    "annotated_own": 1283,
    "annotated_bold": 580,
    "annotated_written": 716,
    "training_sample": 200,
}

PROMPTS = {
    "preference_prompts": 1250,
    "open_prompts": 691,
    "code_prompts": 398,
    "sync_prompts": 120,
    "plain_prompts": 60,
}


def shipped(name: str) -> list[Row]:
    return list(read_rows(FOLDER / f"{name}.jsonl.gz"))


@pytest.mark.parametrize(("name", "count"), ROWS.items())
def test_every_row_is_there_and_well_formed(name: str, count: int) -> None:
    rows = shipped(name)
    assert len(rows) == count
    assert [row.id for row in rows if check(row.response) or warn(row.response)] == []


@pytest.mark.parametrize(("name", "count"), PROMPTS.items())
def test_every_prompt_is_there_once(name: str, count: int) -> None:
    prompts = read_prompts(FOLDER / f"{name}.jsonl")
    assert len(prompts) == len(set(prompts)) == count


def test_no_prompt_of_an_evaluation_shares_eight_words_with_a_row_or_a_prompt_of_training() -> None:
    rows = [row for name in ROWS for row in shipped(name)]
    texts = [text for row in rows for text in (row.prompt_text, strip(read(row.response)))]
    for name in ("preference_prompts", "open_prompts", "code_prompts"):
        texts += read_prompts(FOLDER / f"{name}.jsonl")
    exact = set(map(normalised, texts))
    runs = {run for text in texts for run in runs_of_words(text)}
    for name in ("sync_prompts", "plain_prompts"):
        for prompt in read_prompts(FOLDER / f"{name}.jsonl"):
            assert normalised(prompt) not in exact, prompt
            assert runs.isdisjoint(runs_of_words(prompt)), prompt
