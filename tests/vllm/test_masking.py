"""What is drawn from restricted logits: what the sampler of the engines here would draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pasta_decoding.runtime.constraints import NOTHING, Constraint
from pasta_decoding.vllm.batch import restrict

SIZE = 12


def logits(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def restricted(logits_V: torch.Tensor, allowed: Constraint, temperature: float) -> torch.Tensor:
    logits_RV = torch.stack([logits_V, logits_V])
    restrict(logits_RV, [(1, allowed, temperature)])
    assert torch.equal(logits_RV[0], logits_V), "another row"
    return logits_RV[1]


CONSTRAINTS = [
    Constraint(np.array([0, 3, 5])),
    Constraint(NOTHING, only=np.array([2, 7])),
    Constraint(np.array([0, 3, 5, 6, 7, 8]), instead=np.array([1, 2])),
]


@pytest.mark.parametrize("allowed", CONSTRAINTS)
def test_the_likeliest_is_the_one_that_is_chosen_greedily(allowed: Constraint) -> None:
    for seed in range(30):
        expected = allowed.best(logits(seed).numpy())
        assert int(restricted(logits(seed), allowed, 0.0).argmax()) == expected


@pytest.mark.parametrize("allowed", CONSTRAINTS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_chances_are_those_of_drawing_again_where_the_first_may_not_stand(
    allowed: Constraint, temperature: float
) -> None:
    """First among all; a banned one is drawn anew among those that stand in for it."""
    logits_V = logits(7)
    first_V = (logits_V / temperature).softmax(0)
    may_V = torch.tensor([allowed.admits(token) for token in range(SIZE)])
    pool = allowed.instead if allowed.only is None else allowed.only
    pool_V = may_V if pool is None else torch.isin(torch.arange(SIZE), torch.tensor(pool))
    again_V = first_V * pool_V / (first_V * pool_V).sum()
    expected_V = first_V * may_V + first_V[~may_V].sum() * again_V
    found_V = (restricted(logits_V, allowed, temperature) / temperature).softmax(0)
    torch.testing.assert_close(found_V, expected_V)


def test_several_rows_forbid_each_its_own() -> None:
    first, _, third = CONSTRAINTS
    logits_RV = torch.zeros(2, SIZE)
    restrict(logits_RV, [(0, third, 0.0), (1, first, 0.0)])
    found = [row.isneginf().nonzero()[:, 0].tolist() for row in logits_RV]
    assert found == [one.banned.tolist() for one in (third, first)]
