"""transformers' own `generate` writes what sequential decoding writes, and says what it took."""

from __future__ import annotations

import pytest
import torch

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import question_of
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.evaluation.generate import Plan, ask_all
from pasta_decoding.evaluation.methods import Method, make_method
from pasta_decoding.evaluation.records import Record
from pasta_decoding.runtime.decoder import LocalDecoder
from tests.checkpoint import TinyCheckpoint, torch_decoder

CONFIG = GenerationConfig(max_tokens=60)
QUESTIONS = [question_of(text) for text in ("Hello", "Two cities, two cities, two", "x")]


@pytest.fixture(scope="module")
def decoder(tiny_checkpoint: TinyCheckpoint) -> LocalDecoder:
    """Return the tiny model without its fondness for tags, which nothing bans in `generate`."""
    found = torch_decoder(tiny_checkpoint.base, None)
    assert isinstance(found.engine, TorchEngine)
    rows_VD = found.engine.model.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        rows_VD[sorted(found.vocabulary.control.ids)] = 0
    return found


def asked(method: Method) -> list[Record]:
    found = {record.id: record for record in ask_all(method, QUESTIONS, Plan(max_concurrency=2))}
    records = [found[question.id] for question in QUESTIONS]
    assert [record.error for record in records] == [None] * len(QUESTIONS)
    return records


@pytest.mark.parametrize("name", ["hf", "lookup"])
def test_the_answers_are_those_of_sequential_decoding(decoder: LocalDecoder, name: str) -> None:
    own = asked(make_method("sequential", decoder, CONFIG))
    theirs = asked(make_method(name, decoder, CONFIG))
    for one, other in zip(theirs, own, strict=True):
        assert (one.text, one.hit_limit) == (other.text, other.hit_limit)
        assert one.prompt_tokens == other.prompt_tokens
    steps = [one.critical_path for one in theirs]
    if name == "hf":
        assert steps == [one.fed_tokens - 1 for one in theirs]
    else:
        assert sum(steps) < sum(one.critical_path for one in own)


def test_sampled_answers_follow_from_the_seed(decoder: LocalDecoder) -> None:
    def texts(seed: int) -> list[str]:
        sampled = GenerationConfig(max_tokens=20, temperature=1.0, top_p=0.9, seed=seed)
        return [one.text for one in asked(make_method("hf", decoder, sampled))]

    before = torch.random.get_rng_state()
    assert texts(1) == texts(1) != texts(2)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's noise is left alone"
