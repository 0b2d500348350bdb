"""The branches of one answer: those of its live threads, and one for what finished chunks wrote."""

from __future__ import annotations

from dataclasses import dataclass, field

from pasta_decoding.engines.base import Branch, Engine
from pasta_decoding.lang.layout import MAIN


@dataclass(slots=True)
class Branches:
    """What an answer holds of an engine.

    live:     those of the live threads; none before it is opened and after its end.
    finished: the branch that sees what finished chunks wrote, until main joins it. One for all of
              them: an engine may have few branches.
    """

    engine: Engine
    live: dict[int, Branch] = field(default_factory=dict)
    finished: Branch | None = None

    @property
    def main(self) -> Branch:
        """The main thread's branch."""
        return self.live[MAIN]

    def fork(self, thread: int) -> None:
        """Let a new thread see what main sees."""
        self.live[thread] = self.engine.fork(self.main)

    def end(self, thread: int, *, kept: bool) -> None:
        """End a chunk's branch; if it is `kept`, main is to join it."""
        branch = self.live.pop(thread)
        if not kept:
            self.engine.close(branch)
        elif self.finished is None:
            self.finished = branch
        else:
            self.engine.join(self.finished, [branch])

    def join_finished(self) -> None:
        """Let main see what finished chunks wrote."""
        if self.finished is not None:
            self.engine.join(self.main, [self.finished])
            self.finished = None

    def go_on_behind_chunk(self) -> None:
        """Let main go on where the first finished chunk ended, as a text join does."""
        assert self.finished is not None, "the first chunk's branch is kept for this"
        self.engine.close(self.main)
        self.live[MAIN], self.finished = self.finished, None

    def part_with_main(self) -> None:
        """Close all but main's, which somebody else takes over."""
        del self.live[MAIN]
        self.close()

    def close(self) -> None:
        """Close all."""
        held = [] if self.finished is None else [self.finished]
        for branch in [*held, *self.live.values()]:
            self.engine.close(branch)
        self.live.clear()
        self.finished = None
