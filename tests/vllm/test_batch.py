"""Requests of a batch: every row obeys the rules of the request that is there now."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pasta_decoding.answer.constraints import NO_IDS, Constraint
from pasta_decoding.answer.guided import GuidedParams, GuideKind
from pasta_decoding.vllm.batch import (
    UNKNOWN,
    GuidedRows,
    GuidedSlots,
    RowRestriction,
    ServedModel,
    restrict,
)
from tests.answer.play import ID, SIZE, VOCABULARY
from tests.law.world import CLOSE, CONTROL, END, ENDS, OPEN, P20, P50, SYNC
from tests.vllm.tokens import Direction, Tokenizer, change, params

A = ID["a"]
B = ID["b"]
SERVED = ServedModel(Tokenizer(), SIZE)
MAIN = GuidedParams(GuideKind.main, CONTROL, ENDS, promises=2)
CHUNK = GuidedParams(GuideKind.chunk, CONTROL, ENDS)
CHECK = GuidedParams(GuideKind.check, CONTROL, ENDS, verdicts=(10, 11, 12, 13))
TEXT = set(range(SIZE)) - CONTROL.ids
CHUNK_START = set(range(SIZE)) - set(VOCABULARY.not_chunk_start.tolist())
CLOSES = {P20, P50}
ANYTHING = set(range(SIZE))


def open_ids(batch: GuidedRows, rows: int) -> list[set[int]]:
    """Return the tokens that each row may write."""
    logits_RV = batch.apply(torch.zeros(rows, SIZE))
    return [set(torch.isfinite(row).nonzero()[:, 0].tolist()) for row in logits_RV]


def filled(*guides: GuidedParams | None) -> tuple[GuidedRows, list[list[int]]]:
    """Return a batch of new requests, and their outputs, which grow as vLLM's do."""
    batch = GuidedRows(SERVED)
    outputs: list[list[int]] = [[] for _ in guides]
    added = [(row, params(guide), None, outputs[row]) for row, guide in enumerate(guides)]
    batch.update(change(added=added))
    return batch, outputs


def test_each_row_follows_what_was_written_without_any_change_and_others_are_left_alone() -> None:
    batch, outputs = filled(MAIN, CHUNK, None)
    assert open_ids(batch, 3) == [TEXT | {OPEN}, CHUNK_START, ANYTHING]
    outputs[0] += [A, OPEN]
    outputs[1] += [B]
    batch.update(None)
    main, chunk = open_ids(batch, 2)
    assert main < TEXT
    assert not main & CLOSES, "a topic has a token"
    assert chunk == TEXT | {CLOSE}
    outputs[0] += [B, P20]
    batch.update(None)
    assert open_ids(batch, 2)[0] == TEXT | {OPEN, SYNC}
    outputs[0] += [OPEN, B, P50]
    assert open_ids(batch, 2)[0] == TEXT | {SYNC}, "promises run out"


def test_biases_are_added_to_the_logits_of_tags() -> None:
    batch, _ = filled(replace(MAIN, sync=True, eagerness=3.0, sync_bias=-1.0))
    logits_V = batch.apply(torch.zeros(1, SIZE))[0]
    assert [float(logits_V[tag]) for tag in (OPEN, SYNC)] == [3, -1]


@pytest.mark.parametrize("instead", [[], [B], [B, A]])
def test_tokens_that_are_taken_back_or_replaced_were_never_written(instead: list[int]) -> None:
    batch, outputs = filled(MAIN)
    outputs[0] += [A, OPEN]
    assert open_ids(batch, 1)[0] < TEXT
    outputs[0][1:] = instead
    assert open_ids(batch, 1) == [TEXT | {OPEN}]


def test_a_check_tells_that_all_is_well_and_that_its_first_token_is_seen() -> None:
    batch, outputs = filled(CHECK)
    assert open_ids(batch, 1) == [{10}]
    outputs[0] += [10]
    assert open_ids(batch, 1) == [{11}]
    outputs[0][0] = UNKNOWN
    assert open_ids(batch, 1) == [{12}]


