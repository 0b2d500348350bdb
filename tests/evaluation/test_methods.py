"""transformers' own `generate` writes what sequential decoding writes, and says what it took."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import question_of
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.evaluation.generate import Plan, ask_all
from pasta_decoding.evaluation.methods import HfGenerate, Pasta, unpatched
from pasta_decoding.evaluation.records import Record
from pasta_decoding.runtime.decoder import LocalDecoder
from tests.checkpoint import TinyCheckpoint, torch_decoder

SEQUENTIAL = GenerationConfig(max_tokens=60, parallel=False)
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


def asked(method: Pasta | HfGenerate) -> list[Record]:
    found = {record.id: record for record in ask_all(method, QUESTIONS, Plan(max_concurrency=2))}
    records = [found[question.id] for question in QUESTIONS]
    assert [record.error for record in records] == [None] * len(QUESTIONS)
    return records


@pytest.mark.parametrize("lookup_tokens", [None, 10])
def test_the_answers_are_those_of_sequential_decoding(
    decoder: LocalDecoder, lookup_tokens: int | None
) -> None:
    own = asked(Pasta(decoder, SEQUENTIAL))
    theirs = asked(HfGenerate(decoder, unpatched(decoder), SEQUENTIAL, 60.0, lookup_tokens))
    assert [one.text for one in theirs] == [one.text for one in own]
    assert [one.hit_limit for one in theirs] == [one.hit_limit for one in own]
    assert [one.prompt_tokens for one in theirs] == [one.prompt_tokens for one in own]
    if lookup_tokens is None:
        assert [one.critical_path for one in theirs] == [one.fed_tokens - 1 for one in theirs]
    else:
        assert sum(one.critical_path for one in theirs) < sum(one.critical_path for one in own)


def test_an_answer_that_takes_too_long_or_that_torch_cannot_compute_has_failed(
    decoder: LocalDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    twin = unpatched(decoder)
    [late] = ask_all(HfGenerate(decoder, twin, SEQUENTIAL, 1e-9), QUESTIONS[:1], Plan())
    assert late.error == "no answer within 1e-09 s"
    monkeypatch.setattr(twin, "generate", out_of_memory)
    [broken] = ask_all(HfGenerate(decoder, twin, SEQUENTIAL, 60.0), QUESTIONS[:1], Plan())
    assert broken.error == "out of memory"
    assert not twin._forward_pre_hooks


def test_sampled_answers_follow_from_the_seed(decoder: LocalDecoder) -> None:
    def texts(seed: int) -> list[str]:
        sampled = replace(SEQUENTIAL, max_tokens=20, temperature=1.0, top_p=0.9, seed=seed)
        method = HfGenerate(decoder, unpatched(decoder), sampled, 60.0)
        return [one.text for one in asked(method)]

    before = torch.random.get_rng_state()
    assert texts(1) == texts(1) != texts(2)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's noise is left alone"
