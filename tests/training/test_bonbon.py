"""The loss of stage 2 against the formula worked by hand, and against its own definition.

The published BoNBoN code computes another loss, so nothing here is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pasta_decoding.engines.support import attention_windows
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.layout import ChunkRun, Layout, PromiseRun, Run, Segment, lay_out
from pasta_decoding.runtime.local import answer_of
from pasta_decoding.runtime.request import Request, Rules
from pasta_decoding.runtime.sampler import Replay
from pasta_decoding.runtime.scheduler import Scheduler
from pasta_decoding.training.bonbon import PairLoss, beta, bonbon_loss, target_gap
from pasta_decoding.training.pairs import (
    PairExample,
    log_probabilities,
    pair_inputs,
    reference_sums,
)
from tests.examples import few
from tests.law import world
from tests.law.watched import Watched
from tests.tiny import tiny_llama

PROMPT = (60, 61, 62)
WORST: list[Segment] = [
    Run((11,)),
    PromiseRun((world.OPEN, 23, world.P20), 20),
    ChunkRun((world.ASYNC, 30, 31), closed=False),
    Run((17, 18)),
]


def layout(segments: Sequence[Segment], end: int | None = world.END) -> Layout:
    return lay_out(PROMPT, segments, world.SCHEME, async_close=world.CLOSE, end=end)


EXAMPLE = PairExample(layout(world.CHUNK_AFTER_SYNC), layout(WORST, end=None), candidates=4)


def loss(gap: float, target: float, *, alpha: float = 0.0) -> PairLoss:
    """The loss of a pair whose references are 0 and whose worst did not move."""
    best = torch.tensor(gap)
    zero = torch.tensor(0.0)
    return bonbon_loss(best, zero, zero, zero, target=target, alpha=alpha)


def test_two_candidates_by_hand() -> None:
    """N = 2: beta = 1 / (2 * 1 * 1) = 1/2, so the gap should be 1.

    log p/q is -3 + 4 = 1 of the best and -5 + 3 = -2 of the worst: the gap is 3, its square from
    the target 4, and the loss 0.005 * 3 + 0.995 * 4.
    """
    assert beta(2) == 0.5
    found = bonbon_loss(
        torch.tensor(-3.0),
        torch.tensor(-5.0),
        torch.tensor(-4.0),
        torch.tensor(-3.0),
        target=target_gap(2),
        alpha=0.005,
    )
    assert float(found.sft) == 3
    assert float(found.gap) == 3
    assert float(found.square) == 4
    assert float(found.drift) == -0.5
    assert float(found.total) == pytest.approx(0.005 * 3 + 0.995 * 4)


@pytest.mark.parametrize(
    ("candidates", "expected_beta", "gap"),
    [(2, 0.5, 1.0), (4, 1 / 11, 5.5), (8, 0.0275482094, 18.15), (10, 0.01964, 25.46)],
)
def test_beta_is_that_of_the_paper(candidates: int, expected_beta: float, gap: float) -> None:
    assert beta(candidates) == pytest.approx(expected_beta, rel=1e-3)
    assert target_gap(candidates) == pytest.approx(gap, rel=1e-3)
    assert target_gap(candidates) == pytest.approx(1 / (2 * beta(candidates)))


@pytest.mark.parametrize("candidates", [2, 4, 8])
def test_the_square_has_its_minimum_at_a_gap_of_one_over_two_beta(candidates: int) -> None:
    target = target_gap(candidates)
    assert float(loss(target, target).total) == pytest.approx(0)
    for step in (-1.0, -1e-2, 1e-2, 1.0):
        found = loss(target + step, target)
        assert float(found.total) == pytest.approx(step**2, rel=1e-2)


@pytest.mark.parametrize("gap", [-3.0, 0.0, 5.4, 5.5, 5.6, 40.0])
def test_the_slope_is_linear_in_the_distance_to_the_target(gap: float) -> None:
    """A sigmoid loss, which the published code has, would flatten out instead."""
    best = torch.tensor(gap, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros((), dtype=torch.float64)
    found = bonbon_loss(best, zero, zero, zero, target=5.5, alpha=0.0)
    torch.autograd.backward(found.total)
    assert best.grad is not None
    assert float(best.grad) == pytest.approx(2 * (gap - 5.5))


def test_alpha_one_is_plain_finetuning_on_the_best() -> None:
    found = bonbon_loss(*torch.tensor([-7.0, -9.0, -1.0, -2.0]), target=5.5, alpha=1.0)
    assert float(found.total) == 7


def in_float64(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Transformers' norms compute in float32, whatever the weights; torch's own do not."""
    for owner in list(model.modules()):
        for name, norm in list(owner.named_children()):
            if isinstance(norm, LlamaRMSNorm):
                other = torch.nn.RMSNorm(len(norm.weight), eps=norm.variance_epsilon)
                other.load_state_dict(norm.state_dict())
                setattr(owner, name, other)
    return model.double()