@pytest.mark.parametrize(
    "guide",
    [
        GuidedParams(GuideKind.main, CONTROL, (END, SIZE)),
        GuidedParams(GuideKind.main, CONTROL, ENDS, topic_ids=(2**31 - 1,)),
        GuidedParams(GuideKind.check, CONTROL, ENDS, verdicts=(SIZE, 11, 12, 13)),
    ],
)
def test_ids_that_the_model_does_not_have_end_the_request_and_harm_nobody(
    guide: GuidedParams,
) -> None:
    batch, _ = filled(guide, CHUNK)
    assert open_ids(batch, 2) == [{END}, CHUNK_START]


GuidedRequest = tuple[GuidedParams | None, list[int]]
"""Params and output of a request."""
Rows = list[GuidedRequest | None]


def test_any_run_of_changes_keeps_rows_and_requests_together() -> None:
    """The batch is compared with a list of requests by row."""
    dice = random.Random(5)
    batch = GuidedRows(SERVED)
    rows: Rows = []
    for _ in range(60):
        removed = [row for row, request in enumerate(rows) if request and dice.random() < 0.2]
        for row in removed:
            rows[row] = None
        added = []
        for row in [*removed[: dice.randrange(3)], len(rows)][: dice.randrange(3)]:
            if row == len(rows) == 6:
                continue
            guide = dice.choice([MAIN, CHUNK, None])
            output = list(dice.choice([(), (A,), (A, OPEN)]))
            rows[row : row + 1] = [(guide, output)]
            added.append((row, params(guide), None, output))
        moved = condensed(rows, dice)
        batch.update(change(removed=removed, added=added, moved=moved))
        for request in rows:
            if request and dice.random() < 0.5:
                _, output = request
                output.append(dice.choice([A, B]))
        assert open_ids(batch, len(rows)) == [open_ids_alone(request) for request in rows]


def condensed(rows: Rows, dice: random.Random) -> list[tuple[int, int, Direction]]:
    """Fill holes with the last rows, as vLLM does, and swap two of them."""
    moved = []
    while None in rows:
        last = rows.pop()
        if last is not None:
            hole = rows.index(None)
            moved.append((len(rows), hole, Direction.UNIDIRECTIONAL))
            rows[hole] = last
    if len(rows) > 1:
        first, second = dice.sample(range(len(rows)), 2)
        rows[first], rows[second] = rows[second], rows[first]
        moved.append((first, second, Direction.SWAP))
    return moved


def open_ids_alone(request: GuidedRequest | None) -> set[int]:
    """Return the tokens that a request may write in a batch without others."""
    assert request is not None
    guide, output = request
    batch = GuidedRows(SERVED)
    batch.update(change(added=[(0, params(guide), None, output)]))
    return open_ids(batch, 1)[0]


class Runner:
    """The second runner's record of its slots, and the rows of a step."""

    def __init__(self, slots: int) -> None:
        self.ids = torch.zeros(slots, 64, dtype=torch.int32)
        self.prompt_len = SimpleNamespace(np=np.zeros(slots, dtype=np.int32))
        self.all_token_ids = SimpleNamespace(gpu=self.ids)
        self.total = [0] * slots

    def begin(self, slot: int, prompt: list[int], output: list[int]) -> None:
        ids = prompt + output
        self.ids[slot, : len(ids)] = torch.tensor(ids)
        self.prompt_len.np[slot] = len(prompt)
        self.total[slot] = len(ids)

    def write(self, slot: int, token: int) -> None:
        self.ids[slot, self.total[slot]] = token
        self.total[slot] += 1

    def step(self, *slots: int) -> Any:
        last = [self.total[slot] - 1 for slot in slots]
        mapping = torch.tensor(slots, dtype=torch.int32)
        return SimpleNamespace(
            expanded_idx_mapping=mapping,
            idx_mapping_np=mapping.numpy(),
            input_ids=self.ids[mapping.long(), last],
            pos=torch.tensor(last),
        )


def open_in_step(slots: GuidedSlots, context: Any) -> list[set[int]]:
    logits_RV = slots.apply(torch.zeros(len(context.pos), SIZE), context)
    return [set(torch.isfinite(row).nonzero()[:, 0].tolist()) for row in logits_RV]


