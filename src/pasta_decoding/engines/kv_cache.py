"""Which slots of a KV cache belong to which request, and which branch sees which of them.

A slot holds the keys and values of one token. A request takes its slots when it opens and fills
them in the order of feeding. What a branch sees is one row of booleans over its request's slots:
a fork copies the row, a join is an `or`. These are integers and booleans only; each engine keeps
the keys themselves.

Shapes: Q tokens of one request in one step, K slots that the request has used so far, the step's
own included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from pasta_decoding.engines.base import Branch, Feed, Limits
from pasta_decoding.errors import PastaError

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request's part of a forward pass.

    start:       the request's first slot; the K slots follow each other from there.
    first:       which of the K slots the first of the Q tokens is written to.
    mask_QK:     may query token q attend to slot k? No row is empty: each token sees itself.
    positions_K: the position of each slot's token, for sliding windows.
    wanted:      which of the Q tokens logits are wanted for, in the order of the feeds.
    rows:        where those logits go among the rows of the step.
    """

    feeds: Sequence[Feed]
    start: int
    first: int
    ids: list[int]
    positions: list[int]
    mask_QK: BoolArray
    positions_K: npt.NDArray[np.int64]
    wanted: list[int]
    rows: list[int]

    @property
    def end(self) -> int:
        """The slot behind the request's last one."""
        return self.start + self.mask_QK.shape[1]

    @property
    def written(self) -> range:
        """The slots of the Q tokens."""
        return range(self.start + self.first, self.end)

    def visible(self, window: int | None) -> BoolArray:
        """Return mask_QK of a layer with this sliding window; None: full attention."""
        if window is None:
            return self.mask_QK
        near_QK: BoolArray = np.subtract.outer(self.positions, self.positions_K) < window
        return self.mask_QK & near_QK


def is_causal(mask_QK: BoolArray) -> bool:
    """Do the queries (one, or all tokens) see exactly the slots up to their own?"""
    queries, slots = mask_QK.shape
    if queries not in (1, slots):
        return False
    return np.array_equal(mask_QK, np.tri(queries, slots, slots - queries))


class Batch:
    """All tokens of a forward pass, one request's after the other's."""

    def __init__(self, items: Sequence[BatchItem]) -> None:
        self.items = items
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.wanted: list[int] = []
        for item in items:
            self.wanted += [len(self.ids) + query for query in item.wanted]
            self.ids += item.ids
            self.positions += item.positions

    @property
    def order(self) -> list[int] | None:
        """Which of the wanted rows each feed's is; None: they are in the order of the feeds."""
        rows = [row for item in self.items for row in item.rows]
        return None if rows == sorted(rows) else np.argsort(rows).tolist()

    def rows(self) -> tuple[IntArray, IntArray]:
        """Return the tokens as rows that each name the slots that they see.

        That is rows_5Q (ids, positions, slots written, where each row's list starts, its length),
        and the lists. The tokens of a feed share one: each sees it up to its own slot.
        """
        rows_5Q = np.empty((5, len(self.ids)), dtype=np.int32)
        rows_5Q[0], rows_5Q[1] = self.ids, self.positions
        lists: list[npt.NDArray[np.int64]] = []
        first = start = 0
        for item in self.items:
            rows_5Q[2, first : first + len(item.ids)] = item.written
            query = -1
            for feed in item.feeds:
                query += len(feed.ids)
                slots = np.flatnonzero(item.mask_QK[query]) + item.start
                own = slice(first, first + len(feed.ids))
                rows_5Q[3, own] = start
                rows_5Q[4, own] = range(len(slots) - len(feed.ids) + 1, len(slots) + 1)
                lists.append(slots)
                first, start = own.stop, start + len(slots)
        return rows_5Q, np.concatenate(lists).astype(np.int32)


class _Request:
    """What one `open` holds: slots, and for each of its branches which of them it sees."""

    def __init__(self, start: int, capacity: int) -> None:
        self.start, self.capacity, self.used = start, capacity, 0
        self.forked_at: int | None = None
        self.seen: dict[Branch, BoolArray] = {}
        self.positions = np.zeros(capacity, dtype=np.int64)

    @property
    def shared(self) -> int:
        """How many tokens were fed before the first fork: every branch sees them."""
        return self.used if self.forked_at is None else self.forked_at

    def check(self, feeds: Sequence[Feed], limits: Limits) -> None:
        """Refuse what does not fit into the slots or the model; assert what no caller may do."""
        for feed in feeds:
            assert len(feed.ids) == len(feed.positions) > 0, "a feed has a position for each token"
            assert all(b in self.seen for b in feed.branches), "a feed stays within its request"
            limits.check(feed.ids, feed.positions)
        fed = sum(len(feed.ids) for feed in feeds)
        if self.used + fed > self.capacity:
            raise PastaError(
                f"no room for {fed} more tokens: the request holds {self.used} of at most "
                f"{self.capacity}"
            )

    def write(self, feeds: Sequence[Feed], rows: list[int]) -> BatchItem:
        """Give the feeds' tokens their slots, and say what each of them sees."""
        first, queries = self.used, sum(len(feed.ids) for feed in feeds)
        end = first + queries
        mask_QK = np.empty((queries, end), dtype=np.bool_)
        positions_K = self.positions[:end]
        item = BatchItem(feeds, self.start, first, [], [], mask_QK, positions_K, [], rows)
        for feed in feeds:
            self._write(feed, item)
        return item

    def _write(self, feed: Feed, item: BatchItem) -> None:
        start, end = self.used, self.used + len(feed.ids)
        row, *others = [self.seen[branch] for branch in feed.branches]
        assert all(np.array_equal(row, other) for other in others), "branches fed together differ"
        mask_QK = item.mask_QK[start - item.first : end - item.first]
        mask_QK[:] = row[: mask_QK.shape[1]]
        mask_QK[:, start:end] = np.tri(end - start, dtype=np.bool_)
        for seen in (row, *others):
            seen[start:end] = True
        self.positions[start:end] = feed.positions
        item.ids.extend(feed.ids)
        item.positions.extend(feed.positions)
        if feed.wants_logits:
            item.wanted.append(len(item.ids) - 1)
        self.used = end


