"""The law: training and decoding agree token by token.

Every logit of the parallel decode equals the one that the training forward computes for that
token, and the integers that decoding used are those that the layout compiled.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules
from pasta_decoding.engines.base import Engine
from pasta_decoding.engines.support import attention_windows
from pasta_decoding.lang.layout import (
    ChunkRun,
    Joining,
    Layout,
    MainRun,
    PromiseRun,
    Segment,
    SyncRun,
    lay_out,
    lay_out_rows,
    sees,
)
from pasta_decoding.lang.positions import SCHEMES, Scheme
from pasta_decoding.scheduling.decoder import answer_of
from pasta_decoding.scheduling.scheduler import Scheduler
from pasta_decoding.training.view import attention_masks, packed_batch, visibility
from tests.engines.subjects import SUBJECTS
from tests.examples import few
from tests.law import world
from tests.law.watched import Replay, Watched
from tests.tiny import tiny_model

MODELS = {kind: tiny_model(kind) for kind in ("llama", "qwen3", "gemma3")}
# The second part of an engine's name is that of the model which trains in its place.
ENGINES = [
    "torch-llama",
    "torch-qwen3",
    "torch-gemma3",
    "torch-llama-paged",
    "torch-gemma3-paged",
    "fast-llama",
    "fast-qwen3",
    "fast-gemma3",
]
LLAMA = ["llama-llama", "llama-qwen3"]
# The text join, which every engine can take.
TEXT_CASES = [*ENGINES, *(pytest.param(engine, marks=pytest.mark.llama) for engine in LLAMA)]
# Each engine under every scheme that it can take.
CASES = [
    *((engine, scheme) for engine in ENGINES for scheme in SCHEMES),
    *(
        pytest.param(engine, name, marks=pytest.mark.llama)
        for engine in LLAMA
        for name, scheme in SCHEMES.items()
        if scheme.consecutive
    ),
]


@cache
def engine_named(name: str) -> Engine:
    return SUBJECTS[name]().engine


def decode(
    engine: Engine,
    prompt: Sequence[int],
    segments: Sequence[Segment],
    scheme: Scheme = world.SCHEME,
    joining: Joining = Joining.kv,
    end: int = world.END,
) -> tuple[Answer, Watched]:
    """Decode a given answer with the real interpreter, scheduler and engine."""
    recorder = Watched(Replay(segments, async_close=world.CLOSE, end=end))
    scheduler = Scheduler(engine, world.VOCABULARY, scheme, joining=joining)
    request = Request(tuple(prompt), recorder, Rules(max_tokens=256))
    answer = answer_of(scheduler, request)
    assert engine.slots_in_use == 0
    return answer, recorder


def compiled(
    prompt: Sequence[int],
    segments: Sequence[Segment],
    scheme: Scheme = world.SCHEME,
    end: int = world.END,
) -> Layout:
    return lay_out(prompt, segments, scheme, async_close=world.CLOSE, end=end)


def training_logits(model: PreTrainedModel, layouts: Sequence[Layout]) -> torch.Tensor:
    """logits_TV of one training forward, with nothing but the layouts' integers."""
    training = packed_batch(layouts)
    with torch.inference_mode():
        output = model(
            input_ids=training.tokens_T[None],
            position_ids=training.position_T[None],
            attention_mask=attention_masks(training, attention_windows(model.config)),
            use_cache=False,
        )
    return output.logits[0]


def additive(mask_QK: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask_QK.shape).masked_fill(~mask_QK, float("-inf"))[None, None]


def assert_the_law(
    name: str,
    scheme: Scheme,
    prompt: Sequence[int],
    segments: Sequence[Segment],
    end: int = world.END,
) -> None:
    answer, recorder = decode(engine_named(name), prompt, segments, scheme, end=end)
    layout = compiled(prompt, segments, scheme, end)
    assert list(answer.segments) == list(segments)
    assert answer.end == end
    assert answer.layouts == (layout,)
    assert_same_integers(answer, [layout])
    assert_same_logits(name, [layout], recorder)


def assert_the_law_of_text(
    name: str, prompt: Sequence[int], segments: Sequence[Segment], end: int = world.END
) -> Answer:
    engine = engine_named(name)
    answer, recorder = decode(engine, prompt, segments, joining=Joining.text, end=end)
    rows = lay_out_rows(prompt, segments, async_close=world.CLOSE, end=end)
    assert list(answer.segments) == list(segments)
    assert answer.layouts == rows
    assert_same_integers(answer, rows)
    assert_same_logits(name, rows, recorder)
    return answer


def assert_same_logits(name: str, layouts: Sequence[Layout], recorder: Watched) -> None:
    logits_TV = training_logits(MODELS[name.split("-")[1]], layouts)
    rows = labelled_rows(*layouts)
    assert {key for _, key in rows} == recorder.logits.keys()
    for row, key in rows:
        decoded = torch.from_numpy(recorder.logits[key])
        torch.testing.assert_close(logits_TV[row], decoded, atol=1e-4, rtol=0)


def assert_same_integers(answer: Answer, layouts: Sequence[Layout]) -> None:
    """Tokens were fed with the steps and positions of the layouts, each exactly once."""
    fed = sorted((f.thread, f.step, f.token, f.position) for f in answer.trace.fed)
    expected = []
    for layout, cached_tokens in zip(layouts, tokens_in_cache(layouts), strict=True):
        columns = zip(layout.thread, layout.step, layout.tokens, layout.position, strict=True)
        expected += [row for row in list(columns)[cached_tokens:] if row[1] > 0]
    assert fed == sorted(expected)


