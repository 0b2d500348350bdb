"""Which stretch of an engine's cells belongs to which request."""

from __future__ import annotations

from pasta_decoding.errors import PastaError


class CellAllocator:
    """Gives out stretches of `cells` cells, each from the lowest place where it fits."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self._taken: dict[int, int] = {}  # first cell -> end, in the order of the cells

    def take(self, size: int) -> int:
        """Return the first cell of a stretch that nobody holds. Raises PastaError if none fits."""
        assert size > 0, "room is a number of tokens"
        place = widest = 0
        for first, end in self._taken.items():
            widest = max(widest, first - place)
            if first - place >= size:
                break
            place = end
        if place + size > self.cells:
            raise PastaError(
                f"no room for {size} tokens in one piece: the widest gap among the engine's "
                f"{self.cells} cells is {max(widest, self.cells - place)}",
                hint="allow fewer tokens for the answer, or run fewer requests at a time",
            )
        self._taken = dict(sorted({**self._taken, place: place + size}.items()))
        return place

    def shrink(self, first: int, size: int) -> slice:
        """Keep `size` cells of the stretch that begins at `first`; return the others, now free."""
        end, self._taken[first] = self._taken[first], first + size
        return slice(first + size, end)

    def give_back(self, first: int) -> slice:
        """Free the stretch that begins at `first`, and return it."""
        return slice(first, self._taken.pop(first))
