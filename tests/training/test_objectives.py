"""The losses of stage 2 against formulas worked by hand, simulation and their own definitions."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given

from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.layout import ChunkRun, Layout, MainRun, PromiseRun, Segment, lay_out
from pasta_decoding.scheduling.decoder import answer_of
from pasta_decoding.scheduling.scheduler import Scheduler
from pasta_decoding.training.objectives import (
    anchored_loss,
    anchored_pulls,
    best_target,
    bonbon_loss,
    gap_target,
    worst_target,
)
from pasta_decoding.training.pairs import differing_labels, labels_of, with_references
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


REFERENCES = {"reference_best": -4.0, "reference_worst": -3.0}
BEST = torch.tensor(-3.0)
WORST_SUM = torch.tensor(-5.0)


def test_bonbon_s_square_and_sigmoid_by_hand() -> None:
    """N = 2: beta = 1 / (2 * 1 * 1) = 1/2, so the gap should be 1.

    ln p/q is -3 + 4 = 1 of the best and -5 + 3 = -2 of the worst: the gap is 3, its square from
    the target 4, and the sigmoid's argument 3 / 2.
    """
    square, parts = bonbon_loss(
        BEST, WORST_SUM, **REFERENCES, candidates=2, alpha=0.005, sigmoid=False
    )
    assert [float(parts[name]) for name in ("gap", "contrast", "target")] == [3, 4, 1]
    assert float(square) == pytest.approx(0.005 * 3 + 0.995 * 4)
    sigmoid, _ = bonbon_loss(BEST, WORST_SUM, **REFERENCES, candidates=2, alpha=0.005, sigmoid=True)
    assert float(sigmoid) == pytest.approx(0.005 * 3 + 0.995 * math.log(1 + math.exp(-1.5)))


@pytest.mark.parametrize(
    ("candidates", "expected_beta", "gap"),
    [(2, 0.5, 1.0), (4, 1 / 11, 5.5), (8, 0.0275482094, 18.15), (10, 0.01964, 25.46)],
)
def test_beta_is_that_of_the_paper(candidates: int, expected_beta: float, gap: float) -> None:
    target = gap_target(candidates)
    assert (1 / (2 * target), target) == pytest.approx((expected_beta, gap), rel=1e-3)


@pytest.mark.parametrize("candidates", [2, 6, 8])
def test_the_targets_are_the_log_ratios_of_best_and_worst_of_n(candidates: int) -> None:
    """Draw N scores, keep the largest (smallest): its density at quantile Q is N Q^(N-1) times q's.

    The best-of-N policy writes the largest, so the mean of ln (N Q^(N-1)) over what it writes is
    its mean log-ratio; the same function over the smallest is that of the worst.
    """
    quantiles = np.random.default_rng(0).random((200_000, candidates))
    log_ratios = [
        np.log(candidates * extreme ** (candidates - 1)).mean()
        for extreme in (quantiles.max(axis=1), quantiles.min(axis=1))
    ]
    targets = [best_target(candidates), worst_target(candidates)]
    assert targets == pytest.approx(log_ratios, abs=0.05)
    assert targets[0] - targets[1] == pytest.approx(gap_target(candidates))


def test_the_anchored_loss_by_hand() -> None:
    """N = 8: t_best = ln 8 - 7/8, and t_worst is limited to -4."""
    total, parts = anchored_loss(
        BEST, WORST_SUM, torch.tensor(-7.0), **REFERENCES, best_of=8, worst_of=8
    )
    t_best = math.log(8) - 7 / 8
    expected = (1 - t_best) ** 2 + 0.25 * (-2 + 4) ** 2 + 0.5 * 3 + 0.5 * 7
    assert float(total) == pytest.approx(expected)
    assert {name: float(part) for name, part in parts.items()} == {
        "sft": 3,
        "replay": 7,
        "ratio_best": 1,
        "ratio_worst": -2,
    }


def test_the_pulls_are_the_gradients_of_the_terms_before_the_first_step() -> None:
    best, worst, replay = (torch.zeros((), requires_grad=True) for _ in range(3))
    loss, _ = anchored_loss(
        best, worst, replay, reference_best=0, reference_worst=0, best_of=8, worst_of=8
    )
    gradients = torch.autograd.grad(loss, [best, worst, replay])
    pulls = [2 * best_target(8) + 0.5, 0.5 * 4, 0.5]
    assert [abs(float(gradient)) for gradient in gradients] == pytest.approx(pulls)
    shares = anchored_pulls(8, 8)
    assert shares["best"] + shares["sft"] == pytest.approx(pulls[0] / sum(pulls))
    assert shares["worst"] == pytest.approx(pulls[1] / sum(pulls))
    assert sum(shares.values()) == pytest.approx(1)


def test_of_the_worst_answer_only_the_labels_count_in_which_it_differs() -> None:
    """Both begin with 11 and a promise; endings and closings of the worst are left alone."""
    best = layout([*WORST[:2], ChunkRun((world.ASYNC, 40)), MainRun((19,))])
    worst = layout([*WORST[:2], ChunkRun((world.ASYNC, 30, 31)), MainRun((17, 18))])
    silent = frozenset([world.CLOSE, world.SYNC, world.END])
    (counts,) = differing_labels([best], [worst], silent)
    labels = zip(labels_of(worst), counts, strict=True)
    assert [label for label, is_counted in labels if is_counted] == [17, 30, 31, 18]


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
    worst = layout(segments)
    all_count = (True,) * len(labels_of(worst))
    pair = Example((layout(WORST), worst), worst_counts=(all_count,))
    (scored,) = with_references(tiny_llama(), [pair], bf16=False)
    assert scored.reference[1] == pytest.approx(decoded_log_probability(segments), abs=1e-3)
