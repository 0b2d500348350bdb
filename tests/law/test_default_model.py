"""On the default model: what `transformers` writes, and what the exported file decodes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Logits, Sampler
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.answer.vocabulary import vocabulary_of
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.layout import MainRun
from pasta_decoding.lang.positions import SHARED_MAX
from pasta_decoding.models.catalog import (
    DEFAULT_ADAPTER,
    BaseAlone,
    BaseWithAdapter,
    WholeModel,
    find_adapter,
)
from pasta_decoding.models.load import load_base, load_model
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.models.template import Message
from pasta_decoding.scheduling.decoder import decoder_over
from pasta_decoding.scheduling.scheduler import Scheduler
from tests.golden.golden import PROMPTS
from tests.law.watched import Watched, replay
from tests.scheduling.machine import finish

TOKENS = 16
NEAR_TIE = 1e-3


@pytest.mark.parametrize(
    "prompts",
    [PROMPTS[:3], pytest.param(PROMPTS[3:], marks=pytest.mark.slow)],
    ids=["three", "others"],
)
def test_sequential_decoding_equals_generate(prompts: list[str], default_model: Path) -> None:
    loaded = load_base(BaseAlone(default_model))
    model = loaded.model
    tokenizer = loaded.tokenizer
    control = loaded.checkpoint.control
    encoder = PromptEncoder(tokenizer, forbidden_ids=control.ids)
    prompts_ids = [encoder.encode([Message("user", text)]) for text in prompts]
    # The engine takes the model over, so `generate` goes first, with transformers' own attention.
    expected = _generate(model, prompts_ids, sorted(control.ids))

    engine = TorchEngine(model)
    ends = frozenset({tokenizer.eos_token_id})
    vocabulary = vocabulary_of(tokenizer, control, engine.vocabulary_size, ends, min(ends))
    rules = Rules(max_tokens=TOKENS, parallel=False)
    scheduler = Scheduler(engine, vocabulary, SHARED_MAX)
    requests = [Request(tuple(prompt), Sampler(SamplingParams()), rules) for prompt in prompts_ids]
    answers = finish(scheduler, [scheduler.add(request) for request in requests])
    compared = 0
    for prompt, answer, tokens in zip(prompts_ids, answers, expected, strict=True):
        ours = [token for segment in answer.segments for token in _run(segment)]
        compared += _assert_equal_but_for_near_ties(model, prompt, ours, tokens)
    assert compared > 10 * len(prompts)


@pytest.mark.llama
def test_the_exported_file_decodes_as_the_torch_engine_does(
    default_model: Path, tmp_path: Path
) -> None:
    """In F32, on real prompts, in parallel: the same logits, and the same greedy tokens."""
    from pasta_decoding.engines.llama import LlamaEngine
    from pasta_decoding.gguf_file import GgufFile
    from pasta_decoding.models.export import export_gguf
    from pasta_decoding.models.load import load_gguf

    loaded = load_model(BaseWithAdapter(default_model, find_adapter(DEFAULT_ADAPTER)))
    export_gguf(loaded, tmp_path / "f32.gguf", "F32", quantize=_never_called)
    ours = decoder_over(TorchEngine(loaded.model), loaded)
    path = tmp_path / "f32.gguf"
    exact = LlamaEngine(path, cache_tokens=1024, threads=1, cache_type="F32")
    llama = decoder_over(exact, load_gguf(GgufFile(path), WholeModel(path)))
    rules = Rules(max_tokens=3 * TOKENS)
    compared = 0
    for text in PROMPTS:
        request = ours.request(text, rules, SamplingParams())
        first = Watched(request.sampler)
        answer = ours.answer(replace(request, sampler=first))
        again = replay(llama, request.prompt, answer.segments, llama.vocabulary.end)
        second = Watched(again.sampler)
        repeated = llama.answer(replace(again, sampler=second))
        assert repeated.layouts[0].tokens == answer.layouts[0].tokens
        compared += _assert_close(first.logits, second.logits)
    assert compared > 2 * TOKENS * len(PROMPTS)


def _never_called(*_: object) -> None:
    raise AssertionError("F32 needs no quantiser")


def _assert_close(
    ours: dict[tuple[int, ...], Logits], theirs: dict[tuple[int, ...], Logits]
) -> int:
    """The logits differ by less than 1e-2, the best token only in a near-tie."""
    both = ours.keys() & theirs.keys()
    for key in both:
        np.testing.assert_allclose(theirs[key], ours[key], rtol=0, atol=1e-2)
        if ours[key].argmax() != theirs[key].argmax():
            second, first = np.sort(ours[key])[-2:]
            assert first - second < NEAR_TIE, f"token {key} differs, gap {first - second:.2e}"
    return len(both)


def _generate(model: Any, prompts: list[list[int]], banned: list[int]) -> list[list[int]]:
    """Continue all prompts at once, padded on the left."""
    longest = max(map(len, prompts))
    end = model.config.eos_token_id
    padding = [longest - len(prompt) for prompt in prompts]
    pairs = list(zip(padding, prompts, strict=True))
    output = model.generate(
        torch.tensor([[end] * pad + prompt for pad, prompt in pairs]),
        attention_mask=torch.tensor([[0] * pad + [1] * len(prompt) for pad, prompt in pairs]),
        max_new_tokens=TOKENS,
        do_sample=False,
        suppress_tokens=banned,
        pad_token_id=end,
    )
    return [[token for token in row if token != end] for row in output[:, longest:].tolist()]


def _run(segment: object) -> tuple[int, ...]:
    assert isinstance(segment, MainRun), "sequential answers have main text only"
    return segment.ids


def _assert_equal_but_for_near_ties(
    model: Any, prompt: list[int], ours: list[int], theirs: list[int]
) -> int:
    """Compare up to the first near-tie, return how many tokens were equal."""
    pairs = list(zip(ours, theirs, strict=False))
    equal = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if equal == len(pairs):
        assert len(ours) == len(theirs)
        return equal
    with torch.inference_mode():
        logits_V = model(torch.tensor([[*prompt, *ours[:equal]]])).logits[0, -1]
    first, second = logits_V.topk(2).values.tolist()
    assert first - second < NEAR_TIE, f"token {equal} differs, top-2 gap {first - second:.2e}"
    return equal
