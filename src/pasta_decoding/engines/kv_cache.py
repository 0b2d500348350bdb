"""Which slots of a KV cache belong to which request, and which branch sees which of them.

A slot holds the keys and values of one token. A request takes its slots when it opens and fills
them in the order of feeding. What a branch sees is a list of its request's slots: a fork copies
the list, a join unites lists, in an order that no schedule changes: so an engine that adds up in
this order gives the same bits under any load. These are integers only; each engine keeps the keys.

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

    feeds:       the Q tokens, feed by feed.
    start:       the request's first slot; the K slots follow each other from there.
    written:     the slots of the Q tokens, the last of the K.
    seen:        of each feed, the slots that its last token sees, the feed's own at the end.
    positions_K: the position of each slot's token, for sliding windows.
    """

    feeds: Sequence[Feed]
    start: int
    written: range
    seen: Sequence[IntArray]
    positions_K: npt.NDArray[np.int64]


class Batch:
    """All tokens of a forward pass, one request's after the other's.

    wanted: which of them logits are wanted for.
    order:  which of those rows each feed's is; None: they are in the order of the feeds.
    """

    def __init__(self, items: Sequence[BatchItem], places: Sequence[int]) -> None:
        self.items = items
        self._feeds = [feed for item in items for feed in item.feeds]
        self.ids = [token for feed in self._feeds for token in feed.ids]
        self.positions = [position for feed in self._feeds for position in feed.positions]
        ends = list(accumulate(len(feed.ids) for feed in self._feeds))
        asking = [number for number, feed in enumerate(self._feeds) if feed.wants_logits]
        self.wanted = [ends[number] - 1 for number in asking]
        asked = [places[number] for number in asking]
        self.order = None if asked == sorted(asked) else np.argsort(asked).tolist()

    def rows(self) -> tuple[IntArray, IntArray]:
        """Return the tokens as rows that each name the slots that they see.

        That is rows_5Q (ids, positions, slots written, where each row's list starts, its length),
        and the lists. The tokens of a feed share one: each sees it up to its own slot.
        """
        lists = [seen for item in self.items for seen in item.seen]
        tokens_F = np.array([len(feed.ids) for feed in self._feeds])
        lengths_F = np.array([len(seen) for seen in lists])
        hidden_Q = np.repeat(tokens_F.cumsum() - lengths_F, tokens_F)
        rows_5Q = np.empty((5, len(self.ids)), dtype=np.int32)
        rows_5Q[0], rows_5Q[1] = self.ids, self.positions
        rows_5Q[2] = [slot for item in self.items for slot in item.written]
        rows_5Q[3] = np.repeat(lengths_F.cumsum() - lengths_F, tokens_F)
        rows_5Q[4] = np.arange(1, len(self.ids) + 1) - hidden_Q
        return rows_5Q, np.concatenate(lists)


class _Branch:
    """Which slots of `request` a branch sees: the first `count` of `slots`."""

    def __init__(self, request: _Request, slots: IntArray) -> None:
        self.request, self.count = request, len(slots)
        self.slots = np.empty(request.capacity, dtype=np.int32)
        self.slots[: self.count] = slots

    @property
    def seen(self) -> IntArray:
        return self.slots[: self.count]

    def see(self, slots: range) -> None:
        """See the slots that follow."""
        self.slots[self.count : self.count + len(slots)] = np.arange(slots.start, slots.stop)
        self.count += len(slots)


