"""Which slots of a KV cache belong to which request, and which branch sees which of them.

A slot holds the keys and values of one token. A request takes its slots when it opens and fills
them in the order of feeding. What a branch sees is a list of its request's slots: a fork copies
the list, a join unites lists. No schedule changes the order of a list, so an engine that adds up in
this order gives the same bits under any load. All of this is integers; each engine keeps the keys.

Shapes: F feeds of a step, Q tokens of one request in it (in rows: of all), K slots that the
request has used so far, the step's own included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import numpy as np
import numpy.typing as npt

from pasta_decoding.engines.base import Branch, Feed, Limits
from pasta_decoding.errors import PastaError

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request's part of a forward pass.

    feeds:       those that have the Q tokens.
    start:       the request's first slot; the K slots follow each other from there.
    written:     the slots of the Q tokens, which are the last of the K slots.
    seen:        for each feed the slots that its last token sees; those of the feed come last.
    positions_K: the position of each slot's token, for sliding windows.
    """

    feeds: Sequence[Feed]
    start: int
    written: range
    seen: Sequence[IntArray]
    positions_K: npt.NDArray[np.int64]


class Batch:
    """All tokens of a forward pass, those of one request after those of another.

    ids, positions: of the tokens.
    logits_tokens:  indices of the tokens whose logits are returned.
    order:          which of the rows of logits belongs to each feed that wants one; None: they are
                    in the order of the feeds.
    """

    def __init__(self, items: Sequence[BatchItem], feed_indices: Sequence[int]) -> None:
        """`feed_indices`: of the items' feeds, where each was in the step."""
        self.items = items
        self._feeds = [feed for item in items for feed in item.feeds]
        self.ids = [token for feed in self._feeds for token in feed.ids]
        self.positions = [position for feed in self._feeds for position in feed.positions]
        ends = accumulate(len(feed.ids) for feed in self._feeds)
        self.logits_tokens: list[int] = []
        logits_feeds: list[int] = []
        for feed, end, index in zip(self._feeds, ends, feed_indices, strict=True):
            if feed.wants_logits:
                self.logits_tokens.append(end - 1)
                logits_feeds.append(index)
        in_order = logits_feeds == sorted(logits_feeds)
        self.order = None if in_order else np.argsort(logits_feeds).tolist()

    def rows(self) -> tuple[IntArray, IntArray]:
        """Return the tokens as rows that each name the slots that they see.

        That is rows_5Q (ids, positions, slots written, where each row's list starts, its length),
        and the lists. The tokens of a feed share one: each sees it up to its own slot.
        """
        lists = [seen for item in self.items for seen in item.seen]
        tokens_F = np.array([len(feed.ids) for feed in self._feeds])
        lengths_F = np.array([len(seen) for seen in lists])
        starts_F = lengths_F.cumsum() - lengths_F
        ends_F = tokens_F.cumsum()
        # A feed's last token sees its whole list, each token before that one slot less.
        lengths_Q = np.arange(1, len(self.ids) + 1) - np.repeat(ends_F - lengths_F, tokens_F)
        rows_5Q = np.empty((5, len(self.ids)), dtype=np.int32)
        rows_5Q[0] = self.ids
        rows_5Q[1] = self.positions
        rows_5Q[2] = [slot for item in self.items for slot in item.written]
        rows_5Q[3] = np.repeat(starts_F, tokens_F)
        rows_5Q[4] = lengths_Q
        return rows_5Q, np.concatenate(lists)


class _Branch:
    """Which slots of `request` a branch sees: the first `count` of `slots`."""

    def __init__(self, request: _Request, slots: IntArray) -> None:
        self.request = request
        self.count = len(slots)
        self.slots = np.empty(request.capacity, dtype=np.int32)
        self.slots[: self.count] = slots

    @property
    def seen(self) -> IntArray:
        return self.slots[: self.count]

    def see(self, slots: range) -> None:
        """See these slots, in addition to those that the branch sees."""
        self.slots[self.count : self.count + len(slots)] = np.arange(slots.start, slots.stop)
        self.count += len(slots)


