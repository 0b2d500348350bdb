"""The model card of an export: what the hub reads, what a reader runs, what the adapter said."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from pasta_decoding.errors import PastaError
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.card import INTERVAL, AdapterCard, front_matter, model_card, read_card
from tests.docs.pages import parse

ADAPTERS = Path(__file__).parents[2] / "adapters"
SHIPPED = sorted(path.parent.name for path in ADAPTERS.glob("*/pasta.json"))
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
OWN = """---
license: mit
language: [en, de]
datasets: [someone/answers]
tags: [small, pasta-decoding]
model-index:
- name: mine
  results:
  - task: {type: text-generation}
    dataset: {type: someone/prompts, name: Ten prompts}
    metrics:
    - {type: own_speedup, name: own speedup, value: 1.5, args: {interval_95: [1.25, 1.75]}}
    - {type: hit_limit, value: 3}
---

# mine

Words about it, with a [link](../else.md).

## Data

Answers of [someone](https://example.org/answers), see [the log](../log.md#data).

## Secrets

Not for the merged card.
"""


def written(name: str) -> ModelCard:
    """The card of a shipped adapter's export, read as the hub's own library reads it."""
    folder = ADAPTERS / name
    return ModelCard(card_of(read_card(folder), checkpoints.load(folder)))


def card_of(adapter: AdapterCard, checkpoint: checkpoints.Checkpoint) -> str:
    return model_card(checkpoint, adapter, banned=[3, 4], gguf_key="some.key")


@pytest.fixture
def own(tmp_path: Path) -> AdapterCard:
    (tmp_path / "README.md").write_text(OWN, encoding="utf-8")
    return read_card(tmp_path)


@pytest.fixture
def checkpoint() -> checkpoints.Checkpoint:
    return checkpoints.load(ADAPTERS / "balanced")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_adapter_has_all_that_a_hub_page_needs(name: str) -> None:
    card: Any = written(name)
    said = card.data
    assert said.base_model == BASE
    assert said.license in ("apache-2.0", "cc-by-sa-4.0")
    assert said.language == ["en"]
    assert (said.library_name, said.pipeline_tag) == ("transformers", "text-generation")
    assert {"pasta-decoding", "custom_generate"} <= set(said.tags)
    assert said.eval_results, "its figures"
    assert "## Data" in card.text
    assert "## What to expect" in card.text
    assert "](../" not in card.text, "nothing lies beside a merged checkpoint"


@pytest.mark.parametrize("name", SHIPPED)
def test_the_card_of_an_adapter_itself_is_one_that_the_hub_reads(name: str) -> None:
    said: Any = ModelCard.load(ADAPTERS / name / "README.md").data
    assert (said.base_model, said.library_name) == (BASE, "peft")
    assert said.model_name == name


@pytest.mark.parametrize("name", SHIPPED)
def test_figures_of_a_shipped_adapter_are_told_with_the_prompts_that_they_are_of(name: str) -> None:
    card: Any = written(name)
    for figure in card.data.eval_results:
        assert f"{figure.dataset_name}:\n" in card.text
        assert f"| {figure.metric_name} | {figure.metric_value}" in card.text
        low, high = (figure.metric_args or {}).get(INTERVAL, (0, 100))
        assert low <= figure.metric_value <= high


def test_an_adapter_says_what_holds_for_the_merged_model(
    own: AdapterCard, checkpoint: checkpoints.Checkpoint
) -> None:
    text = card_of(own, checkpoint)
    said: Any = ModelCard(text).data
    assert (said.license, said.language) == ("mit", ["en", "de"])
    assert said.datasets == ["someone/answers"]
    assert said.tags == ["pasta-decoding", "parallel-decoding", "custom_generate", "small"]
    assert "\nTen prompts:\n" in text
    assert "| own speedup | 1.5 (1.25 to 1.75) |\n| hit_limit | 3 |" in text
    assert "Answers of [someone](https://example.org/answers), see the log.\n" in text
    assert "Secrets" not in text
    assert "`mit`, as of what was trained" in text


def test_without_a_card_nothing_is_claimed(
    tmp_path: Path, checkpoint: checkpoints.Checkpoint
) -> None:
    own = read_card(tmp_path)
    assert own == AdapterCard()
    text = card_of(own, checkpoint)
    said: Any = ModelCard(text).data
    assert said.license is None
    assert "write `license` into the lines at the top" in text
    assert "## Figures" not in text
    assert "## Data" not in text


def test_a_folder_is_no_name_on_the_hub(checkpoint: checkpoints.Checkpoint) -> None:
    here = replace(checkpoint, base=replace(checkpoint.base, name="./models/base"))
    assert "base_model" not in front_matter(here, AdapterCard())


def test_the_recipe_for_a_server_says_whether_the_model_was_trained_for_it() -> None:
    folder = ADAPTERS / "balanced"
    card, both = read_card(folder), checkpoints.load(folder)
    trained, untrained = (
        ModelCard(card_of(card, replace(both, joins=joins))).text for joins in (both.joins, ("kv",))
    )
    for text in (trained, untrained):
        assert "pip install --no-deps pasta-decoding\nvllm serve THIS_FOLDER " in text
        assert "pasta_decoding.vllm" in text
    assert "--adapter THIS_FOLDER\n" in trained
    assert "was not trained for the\njoin" not in trained
    assert "--adapter THIS_FOLDER --join text\n" in untrained
    assert "was not trained for the\njoin `text`" in untrained


@pytest.mark.parametrize("name", ["balanced", "sequential"])
def test_its_command_lines_are_taken_by_the_parser(name: str) -> None:
    lines = re.findall(r"^pasta (.*)", written(name).text, re.M)
    assert len(lines) == 2
    for line in lines:
        parse(shlex.split(line))


def test_a_tag_may_be_a_text_or_missing_and_a_card_must_be_one(
    checkpoint: checkpoints.Checkpoint, tmp_path: Path
) -> None:
    for tags, own in (("chat", ["chat"]), ("", []), ("[chat, small]", ["chat", "small"])):
        (tmp_path / "README.md").write_text(f"---\ntags: {tags}\nlicense: mit\n---\n\n# x\n")
        found = front_matter(checkpoint, read_card(tmp_path))["tags"]
        assert found == ["pasta-decoding", "parallel-decoding", "custom_generate", *own]
    (tmp_path / "README.md").write_bytes(b"\xff")
    with pytest.raises(PastaError, match=r"README.md cannot be read"):
        read_card(tmp_path)


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("license: [mit", "cannot be read"),
        ("- mit", "it names nothing"),
        ("model-index: [{name: x}]", "model-index: KeyError"),
        ("model-index: 3", "model-index: TypeError"),
    ],
)
def test_broken_metadata_are_told_with_their_file(front: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n\n# x\n", encoding="utf-8")
    with pytest.raises(PastaError, match=said) as caught:
        read_card(tmp_path)
    assert str(tmp_path / "README.md") in str(caught.value)
