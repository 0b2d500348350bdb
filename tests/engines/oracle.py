"""What every logit must be, computed without a cache from the calls of an engine.

`Recorder` stands before an engine and keeps plain lists: which tokens each branch must see. An
oracle then computes the logits of all tokens at once: a model with a dense mask, or a script.

Shapes: T all tokens fed, V vocabulary, F feeds that want logits.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pasta_decoding.engines.base import Branch, Engine, Feed, FloatArray
from tests.scripted import Script

TOLERANCE = 1e-4


class Recorder:
    """Passes every call on to `engine`, and records which tokens each token must see."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.seen: list[list[int]] = []  # for each token what it sees: joined ones, then its path
        self.rows: list[tuple[int, FloatArray]] = []  # the logits_V that the engine gave to a token
        self._writers: list[Branch] = []
        self._paths: dict[Branch, list[int]] = {}
        self._joined: dict[Branch, set[int]] = {}
        self._lines: dict[Branch, set[Branch]] = {}  # itself and all it descends from

    def open(self, prompt: Sequence[int], *, room: int = 100) -> Branch:
        branch = self._opened(len(prompt) + room)
        self.step(Feed((branch,), tuple(prompt), tuple(range(len(prompt)))))
        return branch

    def open_like(self, source: Branch, tokens: int, *, room: int = 100) -> Branch:
        """Open a request that begins with copies; they must be as good as tokens fed to it."""
        branch = self._opened(tokens + room)
        self.engine.copy(source, branch, tokens)
        first = self._paths[source][:tokens]
        ids = [self.ids[token] for token in first]
        positions = [self.positions[token] for token in first]
        self._write(Feed((branch,), tuple(ids), tuple(positions)))
        return branch

    def shrink(self, branch: Branch, tokens: int) -> None:
        self.engine.shrink(branch, tokens)
        self._paths[branch] = self._paths[branch][:tokens]
        self._joined[branch] = set()

    def _opened(self, reserved_tokens: int) -> Branch:
        branch = self.engine.open(reserved_tokens=reserved_tokens)
        self._paths[branch] = []
        self._joined[branch] = set()
        self._lines[branch] = {branch}
        return branch

    def next_position(self, branch: Branch) -> int:
        """1 + the largest position that `branch` sees."""
        seen = {*self._paths[branch], *self._joined[branch]}
        return 1 + max(self.positions[token] for token in seen)

    def fork(self, parent: Branch) -> Branch:
        child = self.engine.fork(parent)
        self._paths[child] = [*self._paths[parent]]
        self._joined[child] = {*self._joined[parent]}
        self._lines[child] = {child, *self._lines[parent]}
        return child

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        self.engine.join(parent, children)
        for child in children:
            self._joined[parent] |= {*self._paths.pop(child), *self._joined.pop(child)}
        self._joined[parent] -= {*self._paths[parent]}

    def step(self, *feeds: Feed) -> FloatArray:
        logits_FV = self.engine.step(feeds)
        rows = iter(logits_FV)
        for feed in feeds:
            self._write(feed)
            if feed.wants_logits:
                self.rows.append((len(self.ids) - 1, next(rows)))
        assert next(rows, None) is None
        return logits_FV

    def greedy(
        self, *branches: Branch, positions: Sequence[int], logits_FV: FloatArray
    ) -> FloatArray:
        """Feed each branch its best next token at its position, all in one step."""
        best = logits_FV.argmax(axis=-1).tolist()
        triples = zip(branches, best, positions, strict=True)
        return self.step(*(Feed((branch,), (id_,), (at,)) for branch, id_, at in triples))

    def close(self, *branches: Branch) -> None:
        for branch in branches:
            self.engine.close(branch)

    def _write(self, feed: Feed) -> None:
        writer = feed.branches[0]
        for id_, position in zip(feed.ids, feed.positions, strict=True):
            for branch in feed.branches:
                self._paths[branch].append(len(self.ids))
            self.ids.append(id_)
            self.positions.append(position)
            self._writers.append(writer)
            self.seen.append(self._seen_by(writer))

    def _seen_by(self, branch: Branch) -> list[int]:
        """In the order of `Script`; an ancestor may be joined with what it wrote since the fork."""
        line = self._lines[branch]
        writers = self._writers
        seen = {*self._paths[branch], *self._joined[branch]}
        joined = [token for token in seen if writers[token] not in line]
        path = [token for token in seen if writers[token] in line]
        return [*sorted(joined, key=lambda token: (writers[token], token)), *sorted(path)]


Oracle = Callable[[Recorder], FloatArray]
"""From a record to logits_TV."""


def dense(model: PreTrainedModel) -> Oracle:
    """Return an oracle of one forward pass over all tokens, with a mask made by hand."""

    def oracle(record: Recorder) -> FloatArray:
        window = getattr(model.config, "sliding_window", None)
        masks = {
            "full_attention": seen_by_hand(record, math.inf),
            "sliding_attention": seen_by_hand(record, window or math.inf),
        }
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([record.ids]),
                position_ids=torch.tensor([record.positions]),
                attention_mask=masks if window else masks["full_attention"],
                use_cache=False,
            )
        logits_TV: FloatArray = output.logits[0].numpy()
        return logits_TV

    return oracle


def seen_by_hand(record: Recorder, window: float) -> Tensor:
    """[1, 1, T, T], added to the scores: what each token must see at less than `window` behind."""
    mask_TT = torch.full((len(record.ids), len(record.ids)), float("-inf"))
    for token, seen in enumerate(record.seen):
        for other in seen:
            if record.positions[token] - record.positions[other] < window:
                mask_TT[token, other] = 0.0
    return mask_TT[None, None]


def by_script(script: Script) -> Oracle:
    """Return an oracle that asks the script about each token with the tokens that it must see."""

    def oracle(record: Recorder) -> FloatArray:
        return np.stack(
            [script(tuple(record.ids[token] for token in seen)) for seen in record.seen]
        )

    return oracle


def assert_equals_recompute(record: Recorder, oracle: Oracle) -> None:
    """Every row that the engine gave is the one that the oracle computes for that token."""
    expected_TV = oracle(record)
    tokens, rows = zip(*record.rows, strict=True)
    np.testing.assert_allclose(np.stack(rows), expected_TV[list(tokens)], rtol=0, atol=TOLERANCE)
