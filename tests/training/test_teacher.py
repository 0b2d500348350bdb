"""Tags from rows, text from a teacher: the targets, the loss, and a whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.models.loading import load_model
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.lora import lora_rank
from pasta_decoding.training.loss import LossMeter
from pasta_decoding.training.score import score_layouts
from pasta_decoding.training.sft import compile_rows, train_sft
from pasta_decoding.training.teacher import (
    STAKES,
    Kept,
    TextTeacher,
    chosen_tokens,
    distance,
    keeping_text,
    targets,
)
from pasta_decoding.training.view import view
from tests.checkpoint import END_ID, TinyCheckpoint, make_adapter
from tests.training.test_sft import CONFIG, ROWS

TEACHER = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 3.0, 1.0]])
CHOSEN = torch.tensor([3, 1])
TAG, TEXT = 1, 2
LABELS = torch.tensor([TAG, TEXT])


def kept_at(*places: int) -> Kept:
    """Return what a model with these logits teaches at some of the two labels."""
    kept_L = torch.zeros(2, dtype=torch.bool).index_fill(0, torch.tensor(places), 1)
    return TextTeacher(Said(), CHOSEN).ask({}, LABELS, kept_L)


class Said(torch.nn.Module):
    """A model whose logits are `TEACHER`, whatever it is asked."""

    def forward(self) -> SimpleNamespace:
        return SimpleNamespace(logits=TEACHER[None])


def test_a_tag_is_certain_and_text_is_as_the_teacher_has_it() -> None:
    of_tag, of_text = targets(TEACHER, LABELS, CHOSEN)
    assert of_tag.tolist() == [0, 1, 0, 0]
    assert of_text[CHOSEN].tolist() == [0, 0]
    assert torch.allclose(of_text[[0, 2]], TEACHER[1, [0, 2]].softmax(dim=-1))


def test_tags_weigh_more_and_who_writes_the_same_text_has_no_distance() -> None:
    logits = torch.zeros(2, 4)
    found = distance(logits, kept_at(0, 1))
    assert found[0].item() == pytest.approx((1 + STAKES) * torch.tensor(4.0).log().item())
    same = targets(TEACHER, LABELS, CHOSEN).clamp(min=1e-30).log()
    assert torch.allclose(distance(same, kept_at(0, 1)), torch.zeros(2), atol=1e-6)


def test_labels_of_other_rows_in_the_pack_are_learnt_as_they_stand() -> None:
    outputs = SimpleNamespace(logits=torch.zeros(1, 2, 4))
    plain = LossMeter([TAG]).loss(outputs, LABELS[None], 1)
    mixed = LossMeter([TAG]).loss(outputs, LABELS[None], 1, kept=kept_at(1))
    own = distance(torch.zeros(1, 4), kept_at(1))
    assert mixed.item() == pytest.approx(plain.item() / 2 + own.item())


def test_a_pack_knows_which_labels_are_of_kept_rows(tiny_checkpoint: TinyCheckpoint) -> None:
    loaded = load_model(tiny_checkpoint.base, tiny_checkpoint.adapter)
    control = loaded.checkpoint.control
    one, *_ = compile_rows(ROWS, loaded.tokenizer, control, CONFIG, print, end=END_ID)
    labels = sum(label is not None for label in one.label)
    assert view([one, *keeping_text([one])]).kept_L.tolist() == [False] * labels + [True] * labels


@pytest.fixture(scope="module")
def taught(
    tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """Return an adapter, what it learns from rows as they stand, and what from their tags alone."""
    folder = tmp_path_factory.mktemp("teachers")
    base = tiny_checkpoint.base
    start = make_adapter(base, folder / "start")
    config = of_tags_alone(start)
    whole = replace(config, tags_data=())
    learnt = train_sft(whole, ROWS, base=base, out=folder / "learnt", say=print)
    train_sft(config, [], base=base, out=folder / "tags", say=print, tags_rows=ROWS)
    return start, learnt, folder / "tags"


def of_tags_alone(start: Path) -> SftConfig:
    """Return the settings of a run that goes on from `start`, long enough to learn its rows."""
    rank = lora_rank(start)
    config = replace(CONFIG, start=str(start), lora_rank=rank, tags_data=("rows",))
    return replace(config, max_steps=30, epochs=30, learning_rate=1e-2)


def test_a_run_learns_the_tags_and_keeps_the_text(
    taught: tuple[Path, Path, Path], tiny_checkpoint: TinyCheckpoint
) -> None:
    start, learnt, run = taught
    before, after = (read_lines(run / "metrics.jsonl")[place] for place in (0, -1))
    assert after["control_loss"] < before["control_loss"] / 2
    control = load_model(tiny_checkpoint.base, start).checkpoint.control
    chosen = set(chosen_tokens(control, END_ID).tolist())
    assert chosen == control.ids - {control.async_open} | {END_ID}
    of_tags: dict[Path, float] = {}
    of_text: dict[Path, float] = {}
    for adapter in (start, learnt, run / "adapter"):
        loaded = load_model(tiny_checkpoint.base, adapter)
        layouts = compile_rows(
            ROWS, loaded.tokenizer, loaded.checkpoint.control, CONFIG, print, end=END_ID
        )
        labels = [one for layout in layouts for one in layout.label if one is not None]
        nats = torch.cat(list(score_layouts(loaded.model.eval(), layouts))).neg().tolist()
        of_tags[adapter] = sum(n for n, one in zip(nats, labels, strict=True) if one in chosen)
        of_text[adapter] = sum(n for n, one in zip(nats, labels, strict=True) if one not in chosen)
    ours = run / "adapter"
    assert of_tags[ours] < of_tags[start] / 2
    assert abs(of_text[ours] - of_text[start]) < abs(of_text[learnt] - of_text[start]) / 2


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"start": None}, "there is none"),
        ({"plain": True}, "--plain takes them out"),
        ({"tags_data": (), "text_from": "x"}, "for the rows of --tags-data"),
    ],
)
def test_what_does_not_go_together_is_refused(
    other: dict[str, object], why: str, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    config: SftConfig = replace(CONFIG, start=str(tiny_checkpoint.adapter), tags_data=("rows",))
    with pytest.raises(PastaError, match=why):
        train_sft(
            replace(config, **other),  # type: ignore[arg-type]
            ROWS,
            base=tiny_checkpoint.base,
            out=tmp_path / "out",
            say=print,
            tags_rows=ROWS,
        )
    assert not (tmp_path / "out").exists()


def test_a_run_without_rows_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(PastaError, match="no row to train on") as caught:
        train_sft(CONFIG, [], base=tmp_path, out=tmp_path / "out", say=print)
    assert caught.value.hint == "Give --data or --tags-data."


def test_loops_are_made_of_rows_that_are_learnt_whole(tmp_path: Path) -> None:
    config = replace(CONFIG, start="x", tags_data=("rows",), loop_share=0.1)
    with pytest.raises(PastaError, match="--loop-share makes answers of --data loop"):
        train_sft(config, [], base=tmp_path, out=tmp_path / "out", say=print, tags_rows=ROWS)


def test_a_run_goes_on_only_with_the_rows_that_it_was_begun_with(
    taught: tuple[Path, Path, Path], tiny_checkpoint: TinyCheckpoint
) -> None:
    start, _learnt, run = taught
    config = of_tags_alone(start)
    with pytest.raises(PastaError, match="tags_rows"):
        train_sft(config, [], base=tiny_checkpoint.base, out=run, say=print, tags_rows=ROWS[:1])


def test_a_teacher_of_another_scheme_is_refused_before_anything_is_written(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint.base
    start = make_adapter(base, tmp_path / "start")
    other = replace(CONFIG, scheme="reserve", max_steps=1)
    text = train_sft(other, ROWS, base=base, out=tmp_path / "text", say=print)
    config = replace(of_tags_alone(start), text_from=str(text))
    with pytest.raises(PastaError, match="differs from what is trained in control tokens"):
        train_sft(config, [], base=base, out=tmp_path / "out", say=print, tags_rows=ROWS)
    assert not (tmp_path / "out").exists()
