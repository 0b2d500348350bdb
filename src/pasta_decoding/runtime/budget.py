"""How far one answer has come, and how far each of its threads may still go."""

from __future__ import annotations

from dataclasses import dataclass, field

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.lang.positions import Extent
from pasta_decoding.runtime.request import Rules


@dataclass(slots=True)
class WrittenChunk:
    """One chunk.

    first:       position of its ASYNC_OPEN.
    main_tokens: those of main that stand before it in reading order.
    segment:     its place among the answer's segments.
    """

    thread: int
    first: int
    promised: int
    main_tokens: int
    segment: int
    ids: list[int]
    running: bool = True

    @property
    def next_position(self) -> int:
        """The position of its next token."""
        return self.first + len(self.ids)

    @property
    def extent(self) -> Extent:
        """Where it stands, as position schemes ask for it."""
        return Extent(self.first, self.next_position - 1)


@dataclass(slots=True)
class Budget:
    """What one answer has used of `rules`. All counts are tokens, tags included.

    written_tokens: of all threads, those included that will be trimmed.
    chunks:         all that have begun; the k-th thread writes the k-th.
    """

    rules: Rules
    written_tokens: int = 0
    chunks: list[WrittenChunk] = field(default_factory=list)

    @property
    def running(self) -> list[WrittenChunk]:
        """The chunks that have begun and not ended, in reading order."""
        return [chunk for chunk in self.chunks if chunk.running]

    @property
    def is_used_up(self) -> bool:
        """Is there nothing left for main's next token?"""
        return self.written_tokens >= self.rules.max_tokens

    def begin(self, chunk: WrittenChunk) -> None:
        """Count a chunk and the tokens that it has."""
        self.chunks.append(chunk)
        self.written_tokens += len(chunk.ids)

    def place(self, thread: int) -> int:
        """Return how many tokens stand up to the last one of `thread`, in reading order.

        Those that have been written, that is: the number grows with the threads before it.
        """
        if thread == MAIN:
            return self.written_tokens
        before = self.chunks[thread - 1].main_tokens
        return before + sum(len(one.ids) for one in self.chunks[:thread])

    def expected_place(self, thread: int = MAIN) -> int:
        """Return what `place` is if the chunks before `thread` become as long as promised."""
        before = [chunk for chunk in self.running if thread == MAIN or chunk.thread < thread]
        return self.place(thread) + sum(max(0, one.promised - len(one.ids)) for one in before)

    def most_tokens(self, thread: int) -> int:
        """Return how many tokens `thread` can write at most until a limit ends it; at least one."""
        left = self.rules.max_tokens - self.place(thread)
        if thread != MAIN:
            left = min(left, self._left_of(self.chunks[thread - 1]))
        return max(1, left)

    def most_to_come(self) -> int:
        """Return how many tokens the running chunks may still write, by their own limits."""
        return sum(map(self._left_of, self.running))

    def most_of_a_chunk(self, promised: int) -> int:
        """Return how many tokens may keep a promise of so many, ASYNC_OPEN not among them."""
        return max(self.rules.min_chunk_tokens, int(promised * self.rules.chunk_factor))

    def ends(self, chunk: WrittenChunk) -> bool:
        """Does a limit, its own or the answer's, leave `chunk` no further token?"""
        beyond = self.is_used_up and self.place(chunk.thread) >= self.rules.max_tokens
        return beyond or self._left_of(chunk) <= 0

    def _left_of(self, chunk: WrittenChunk) -> int:
        """Return how many tokens `chunk` may still have by its own limit."""
        return self.most_of_a_chunk(chunk.promised) + 1 - len(chunk.ids)