def test_the_gradient_is_that_of_finite_differences() -> None:
    """In float64, through both sequences' masks, for the steepest and some other weights."""
    model = in_float64(tiny_llama())
    inputs = pair_inputs(EXAMPLE, attention_windows(model.config))
    references = torch.tensor([-60.0, -20.0], dtype=torch.float64)

    def total() -> torch.Tensor:
        best, worst = log_probabilities(model, dict(inputs))
        return bonbon_loss(best, worst, *references, target=5.5, alpha=0.005).total

    torch.autograd.backward(total())
    for weight in (model.model.layers[0].self_attn.q_proj.weight, model.lm_head.weight):
        gradient = weight.grad
        assert gradient is not None
        flat, step = weight.data.view(-1), 1e-5
        for place in (int(gradient.abs().argmax()), 7, 123):
            kept = float(flat[place])
            ends = []
            for at in (kept + step, kept - step):
                flat[place] = at
                with torch.no_grad():
                    ends.append(float(total()))
            flat[place] = kept
            numeric = (ends[0] - ends[1]) / (2 * step)
            assert numeric == pytest.approx(float(gradient.view(-1)[place]), rel=1e-5, abs=1e-6)


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


def test_a_sequences_log_probability_is_the_sum_over_its_teacher_forced_threads() -> None:
    sibling: list[Segment] = [Run((12, 13))]
    example = PairExample(layout(world.CHUNK_AFTER_SYNC), layout(sibling), candidates=2)
    (found,) = reference_sums(tiny_llama(), [example], bf16=False)
    assert found.best == pytest.approx(decoded_log_probability(world.CHUNK_AFTER_SYNC), abs=1e-3)
    assert found.worst == pytest.approx(decoded_log_probability(sibling), abs=1e-3)


@few(10)
@given(world.answers().filter(bool))
def test_that_holds_for_any_answer(segments: list[Segment]) -> None:
    example = PairExample(layout(WORST), layout(segments), candidates=2)
    (found,) = reference_sums(tiny_llama(), [example], bf16=False)
    assert found.worst == pytest.approx(decoded_log_probability(segments), abs=1e-3)


def test_forced_tokens_and_what_a_limit_cut_have_no_part_in_it() -> None:
    model = tiny_llama()
    whole = layout([Run((11, 12, 13))])
    forced = layout([Run((11, 12, 13), forced=1)], end=None)
    (found,) = reference_sums(model, [PairExample(whole, forced, 2)], bf16=False)
    with torch.inference_mode():
        logprobs_TV = model(torch.tensor([[*PROMPT, 11, 12, 13]])).logits[0].log_softmax(-1)
    each = [float(logprobs_TV[row, token]) for row, token in ((2, 11), (3, 12), (4, 13), (5, 0))]
    assert found.best == pytest.approx(sum(each), abs=1e-4)
    assert found.worst == pytest.approx(sum(each[:2]), abs=1e-4)