class _Request:
    """What one `open` holds: slots, the positions of their tokens, and who wrote them."""

    def __init__(self, start: int, capacity: int) -> None:
        self.start, self.capacity, self.used, self.branches = start, capacity, 0, 0
        self.forked_at: int | None = None
        self.positions, self.writers = np.zeros((2, capacity), dtype=np.int64)

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
        self.vocabulary_size, self.max_positions = limits.vocabulary_size, limits.max_positions
        self.max_slots, self.max_branches = limits.max_slots, limits.max_branches
        self._limits, self._in_one_piece = limits, in_one_piece
        self._branches: dict[Branch, _Branch] = {}
        self._names = count()

    @property
    def slots_in_use(self) -> int:
        return sum(request.used for request in self._requests())

    def open(self, *, reserved_tokens: int) -> Branch:
        assert reserved_tokens > 0, "that is a number of tokens"
        request = _Request(self._find_room(reserved_tokens), reserved_tokens)
        return self._enter(request, np.empty(0, dtype=np.int32))

    def fork(self, parent: Branch) -> Branch:
        of = self._branch(parent)
        child = self._enter(of.request, of.seen)
        of.request.forked_at = of.request.shared
        return child

    def join(self, parent: Branch, children: Sequence[Branch]) -> None:
        of = self._branch(parent)
        assert parent not in children, "a branch cannot join itself"
        joined = [self._branch(child) for child in children]
        assert all(one.request is of.request for one in joined), "a request joins its own branches"
        seen = np.unique(np.concatenate([of.seen, *(one.seen for one in joined)]))
        writers = of.request.writers[seen - of.request.start]
        # By branches as they were forked: who ended first depends on what else was decoded.
        self._branches[parent] = _Branch(of.request, seen[np.argsort(writers, kind="stable")])
        for child in children:
            self.close(child)

    def shrink(self, branch: Branch, tokens: int) -> None:
        request = self._branch(branch).request
        assert request.branches == 1, "others see the slots"
        assert 0 < tokens <= request.shared, "those fed before the first fork"
        request.capacity = request.used = tokens
        request.positions, request.forked_at = request.positions[:tokens].copy(), None
        request.writers = request.writers[:tokens].copy()
        slots = np.arange(request.start, request.start + tokens, dtype=np.int32)
        self._branches[branch] = _Branch(request, slots)

    def close(self, branch: Branch) -> None:
        self._branch(branch).request.branches -= 1
        del self._branches[branch]

    def copied(self, source: Branch, target: Branch, tokens: int) -> tuple[slice, slice]:
        """Mark the first tokens of `source` as fed to `target`; return the slots of both."""
        giver, taker = self._branch(source).request, self._branch(target).request
        assert not taker.used, "a copy goes where nothing was fed"
        assert taker.branches == 1, "to the only branch"
        assert 0 < tokens <= min(giver.shared, taker.capacity), "those fed before the first fork"
        self._branch(target).see(range(taker.start, taker.start + tokens))
        taker.positions[:tokens], taker.writers[:tokens] = giver.positions[:tokens], target
        taker.used = tokens
        return slice(giver.start, giver.start + tokens), slice(taker.start, taker.start + tokens)

    def plan(self, feeds: Sequence[Feed]) -> Batch:
        """Split a step by request, check all of it, then write it down.

        Checks come first: a refused step leaves no trace.
        """
        shares: dict[_Request, list[int]] = {}
        for place, feed in enumerate(feeds):
            assert len(feed.ids) == len(feed.positions) > 0, "a feed has a position for each token"
            writer, *others = [self._branch(branch) for branch in feed.branches]
            for other in others:
                assert other.request is writer.request, "a feed stays within its request"
            shares.setdefault(writer.request, []).append(place)
            self._limits.check(feed.ids, feed.positions)
        for request, places in shares.items():
            fed = sum([len(feeds[place].ids) for place in places])
            if request.used + fed > request.capacity:
                raise PastaError(
                    f"no room for {fed} more tokens: the request holds {request.used} of at most "
                    f"{request.capacity}"
                )
        items = [self._write(of, [feeds[n] for n in places]) for of, places in shares.items()]
        return Batch(items, [place for places in shares.values() for place in places])

    def _write(self, request: _Request, feeds: Sequence[Feed]) -> BatchItem:
        """Give the feeds' tokens their slots, and say what each of them sees."""
        first, lists = request.used, []
        for feed in feeds:
            start, request.used = request.used, request.used + len(feed.ids)
            writer, *others = [self._branches[branch] for branch in feed.branches]
            for other in others:
                assert np.array_equal(writer.seen, other.seen), "branches fed together differ"
            slots = range(request.start + start, request.start + request.used)
            for one in (writer, *others):
                one.see(slots)
            lists.append(writer.seen)
            request.positions[start : request.used] = feed.positions
            request.writers[start : request.used] = feed.branches[0]
        written = range(request.start + first, request.start + request.used)
        return BatchItem(feeds, request.start, written, lists, request.positions[: request.used])

    def _requests(self) -> list[_Request]:
        """Return the open requests in the order of their slots."""
        requests = {branch.request for branch in self._branches.values()}
        return sorted(requests, key=lambda request: request.start)

    def _find_room(self, size: int) -> int:
        """Return the first slot of the lowest gap that takes `size` slots."""
        requests, slots = self._requests(), self.max_slots
        taken = sum(request.capacity for request in requests)
        if slots is not None and taken + size > slots:
            raise PastaError(
                f"no room for {size} tokens: {taken} of the engine's {slots} slots are taken"
            )
        place = widest = 0
        for request in requests:
            if request.start - place >= size:
                return place
            widest = max(widest, request.start - place)
            place = request.start + request.capacity
        if slots is not None and self._in_one_piece and place + size > slots:
            raise PastaError(
                f"no room for {size} tokens in one piece: the widest gap among the engine's "
                f"{slots} slots is {max(widest, slots - place)}"
            )
        return place

    def _enter(self, request: _Request, seen: IntArray) -> Branch:
        most = self.max_branches
        if most is not None and len(self._branches) >= most:
            raise PastaError(f"the engine's {most} branches are all in use")
        name = Branch(next(self._names))
        self._branches[name] = _Branch(request, seen)
        request.branches += 1
        return name

    def _branch(self, name: Branch) -> _Branch:
        assert name in self._branches, f"branch {name} is not open"
        return self._branches[name]