class _Request:
    """What one `open` holds: slots, the positions of their tokens, and who wrote them.

    used:      how many of its slots hold tokens.
    branches:  how many are open.
    forked_at: tokens fed before the first fork; None: there was no fork.
    positions: of the tokens in the slots, in the order of the slots.
    writers:   the branch that wrote each token.
    """

    def __init__(self, start: int, capacity: int) -> None:
        self.start = start
        self.capacity = capacity
        self.used = 0
        self.branches = 0
        self.forked_at: int | None = None
        self.positions = np.zeros(capacity, dtype=np.int64)
        self.writers = np.zeros(capacity, dtype=np.int64)

    @property
    def shared(self) -> int:
        """How many tokens were fed before the first fork: every branch sees them."""
        return self.used if self.forked_at is None else self.forked_at


class CachedEngine:
    """The slots and branches of all open requests: `Engine` without `name`, `copy` and `step`.

    in_one_piece: whether a request's slots must follow each other.
    """

    free_positions = True
    batch_tokens = 256  # on a CPU

    def __init__(self, limits: Limits, *, in_one_piece: bool = True) -> None:
        self.vocabulary_size = limits.vocabulary_size
        self.max_positions = limits.max_positions
        self.max_slots = limits.max_slots
        self.max_branches = limits.max_branches
        self._limits = limits
        self._in_one_piece = in_one_piece
        self._branches: dict[Branch, _Branch] = {}
        self._names = count()

    @property
    def slots_in_use(self) -> int:
        return sum(request.used for request in self._requests())

    def open(self, *, reserved_tokens: int) -> Branch:
        assert reserved_tokens > 0, "that is a number of tokens"
        request = _Request(self._find_room(reserved_tokens), reserved_tokens)
        return self._add_branch(request, np.empty(0, dtype=np.int32))

    def fork(self, parent: Branch) -> Branch:
        parent_state = self._branch(parent)
        request = parent_state.request
        child = self._add_branch(request, parent_state.seen)
        request.forked_at = request.shared
        return child

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        assert parent not in children, "a branch cannot join itself"
        states = [self._branch(branch) for branch in (parent, *children)]
        request = states[0].request
        assert all(state.request is request for state in states), "a request joins its own branches"
        seen = np.unique(np.concatenate([state.seen for state in states]))
        writers = request.writers[seen - request.start]
        # By branches as they were forked: who ended first depends on what else was decoded.
        order = np.argsort(writers, kind="stable")
        self._branches[parent] = _Branch(request, seen[order])
        for child in children:
            self.close(child)

    def shrink(self, branch: Branch, tokens: int) -> None:
        request = self._branch(branch).request
        assert request.branches == 1, "others see the slots"
        assert 0 < tokens <= request.shared, "those fed before the first fork"
        request.capacity = tokens
        request.used = tokens
        request.forked_at = None
        request.positions = request.positions[:tokens].copy()
        request.writers = request.writers[:tokens].copy()
        slots = np.arange(request.start, request.start + tokens, dtype=np.int32)
        self._branches[branch] = _Branch(request, slots)

    def close(self, branch: Branch) -> None:
        self._branch(branch).request.branches -= 1
        del self._branches[branch]

    def mark_copied(self, source: Branch, target: Branch, tokens: int) -> tuple[slice, slice]:
        """Mark the first tokens of `source` as fed to `target`; return the slots of both."""
        source_request = self._branch(source).request
        target_state = self._branch(target)
        target_request = target_state.request
        assert not target_request.used, "a copy goes where nothing was fed"
        assert target_request.branches == 1, "to the only branch"
        limit = min(source_request.shared, target_request.capacity)
        assert 0 < tokens <= limit, "those fed before the first fork"
        target_slots = range(target_request.start, target_request.start + tokens)
        target_state.see(target_slots)
        target_request.positions[:tokens] = source_request.positions[:tokens]
        target_request.writers[:tokens] = target
        target_request.used = tokens
        return (
            slice(source_request.start, source_request.start + tokens),
            slice(target_slots.start, target_slots.stop),
        )

    def plan(self, feeds: Sequence[Feed]) -> Batch:
        """Split a step by request, check all of it, then give its tokens their slots.

        Checks come first: a refused step leaves no trace. Raises PastaError for ids and positions
        that the model does not have, and for more tokens than a request has room for.
        """
        indices_of: dict[_Request, list[int]] = {}  # of its feeds
        for index, feed in enumerate(feeds):
            assert len(feed.ids) == len(feed.positions) > 0, "a feed has a position for each token"
            request, *other_requests = [self._branch(branch).request for branch in feed.branches]
            for other in other_requests:
                assert other is request, "a feed stays within its request"
            indices_of.setdefault(request, []).append(index)
            self._limits.check(feed.ids, feed.positions)
        for request, indices in indices_of.items():
            fed_tokens = sum(len(feeds[index].ids) for index in indices)
            if request.used + fed_tokens > request.capacity:
                raise PastaError(
                    f"no room for {fed_tokens} more tokens: the request holds {request.used} of at "
                    f"most {request.capacity}"
                )
        items = [
            self._write(request, [feeds[index] for index in indices])
            for request, indices in indices_of.items()
        ]
        return Batch(items, [index for indices in indices_of.values() for index in indices])

    def _write(self, request: _Request, feeds: Sequence[Feed]) -> BatchItem:
        """Give the feeds' tokens their slots, and list which slots each feed sees."""
        used_before = request.used
        lists = []
        for feed in feeds:
            start = request.used
            end = start + len(feed.ids)
            writer, *others = [self._branches[branch] for branch in feed.branches]
            for other in others:
                assert np.array_equal(writer.seen, other.seen), "branches fed together differ"
            for state in (writer, *others):
                state.see(range(request.start + start, request.start + end))
            lists.append(writer.seen)
            request.positions[start:end] = feed.positions
            request.writers[start:end] = feed.branches[0]
            request.used = end
        written = range(request.start + used_before, request.start + request.used)
        return BatchItem(feeds, request.start, written, lists, request.positions[: request.used])

    def _requests(self) -> list[_Request]:
        """Return the open requests in the order of their slots."""
        requests = {branch.request for branch in self._branches.values()}
        return sorted(requests, key=lambda request: request.start)

    def _find_room(self, size: int) -> int:
        """Return the first slot of the lowest gap that takes `size` slots."""
        requests = self._requests()
        slots = self.max_slots
        taken = sum(request.capacity for request in requests)
        if slots is not None and taken + size > slots:
            raise PastaError(
                f"no room for {size} tokens: {taken} of the engine's {slots} slots are taken"
            )
        gap_start = 0
        widest = 0
        for request in requests:
            gap = request.start - gap_start
            if gap >= size:
                return gap_start
            widest = max(widest, gap)
            gap_start = request.start + request.capacity
        if slots is not None and self._in_one_piece and gap_start + size > slots:
            raise PastaError(
                f"no room for {size} tokens in one piece: the widest gap among the engine's "
                f"{slots} slots is {max(widest, slots - gap_start)}"
            )
        return gap_start

    def _add_branch(self, request: _Request, seen: IntArray) -> Branch:
        limit = self.max_branches
        if limit is not None and len(self._branches) >= limit:
            raise PastaError(f"the engine's {limit} branches are all in use")
        name = Branch(next(self._names))
        self._branches[name] = _Branch(request, seen)
        request.branches += 1
        return name

    def _branch(self, name: Branch) -> _Branch:
        assert name in self._branches, f"branch {name} is not open"
        return self._branches[name]
