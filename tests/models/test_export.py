"""Exports under tools that do not know the language: they write sequentially, and are told why."""

import re
import resource
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from huggingface_hub import ModelCard

from pasta_decoding.errors import PastaError
from pasta_decoding.models.catalog import BaseAlone
from pasta_decoding.models.checkpoint import read_checkpoint
from pasta_decoding.models.export import export_hf, model_card
from pasta_decoding.models.gguf_writer import write_gguf
from pasta_decoding.models.load import load_model
from tests.checkpoint import TinyCheckpoint
from tests.docs.pages import parse

ADAPTERS = Path(__file__).parents[2] / "adapters"
OWN = """---
license: mit
language: [en, de]
tags: [small, pasta-decoding]
---

# mine

Words with a [link](../else.md) and an [address](https://example.org).
"""


@pytest.mark.parametrize("name", ["balanced", "sequential"])
def test_the_card_of_a_shipped_adapters_export_is_one_that_the_hub_reads(name: str) -> None:
    text = model_card(read_checkpoint(ADAPTERS / name), ADAPTERS / name)
    card: Any = ModelCard(text)
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (card.data.license, card.data.language) == ("apache-2.0", ["en"])
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.eval_results, "its figures"
    assert "](../" not in card.text, "nothing lies beside a merged checkpoint"
    commands = re.findall(r"^pasta (.*)", card.text.partition("## ")[0], re.M)
    assert len(commands) == 2
    for command in commands:
        parse(shlex.split(command))


def test_a_card_keeps_text_and_metadata_of_the_adapters_card(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(ADAPTERS / "balanced")
    (tmp_path / "README.md").write_text(OWN, encoding="utf-8")
    text = model_card(checkpoint, tmp_path)
    metadata: Any = ModelCard(text).data
    assert (metadata.license, metadata.language) == ("mit", ["en", "de"])
    assert metadata.tags == ["pasta-decoding", "parallel-decoding", "custom_generate"]
    assert "Words with a link and an [address](https://example.org)." in text
    assert ", ".join(map(str, sorted(checkpoint.control.ids))) in text
    assert "--join text" not in text
    local = replace(checkpoint, base=replace(checkpoint.base, name="./base"), joins=("kv",))
    bare = model_card(local)
    assert "base_model" not in bare, "a folder is no name on the hub"
    assert "license" not in bare
    assert "--adapter THIS_FOLDER --join text\n" in bare, "it was not trained for servers"


@pytest.mark.parametrize("front", ["license: [mit", "model-index: [{name: x}]"])
def test_broken_metadata_are_told_with_their_file(front: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n\n# x\n", encoding="utf-8")
    with pytest.raises(PastaError, match=r"README\.md cannot be read: "):
        model_card(read_checkpoint(ADAPTERS / "balanced"), tmp_path)


def test_a_gguf_names_what_must_not_be_sampled(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    loaded = load_model(tiny_checkpoint.source)
    write_gguf(loaded, tmp_path / "tiny.gguf")
    fields = GGUFReader(tmp_path / "tiny.gguf").fields
    ids = sorted(loaded.checkpoint.control.ids)
    assert fields["tokenizer.ggml.suppress_tokens"].contents() == ids
    description = fields["general.description"].contents()
    assert f"must never sample the control tokens ({','.join(map(str, ids))})" in description


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    """The library that writes the weights has an error of its own."""
    loaded = load_model(BaseAlone(tiny_checkpoint.base))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(PastaError, match=rf"^cannot write {tmp_path / 'out'}: .*too large"):
            export_hf(loaded, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
