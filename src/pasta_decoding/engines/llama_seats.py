"""The books of the llama engine: which sequence a branch has, and what a request holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pasta_decoding.engines.base import Branch, Feed
from pasta_decoding.engines.pool import Limits
from pasta_decoding.errors import PastaError


@dataclass(slots=True, eq=False)
class OpenRequest:
    """What one `open` may hold, and holds. `forked_at`: tokens fed before its first fork."""

    reserved_tokens: int
    used: int = 0
    branches: int = 0
    forked_at: int | None = None

    @property
    def line(self) -> int:
        """How many tokens were fed before the first fork: every branch sees them."""
        return self.used if self.forked_at is None else self.forked_at

    def copy(self, source: OpenRequest, tokens: int) -> None:
        """Begin with the first tokens of another request."""
        assert not self.used, "a copy goes where nothing was fed"
        assert self.branches == 1, "to the only branch"
        assert 0 < tokens <= min(source.line, self.reserved_tokens), "fed before the first fork"
        self.used = tokens

    def shrink(self, tokens: int) -> None:
        """Hold the first tokens and nothing else."""
        assert self.branches == 1, "others see the cells, too"
        assert 0 < tokens <= self.line, "those fed before the first fork"
        self.used = self.reserved_tokens = tokens
        self.forked_at = None


@dataclass(slots=True)
class Seat:
    """One branch: its llama sequence, and what it sees.

    view:          equal for branches that see exactly the same.
    next_position: 1 + the largest position that it sees.
    """

    request: OpenRequest
    sequence: int
    view: int
    next_position: int = 0


def seat_of(branch: Branch, seats: Mapping[Branch, Seat]) -> Seat:
    """Return what an open branch has."""
    assert branch in seats, f"branch {branch} is not open"
    return seats[branch]


def check_feeds(feeds: Sequence[Feed], seats: Mapping[Branch, Seat], limits: Limits) -> None:
    """Refuse what does not fit into the cells or the model; assert what no caller may do."""
    fed: dict[int, int] = {}
    requests: dict[int, OpenRequest] = {}
    for feed in feeds:
        assert len(feed.ids) == len(feed.positions) > 0, "a feed has a position for each token"
        limits.check(feed.ids, feed.positions)
        request = seat_of(feed.branches[0], seats).request
        same = all(seat_of(branch, seats).request is request for branch in feed.branches)
        assert same, "a feed stays within its request"
        requests[id(request)] = request
        fed[id(request)] = fed.get(id(request), 0) + len(feed.ids)
    for key, request in requests.items():
        if request.used + fed[key] > request.reserved_tokens:
            raise PastaError(
                f"no room for {fed[key]} more tokens: the request holds {request.used} of at "
                f"most {request.reserved_tokens}",
                hint="allow fewer tokens for the answer, or open the request with more room",
            )
    _check_order(feeds, seats)


def _check_order(feeds: Sequence[Feed], seats: Mapping[Branch, Seat]) -> None:
    coming: dict[Branch, tuple[int, int]] = {}
    for number, feed in enumerate(feeds):
        states = {
            coming.get(branch, (-seats[branch].view - 1, seats[branch].next_position))
            for branch in feed.branches
        }
        assert len(states) == 1, "branches fed together differ"
        ((_, position),) = states
        expected = tuple(range(position, position + len(feed.ids)))
        assert feed.positions == expected, "llama.cpp takes no gaps between positions"
        coming |= dict.fromkeys(feed.branches, (number, position + len(feed.ids)))
