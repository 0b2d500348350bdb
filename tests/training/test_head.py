"""The reading head: it learns what there is to learn, and survives its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pasta_decoding.data.annotate.head import (
    Head,
    load_head,
    save_head,
    shipped_head,
    unit_inputs,
)
from pasta_decoding.data.annotate.lattice import choose, semi_markov_marginals
from pasta_decoding.data.annotate.likelihood import Likelihood
from pasta_decoding.data.annotate.limits import Limits
from pasta_decoding.data.annotate.prior import NAMES, Facts, find_facts, log_odds
from pasta_decoding.data.dataset import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.tree import Chunk, chunk_extents, read, strip
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.load import find_adapter
from pasta_decoding.training.head import Example, fit_facts, read_examples, train_head
from tests.data.reader import tiny_reader

LAYERS = (1, 2)
ANIMALS = ["zebras", "quails", "jackals", "oxen", "yaks", "foxes"]


def annotated(number: int) -> Row:
    """What is said of an animal is a chunk, what is said of the weather is not."""
    parts = []
    for place in range(4):
        animal = ANIMALS[(number + place) % len(ANIMALS)]
        if (number >> place) & 1:
            body = f"Zz! {animal} zigzag over the hills at noon and sleep in the shade."
            parts.append(f'<promise topic="p{place}" tokens="20"/><async>{body}</async>')
        else:
            parts.append("It rains on most days of the year, and then the sun comes out.")
    return Row(str(number), "test", "Tell me.", " ".join(parts))


ROWS = [annotated(number) for number in range(16)]


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return list(read_examples(ROWS, tiny_reader(LAYERS)))


@pytest.fixture(scope="module")
def head(examples: list[Example]) -> Head:
    return train_head(examples, base="digest", layers=LAYERS)


def test_an_example_knows_which_candidates_and_units_its_annotator_took(
    examples: list[Example],
) -> None:
    for row, example in zip(ROWS, examples, strict=True):
        units = example.draft.units
        taken = [
            (units[one.first].start, units[one.last].end)
            for one, is_taken in zip(example.candidates, example.taken, strict=True)
            if is_taken
        ]
        assert taken == chunk_extents(read(row.response))
        assert example.draft.text == strip(read(row.response))
        assert example.states_VD is not None
        assert example.states_VD.shape == (len(units) + 1, 2 * 32)


def test_a_unit_is_told_by_the_states_around_it_and_the_mean() -> None:
    states_VD = torch.tensor([[1.0], [2.0], [6.0]])
    assert unit_inputs(states_VD).tolist() == [[1.0, 2.0, 6.0, 4.0], [2.0, 6.0, 0.0, 4.0]]


def test_what_hidden_states_show_is_learnt(examples: list[Example], head: Head) -> None:
    right = units = 0
    for example in examples:
        assert example.states_VD is not None
        seen = head.see(example.states_VD)
        chosen = [max((one.main, 0), (one.first, 1), (one.further, 2))[1] for one in seen]
        right += sum(a == b for a, b in zip(chosen, example.labels_U.tolist(), strict=True))
        units += len(chosen)
    assert right / units > 0.9
    assert head.weights.begins > 0


def test_with_its_head_a_reader_finds_the_chunks(head: Head) -> None:
    reader = replace(tiny_reader(LAYERS), head=head)
    eager = Limits(max_nats=1e9, sync_nats=1e9)
    plain = [replace(row, response=strip(read(row.response))) for row in ROWS]
    found = expected = common = 0
    for row, done in zip(ROWS, Likelihood(reader, eager).annotate(plain), strict=True):
        own, gold = (set(chunk_extents(read(one.response))) for one in (done.row, row))
        found, expected, common = found + len(own), expected + len(gold), common + len(own & gold)
        topics = [one.topic for one in read(done.row.response) if isinstance(one, Chunk)]
        assert len(set(topics)) == len(topics)
    assert 2 * common / (found + expected) > 0.8


def test_fitted_weights_make_the_choices_likeliest(examples: list[Example]) -> None:
    """At the optimum every fact is expected as often as it was taken, but for the penalty."""
    seen = [None] * len(examples)
    weights = fit_facts(examples, seen)

    def surplus(name: str) -> float:
        total = 0.0
        for one in examples:
            draft = one.draft
            facts = list(find_facts("Tell me.", draft.text, draft.units, one.candidates, None))
            odds = [log_odds(each, weights) for each in facts]
            _, likely = semi_markov_marginals(len(draft.units), one.candidates, odds)
            total += sum(
                getattr(fact, name) * (chance - taken)
                for fact, chance, taken in zip(facts, likely, one.taken, strict=True)
            )
        return total / len(examples)

    for name in NAMES:
        assert surplus(name) == pytest.approx(-2e-3 * getattr(weights, name), abs=2e-3)
    assert choose(2, [], []) == []


def test_a_head_is_the_same_after_its_file(head: Head, tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    save_head(head, path)
    again = load_head(path)
    assert (again.base, again.layers, again.weights) == ("digest", LAYERS, head.weights)
    assert again.digest == head.digest
    states_VD = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    assert again.see(states_VD) == head.see(states_VD)
    changed = replace(head, weights=Facts(*[0.0] * len(NAMES)))
    assert changed.digest != head.digest
    assert [one.name for one in tmp_path.iterdir()] == ["own.safetensors"]


@pytest.mark.parametrize("contents", [b"", b"no tensors", None])
def test_a_file_that_is_no_head_is_refused(contents: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(PastaError, match="is no reading head"):
        load_head(path)


def test_the_default_model_has_a_head_and_a_stranger_has_none() -> None:
    default = checkpoints.load(find_adapter("balanced")).base
    head = shipped_head(default.norms_sha256)
    assert head is not None
    assert head.weight_F3.shape == (4 * default.hidden_size * len(head.layers), 3)
    assert max(head.layers) <= default.layers
    assert shipped_head("another") is None
