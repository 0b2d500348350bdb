"""The annotator `model` on random weights: what it decides by is what training will see."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from transformers import LlamaForCausalLM

from pasta_decoding.data.annotate.forcing import side_by_side
from pasta_decoding.data.annotate.model import Model
from pasta_decoding.data.annotate.writer import Checkpoint, Thresholds, Writer
from pasta_decoding.data.dataset import Row
from pasta_decoding.data.score import label_logprobs
from pasta_decoding.data.view import segments_of
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.check import check
from pasta_decoding.lang.layout import lay_out
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, read, show, strip
from pasta_decoding.models.binding import bind
from tests.checkpoint import byte_tokenizer
from tests.tiny import tiny_llama

TEXT = """Three things help against the cold:

- A warm coat keeps the wind away from you and holds the warm air in.
- Thick socks, since much warmth is lost at the feet when they are wet.
- Hot tea, soup or cocoa, taken slowly and in good company if there is any.

So dress well, and eat and drink something warm before you go out at night."""

READY = Thresholds(promise_nats=-1e9, close=1e-9, sync=1e-9)
"""Whatever may be promised is, closes at once, and is waited for at once."""

PROMPT = "Say something.\n"


def tiny_model() -> LlamaForCausalLM:
    return tiny_llama(vocabulary=len(byte_tokenizer()), max_position_embeddings=4096)


@cache
def tiny_checkpoint() -> Checkpoint:
    tokenizer = byte_tokenizer()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return Checkpoint(
        TorchEngine(tiny_model(), cells=30_000),
        bind(tokenizer),
        scheme_named("shared-max"),
        encode,
        lambda text: encode(f"{text}\n"),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
    )


def row(text: str) -> Row:
    return Row("1", "test", PROMPT[:-1], text)


def write(text: str, thresholds: Thresholds) -> tuple[Tree, Writer]:
    writer = Writer(tiny_checkpoint(), thresholds, row(text))
    ((tree, fed),) = side_by_side([writer.write()], tiny_checkpoint().engine)
    assert fed <= writer.room
    assert tiny_checkpoint().engine.cells_in_use == 0
    return tree, writer


def tags_of(tree: Tree) -> list[tuple[int, float]]:
    """The tags of a finished annotation and their log-probabilities, as training computes them."""
    known = tiny_checkpoint()
    layout = lay_out(
        known.encode_prompt(PROMPT[:-1]),
        segments_of(tree, known.binding, known.encode),
        known.scheme,
        async_close=known.binding.async_close,
        end=None,
    )
    (logprobs_L,) = label_logprobs(tiny_model(), [layout])
    labels = [label for label in layout.label if label is not None]
    pairs = zip(labels, logprobs_L.tolist(), strict=True)
    return [pair for pair in pairs if pair[0] in known.binding.ids]


@pytest.mark.parametrize(
    "thresholds",
    [READY, replace(READY, sync=1.0), replace(READY, close=1.0), replace(READY, sync=0.004)],
    ids=["all tags", "no sync", "late close", "some syncs"],
)
def test_every_decision_is_made_by_the_log_probability_of_the_finished_annotation(
    thresholds: Thresholds,
) -> None:
    tree, writer = write(TEXT, thresholds)
    assert any(isinstance(node, Chunk) for node in tree)
    found, expected = sorted(writer.decisions), sorted(tags_of(tree))
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [nats for _, nats in found] == pytest.approx([nats for _, nats in expected], abs=1e-4)


def test_the_text_stays_and_the_annotation_is_well_formed() -> None:
    tree, _ = write(TEXT, READY)
    assert strip(tree) == TEXT
    assert check(show(tree)) == []
    assert sum(isinstance(node, Sync) for node in tree) >= 1
    topics = [node.topic for node in tree if isinstance(node, Chunk)]
    assert len(set(topics)) == len(topics) >= 2


def test_who_never_promises_changes_nothing() -> None:
    tree, writer = write(TEXT, replace(READY, promise_nats=1e9))
    assert tree == (Span(TEXT),)
    assert writer.decisions == []


@pytest.mark.parametrize("text", ["", " ", "\n\n", "One.", "# Heading", "<sync/> " * 20, "a " * 50])
def test_odd_responses_stay_as_they_are(text: str) -> None:
    (done,) = Model(tiny_checkpoint(), READY).annotate([row(text)])
    assert strip(read(done.row.response)) == text
    assert check(done.row.response) == []


def test_rows_decoded_together_are_annotated_as_they_are_alone() -> None:
    rows = [replace(row(TEXT[n:]), id=str(n)) for n in (0, 40, 110)]
    annotator = Model(tiny_checkpoint(), READY)
    together = [one.row for one in annotator.annotate(rows)]
    assert together == [one.row for each in rows for one in annotator.annotate([each])]


def test_a_row_that_the_cache_is_too_small_for_is_rejected_and_the_rest_is_not() -> None:
    (long, short) = Model(tiny_checkpoint(), READY).annotate([row("word " * 9000), row(TEXT)])
    assert long.rejected is not None
    assert "cache" in long.rejected
    assert short.rejected is None
