"""The loss of stage 2 against the formula worked by hand, and against its own definition.

The published BoNBoN code computes another loss, so nothing here is compared with it.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given

from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.layout import ChunkRun, Layout, MainRun, PromiseRun, Segment, lay_out
from pasta_decoding.scheduling.decoder import answer_of
from pasta_decoding.scheduling.scheduler import Scheduler
from pasta_decoding.training.bonbon import bonbon_loss, target_gap, with_references
from pasta_decoding.training.view import Example
from tests.examples import few
from tests.law import world
from tests.law.watched import Replay, Watched
from tests.tiny import tiny_llama

PROMPT = (60, 61, 62)
WORST: list[Segment] = [
    MainRun((11,)),
    PromiseRun((world.OPEN, 23, world.P20), 20),
    ChunkRun((world.ASYNC, 30, 31), closed=False),
    MainRun((17, 18)),
]


def layout(segments: Sequence[Segment], end: int | None = world.END) -> Layout:
    return lay_out(PROMPT, segments, world.SCHEME, async_close=world.CLOSE, end=end)


def test_two_candidates_by_hand() -> None:
    """N = 2: beta = 1 / (2 * 1 * 1) = 1/2, so the gap should be 1.

    log p/q is -3 + 4 = 1 of the best and -5 + 3 = -2 of the worst: the gap is 3, its square from
    the target 4, and the loss 0.005 * 3 + 0.995 * 4.
    """
    sums = torch.tensor([-3.0, -5.0, -4.0, -3.0])
    total, parts = bonbon_loss(*sums, target=target_gap(2), alpha=0.005)
    assert parts == {"sft": 3, "gap": 3, "square": 4, "drift": -0.5}
    assert float(total) == pytest.approx(0.005 * 3 + 0.995 * 4)
    assert float(bonbon_loss(*sums, target=5.5, alpha=1.0)[0]) == 3, "plain finetuning"


@pytest.mark.parametrize(
    ("candidates", "expected_beta", "gap"),
    [(2, 0.5, 1.0), (4, 1 / 11, 5.5), (8, 0.0275482094, 18.15), (10, 0.01964, 25.46)],
)
def test_beta_is_that_of_the_paper(candidates: int, expected_beta: float, gap: float) -> None:
    target = target_gap(candidates)
    assert (1 / (2 * target), target) == pytest.approx((expected_beta, gap), rel=1e-3)


def decoded_log_probability(segments: Sequence[Segment]) -> float:
    """Decode an answer, every token forced, and add up what each thread thought of its tokens."""
    recorder = Watched(Replay(segments, async_close=world.CLOSE, end=world.END))
    scheduler = Scheduler(TorchEngine(tiny_llama()), world.VOCABULARY, world.SCHEME)
    answer_of(scheduler, Request(PROMPT, recorder, Rules(max_tokens=256)))
    threads: dict[int, list[int]] = {0: []}
    for segment in segments:
        if isinstance(segment, ChunkRun):
            threads[len(threads)] = [*segment.ids[1:], world.CLOSE]
        else:
            threads[0] += getattr(segment, "ids", (world.SYNC,))
    threads[0].append(world.END)
    return sum(
        float(torch.from_numpy(recorder.logits[thread, index]).log_softmax(-1)[token])
        for thread, tokens in threads.items()
        for index, token in enumerate(tokens)
    )


@few(10)
@given(world.answers().filter(bool))
@example(world.CHUNK_AFTER_SYNC)
def test_a_sequences_log_probability_is_the_sum_over_its_teacher_forced_threads(
    segments: list[Segment],
) -> None:
    pair = Example((layout(WORST), layout(segments)), candidates=2)
    (scored,) = with_references(tiny_llama(), [pair], bf16=False)
    assert scored.reference[1] == pytest.approx(decoded_log_probability(segments), abs=1e-3)
