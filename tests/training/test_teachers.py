"""Tags from one adapter, text from another: the targets, the loss, and a whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.models.loading import load_model
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.score import score_layouts
from pasta_decoding.training.sft import compile_rows, train_sft
from pasta_decoding.training.teachers import STAKES, chosen_tokens, distance, mixed
from tests.checkpoint import END_ID, TinyCheckpoint, make_adapter
from tests.training.test_sft import CONFIG, ROWS

TEXT = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 3.0, 1.0]])
TAGS = torch.tensor([[0.0, 4.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0]])
CHOSEN = torch.tensor([3, 1])


def test_tags_are_as_likely_as_one_says_and_the_rest_as_the_other() -> None:
    targets = mixed(TEXT, TAGS, CHOSEN)
    assert torch.allclose(targets.sum(dim=-1), torch.ones(2))
    assert torch.allclose(targets[:, CHOSEN], TAGS.softmax(dim=-1)[:, CHOSEN])
    ratio = targets[:, 0] / targets[:, 2]
    assert torch.allclose(ratio, torch.exp(TEXT[:, 0] - TEXT[:, 2]))


def test_who_says_the_same_has_no_distance_and_tags_weigh_more() -> None:
    targets = mixed(TEXT, TAGS, CHOSEN)
    assert torch.allclose(distance(targets.log(), targets, CHOSEN), torch.zeros(2), atol=1e-6)
    logits = torch.zeros(2, 4)
    divergence = (targets * (targets.log() - logits.log_softmax(dim=-1))).sum(dim=-1)
    weight = 1 + STAKES * targets[:, CHOSEN].sum(dim=-1)
    assert torch.allclose(distance(logits, targets, CHOSEN), divergence * weight)


@pytest.fixture(scope="module")
def taught(
    tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """Return a text adapter, a tags adapter, and the run in which the first learnt from both."""
    folder = tmp_path_factory.mktemp("teachers")
    base = tiny_checkpoint.base
    text = make_adapter(base, folder / "text")
    tags = train_sft(CONFIG, ROWS, base=base, out=folder / "tags", say=lambda _line: None)
    config = replace(
        CONFIG, start=str(text), tags_from=str(tags), max_steps=30, epochs=30, learning_rate=1e-2
    )
    config = replace(config, lora_rank=rank_of(text))
    train_sft(config, ROWS, base=base, out=folder / "taught", say=lambda _line: None)
    return text, tags, folder / "taught"


def rank_of(adapter: Path) -> int:
    from pasta_decoding.training.adapter_files import read_config

    return int(read_config(adapter)["r"])


def test_a_run_comes_nearer_to_the_tags_and_keeps_the_text(
    taught: tuple[Path, Path, Path], tiny_checkpoint: TinyCheckpoint
) -> None:
    text, tags, run = taught
    before, after = (read_lines(run / "metrics.jsonl")[place] for place in (0, -1))
    assert after["control_loss"] < before["control_loss"] / 2
    control = load_model(tiny_checkpoint.base, tags).checkpoint.control
    chosen = set(chosen_tokens(control, END_ID).tolist())
    assert chosen == control.ids - {control.async_open} | {END_ID}
    of_tags: dict[Path, float] = {}
    of_text: dict[Path, float] = {}
    for adapter in (text, tags, run / "adapter"):
        loaded = load_model(tiny_checkpoint.base, adapter)
        layouts = compile_rows(
            ROWS, loaded.tokenizer, loaded.checkpoint.control, CONFIG, print, end=END_ID
        )
        labels = [one for layout in layouts for one in layout.label if one is not None]
        nats = torch.cat(list(score_layouts(loaded.model.eval(), layouts))).neg().tolist()
        of_tags[adapter] = sum(n for n, one in zip(nats, labels, strict=True) if one in chosen)
        of_text[adapter] = sum(n for n, one in zip(nats, labels, strict=True) if one not in chosen)
    ours = run / "adapter"
    assert abs(of_tags[ours] - of_tags[tags]) < abs(of_tags[text] - of_tags[tags]) / 2
    assert abs(of_text[ours] - of_text[text]) < abs(of_text[ours] - of_text[tags]) / 2


@pytest.mark.parametrize("other", [{"start": None}, {"plain": True}, {"loop_share": 0.1}])
def test_what_does_not_go_with_teachers_is_refused(
    other: dict[str, object], tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    adapter = str(tiny_checkpoint.adapter)
    config: SftConfig = replace(CONFIG, start=adapter, tags_from=adapter)
    with pytest.raises(PastaError, match="--tags-from teaches"):
        train_sft(
            replace(config, **other),  # type: ignore[arg-type]
            ROWS,
            base=tiny_checkpoint.base,
            out=tmp_path / "out",
            say=print,
        )
    assert not (tmp_path / "out").exists()


def test_tags_of_another_scheme_are_refused_before_anything_is_written(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint.base
    start = make_adapter(base, tmp_path / "start")
    other = replace(CONFIG, scheme="reserve", max_steps=1)
    tags = train_sft(other, ROWS, base=base, out=tmp_path / "tags", say=print)
    config = replace(CONFIG, start=str(start), tags_from=str(tags), lora_rank=rank_of(start))
    with pytest.raises(PastaError, match="differ in control tokens, scheme or topics"):
        train_sft(config, ROWS, base=base, out=tmp_path / "out", say=print)
    assert not (tmp_path / "out").exists()
