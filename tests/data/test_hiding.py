"""What hiding costs, against forwards over texts that a model reads without any mask."""

from __future__ import annotations

import pytest
import torch

from pasta_decoding.data.annotate.hiding import HidingCost, hiding_costs
from pasta_decoding.data.dataset import Row
from tests.checkpoint import byte_tokenizer
from tests.data.reader import tiny_reader
from tests.tiny import tiny_llama

ANNOTATED = (
    'Two things: <promise topic="a" tokens="10"/><async>Alpha is first.</async> '
    '<promise topic="b" tokens="10"/><async>Beta comes later.</async> Done.'
)
PLAIN = "Two things: Alpha is first. Beta comes later. Done."


def nats(before: str, text: str, at: int = 0) -> float:
    """What `text` costs behind `before`, read from the position of its first token on."""
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocabulary=len(tokenizer), max_position_embeddings=4096).eval()
    prompt, ids = (tokenizer.encode(part, add_special_tokens=False) for part in (before, text))
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    places = range(len(prompt) - 1 + at, len(prompt) + len(ids) - 1)
    return -sum(float(logits_TV[place, (prompt + ids)[place + 1]]) for place in places)


def cost(response: str) -> HidingCost:
    (found,) = hiding_costs(tiny_reader(), [Row("1", "s", "Q", response)])
    return found


def test_seen_is_what_the_chunks_cost_in_the_plain_text() -> None:
    found = cost(ANNOTATED)
    first = nats("Q\nTwo things:", " Alpha is first.")
    second = nats("Q\nTwo things: Alpha is first.", " Beta comes later.")
    assert found.chunk_tokens == len(" Alpha is first.") + len(" Beta comes later.")
    assert found.seen == pytest.approx(first + second, abs=1e-3)


def test_hidden_is_what_each_chunk_costs_behind_its_topic_alone() -> None:
    found = cost(ANNOTATED)
    first = nats("Q\nTwo things: [a]:", " Alpha is first.")
    # The second promise is in the main thread behind the first one; the first chunk is nowhere.
    second = nats("Q\nTwo things: [a] [b]:", " Beta comes later.")
    assert found.hidden == pytest.approx(first + second, abs=1e-3)


def test_an_answer_without_chunks_costs_nothing_and_is_not_read() -> None:
    assert cost(PLAIN) == HidingCost(0, 0.0, 0.0)