def tokens_in_cache(layouts: Sequence[Layout]) -> list[int]:
    """Return how many tokens of each layout the layout before it has computed.

    These are all tokens up to the last one of its first chunk.
    """
    cached_tokens = [0]
    for before, after in pairwise(layouts):
        threads = list(before.thread)
        first = next(thread for thread in threads if thread)
        first_end = len(threads) - threads[::-1].index(first)
        cached_tokens.append(first_end)
        assert before.tokens[:first_end] == after.tokens[:first_end]
        assert before.position[:first_end] == after.position[:first_end]
    return cached_tokens


def labelled_rows(*layouts: Layout) -> list[tuple[int, tuple[int, int]]]:
    """Return, for every row with a label, the thread and the index of the token chosen from it."""
    chosen_tokens: dict[int, int] = {}
    rows = []
    labels = [pair for layout in layouts for pair in zip(layout.label, layout.thread, strict=True)]
    for row, (label, thread) in enumerate(labels):
        if label is not None:
            index = chosen_tokens.get(thread, 0)
            chosen_tokens[thread] = index + 1
            rows.append((row, (thread, index)))
    return rows


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_training_sees_what_decoding_saw_even_behind_a_sync(name: str, scheme: str) -> None:
    assert_the_law(name, SCHEMES[scheme], (60, 61, 62), world.CHUNK_AFTER_SYNC)


@pytest.mark.parametrize(("name", "scheme"), CASES)
@few(10)
@given(prompt=world.PROMPTS, segments=world.answers(), end=st.sampled_from(world.ENDS))
def test_training_sees_what_decoding_saw_in_any_answer(
    name: str, scheme: str, prompt: tuple[int, ...], segments: list[Segment], end: int
) -> None:
    assert_the_law(name, SCHEMES[scheme], prompt, segments, end)


@pytest.mark.parametrize("name", TEXT_CASES)
def test_training_sees_what_decoding_saw_behind_a_text_join(name: str) -> None:
    answer = assert_the_law_of_text(name, (60, 61, 62), world.CHUNK_AFTER_SYNC)
    assert len(answer.layouts) == 2
    # A closing, 13, four tokens of a promise, ASYNC_OPEN, 40, 41, a closing, SYNC.
    assert answer.trace.rewritten_tokens == 10


@pytest.mark.parametrize("name", TEXT_CASES)
@few(10)
@given(prompt=world.PROMPTS, segments=world.answers())
def test_training_sees_what_decoding_saw_in_any_answer_with_text_joins(
    name: str, prompt: tuple[int, ...], segments: list[Segment]
) -> None:
    assert_the_law_of_text(name, prompt, segments)


@given(world.PROMPTS, world.answers())
def test_both_joins_take_the_same_steps(prompt: tuple[int, ...], segments: list[Segment]) -> None:
    rows = lay_out_rows(prompt, segments, async_close=world.CLOSE, end=world.END)
    assert rows[-1].critical_path == compiled(prompt, segments).critical_path


@given(st.sampled_from(list(SCHEMES)), world.PROMPTS, world.answers())
def test_the_tensor_mask_is_the_rule_pair_by_pair(
    scheme: str, prompt: tuple[int, ...], segments: list[Segment]
) -> None:
    layout = compiled(prompt, segments, SCHEMES[scheme])
    size = range(len(layout.tokens))
    slow = [[sees(layout, q, k) and k <= q for k in size] for q in size]
    assert visibility(packed_batch([layout])).tolist() == slow


def test_a_wrong_mask_breaks_the_law() -> None:
    """The test above would notice: let siblings see each other, and the logits move."""
    model = MODELS["llama"]
    prompt = (60, 61, 62)
    segments = world.CHUNK_AFTER_SYNC
    _, recorder = decode(engine_named("torch-llama"), prompt, segments)
    training = packed_batch([compiled(prompt, segments)])
    causal = torch.ones(len(training.tokens_T), len(training.tokens_T), dtype=torch.bool).tril()
    with torch.inference_mode():
        logits_TV = model(
            input_ids=training.tokens_T[None],
            position_ids=training.position_T[None],
            attention_mask=additive(causal),
        ).logits[0]
    row, key = next((r, k) for r, k in labelled_rows(compiled(prompt, segments)) if k[0] == 2)
    difference = np.abs(logits_TV[row].numpy() - recorder.logits[key]).max()
    assert difference > 1e-2


def test_the_mask_of_a_worked_example() -> None:
    """Prompt p, main a; promise with topic t; its chunk; main b; SYNC; main c."""
    segments: list[Segment] = [
        MainRun((11,)),
        PromiseRun((world.OPEN, 20, world.P20), 20),
        ChunkRun((world.ASYNC, 30)),
        MainRun((12,)),
        SyncRun(world.SYNC),
        MainRun((13,)),
    ]
    layout = compiled((60,), segments)
    expected = """
        1.........
        11........
        111.......
        1111......
        11111.....
        111111....
        1111111...
        11111..1..
        1111111111
    """
    drawn = [
        "".join(".1"[cell] for cell in row) for row in visibility(packed_batch([layout])).tolist()
    ]
    # p a <promise t > [async x] b sync c
    assert layout.thread == (0, 0, 0, 0, 0, 1, 1, 0, 0, 0)
    assert layout.position == (0, 1, 2, 3, 4, 5, 6, 5, 7, 8)
    assert layout.step == (0, 1, 2, 3, 4, 4, 5, 5, 6, 7)
    assert drawn == [*expected.split()[:8], "111111111.", "1111111111"]
    assert layout.critical_path == 7