def test_slots_are_followed_in_whatever_order_their_rows_come() -> None:
    runner = Runner(4)
    slots = GuidedSlots(SERVED, runner)
    for slot, guide in ((3, MAIN), (1, CHUNK), (0, None)):
        runner.begin(slot, [A, B], [])
        assert slots.add(slot, params(guide)) is (guide is not None)
    assert open_in_step(slots, runner.step(0, 1, 3)) == [ANYTHING, CHUNK_START, TEXT | {OPEN}]
    runner.write(1, A)
    runner.write(3, OPEN)
    main, chunk = open_in_step(slots, runner.step(3, 1))
    assert main < TEXT
    assert chunk == TEXT | {CLOSE}
    runner.write(3, B)
    open_in_step(slots, runner.step(3))
    runner.write(3, P20)
    assert open_in_step(slots, runner.step(3)) == [TEXT | {OPEN, SYNC}]


@pytest.mark.parametrize("written", [[], [B, OPEN, B, P20]])
def test_a_slot_that_is_filled_again_knows_what_was_written_before(written: list[int]) -> None:
    runner = Runner(2)
    slots = GuidedSlots(SERVED, runner)
    runner.begin(1, [A], written)
    slots.add(1, params(MAIN))
    assert open_in_step(slots, runner.step(1)) == [open_ids_alone((MAIN, written))]


def test_drafts_that_were_refused_were_never_written() -> None:
    """A request has a row for its last token, and one for each draft behind it."""
    runner = Runner(1)
    slots = GuidedSlots(SERVED, runner)
    runner.begin(0, [A, B], [A])
    slots.add(0, params(MAIN))
    assert drafted(slots, runner, OPEN, A, P20)[1:] == [
        *(open_ids_alone((MAIN, [A, *written])) for written in ([OPEN], [OPEN, A], [OPEN, A, P20]))
    ]
    for token in (OPEN, B):  # the first draft stands, the second is replaced
        runner.write(0, token)
    assert open_in_step(slots, runner.step(0)) == [open_ids_alone((MAIN, [A, OPEN, B]))]
    drafted(slots, runner, P50)
    runner.write(0, P20)
    assert open_in_step(slots, runner.step(0)) == [open_ids_alone((MAIN, [A, OPEN, B, P20]))]
    drafted(slots, runner, A, OPEN)
    runner.write(0, B)
    assert open_in_step(slots, runner.step(0)) == [TEXT | {OPEN, SYNC}]


def drafted(slots: GuidedSlots, runner: Runner, *drafts: int) -> list[set[int]]:
    context = runner.step(*[0] * (1 + len(drafts)))
    context.input_ids[1:] = torch.tensor(drafts)
    context.pos += torch.arange(1 + len(drafts))
    return open_in_step(slots, context)


# Restricted logits give the draws of the sampler that the engines here use


def logits(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def restricted(logits_V: torch.Tensor, allowed: Constraint, temperature: float) -> torch.Tensor:
    logits_RV = torch.stack([logits_V, logits_V])
    restrict(logits_RV, [RowRestriction(1, allowed, temperature)])
    assert torch.equal(logits_RV[0], logits_V), "another row"
    return logits_RV[1]


CONSTRAINTS = [
    Constraint(np.array([0, 3, 5])),
    Constraint(NO_IDS, only=np.array([2, 7])),
    Constraint(np.array([0, 3, 5, 6, 7, 8]), substitutes=np.array([1, 2])),
]


@pytest.mark.parametrize("allowed", CONSTRAINTS)
def test_the_likeliest_token_is_the_greedy_choice_of_the_sampler(allowed: Constraint) -> None:
    for seed in range(30):
        expected = allowed.best(logits(seed).numpy())
        assert int(restricted(logits(seed), allowed, 0.0).argmax()) == expected


@pytest.mark.parametrize("allowed", CONSTRAINTS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_chances_are_those_of_a_second_draw_if_the_first_token_is_banned(
    allowed: Constraint, temperature: float
) -> None:
    """The first draw is among all tokens; if its token is banned, a second is among substitutes."""
    logits_V = logits(7)
    first_V = (logits_V / temperature).softmax(0)
    admitted_V = torch.tensor([allowed.admits(token) for token in range(SIZE)])
    pool = allowed.substitutes if allowed.only is None else allowed.only
    pool_V = admitted_V if pool is None else torch.isin(torch.arange(SIZE), torch.tensor(pool))
    second_V = first_V * pool_V / (first_V * pool_V).sum()
    expected_V = first_V * admitted_V + first_V[~admitted_V].sum() * second_V
    actual_V = (restricted(logits_V, allowed, temperature) / temperature).softmax(0)
    torch.testing.assert_close(actual_V, expected_V)