class KVCache:
    """The slots and branches of all open requests: everything of `Engine` but the model.

    in_one_piece: whether a request's slots must follow each other.
    """

    def __init__(self, limits: Limits, *, in_one_piece: bool = True) -> None:
        self.limits, self._in_one_piece = limits, in_one_piece
        self._requests: dict[Branch, _Request] = {}
        self._names = count()

    @property
    def slots_in_use(self) -> int:
        return sum(request.used for request in self._open())

    def open(self, reserved_tokens: int) -> Branch:
        assert reserved_tokens > 0, "that is a number of tokens"
        request = _Request(self._find_room(reserved_tokens), reserved_tokens)
        branch = self._enter(request)
        request.seen[branch] = np.zeros(reserved_tokens, dtype=np.bool_)
        return branch

    def fork(self, parent: Branch) -> Branch:
        request = self._request(parent)
        child = self._enter(request)
        request.forked_at = request.shared
        request.seen[child] = request.seen[parent].copy()
        return child

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        request = self._request(parent)
        assert parent not in children, "a branch cannot join itself"
        assert all(self._request(child) is request for child in children), (
            "a request joins its own branches"
        )
        for child in children:
            request.seen[parent] |= request.seen[child]
            self.close(child)

    def copy(self, source: Branch, target: Branch, tokens: int) -> tuple[slice, slice]:
        """Mark the first tokens of `source` as fed to `target`; return the slots of both."""
        giver, taker = self._request(source), self._request(target)
        assert not taker.used, "a copy goes where nothing was fed"
        assert len(taker.seen) == 1, "to the only branch"
        assert 0 < tokens <= min(giver.shared, taker.capacity), "those fed before the first fork"
        taker.seen[target][:tokens] = True
        taker.positions[:tokens] = giver.positions[:tokens]
        taker.used = tokens
        return slice(giver.start, giver.start + tokens), slice(taker.start, taker.start + tokens)

    def shrink(self, branch: Branch, tokens: int) -> None:
        """Keep a request's first tokens alone."""
        request = self._request(branch)
        assert request.seen.keys() == {branch}, "others see the slots"
        assert 0 < tokens <= request.shared, "those fed before the first fork"
        request.capacity = request.used = tokens
        request.seen[branch] = np.ones(tokens, dtype=np.bool_)
        request.positions, request.forked_at = request.positions[:tokens].copy(), None

    def close(self, branch: Branch) -> None:
        """Forget a branch."""
        request = self._request(branch)
        del self._requests[branch], request.seen[branch]

    def plan(self, feeds: Sequence[Feed]) -> Batch:
        """Split a step by request, check all of it, then write it down.

        Checks come first: a refused step leaves no trace.
        """
        shares: dict[_Request, tuple[list[Feed], list[int]]] = {}
        wanted = count()
        for feed in feeds:
            own, rows = shares.setdefault(self._request(feed.branches[0]), ([], []))
            own.append(feed)
            rows.extend([next(wanted)] if feed.wants_logits else [])
        for request, (own, _) in shares.items():
            request.check(own, self.limits)
        return Batch([request.write(own, rows) for request, (own, rows) in shares.items()])

    def next_position(self, branch: Branch) -> int:
        """Return 1 + the largest position that a branch sees."""
        request = self._request(branch)
        return 1 + int(request.positions[request.seen[branch]].max(initial=-1))

    def _open(self) -> list[_Request]:
        """Return the open requests in the order of their slots."""
        return sorted(set(self._requests.values()), key=lambda request: request.start)

    def _find_room(self, size: int) -> int:
        """Return the first slot of the lowest gap that takes `size` slots."""
        place = widest = taken = 0
        for request in self._open():
            taken += request.capacity
            widest = max(widest, request.start - place)
            if request.start - place >= size and self._in_one_piece:
                return place
            place = request.start + request.capacity
        slots = self.limits.max_slots
        if slots is not None and self._in_one_piece and place + size > slots:
            raise PastaError(
                f"no room for {size} tokens in one piece: the widest gap among the engine's "
                f"{slots} slots is {max(widest, slots - place)}"
            )
        if slots is not None and taken + size > slots:
            raise PastaError(
                f"no room for {size} tokens: {taken} of the engine's {slots} slots are taken"
            )
        return place

    def _enter(self, request: _Request) -> Branch:
        most = self.limits.max_branches
        if most is not None and len(self._requests) >= most:
            raise PastaError(f"the engine's {most} branches are all in use")
        branch = Branch(next(self._names))
        self._requests[branch] = request
        return branch

    def _request(self, branch: Branch) -> _Request:
        assert branch in self._requests, f"branch {branch} is not open"
        return self._requests[branch]
