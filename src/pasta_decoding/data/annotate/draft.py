"""One plain response while it is being annotated by what a model pays for its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from pasta_decoding.data.annotate.candidates import Unit, find_units
from pasta_decoding.data.annotate.prior import Seen
from pasta_decoding.data.annotate.reading import (
    BaseReader,
    Laid,
    Reading,
    ReadPiece,
    ReadThread,
    cut,
    lay_pieces,
)
from pasta_decoding.data.annotate.topics import TopicPart, first_new, is_topic, topic_choices
from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.tree import Chunk, Node, Span, Sync, Tree, valid_tokens

LENGTHS = 3
"""Of a plain response, that may go through the model for it, prompts not counted."""

PROMISE_TOKENS = 8  # set aside for each promise of the annotation


@dataclass(slots=True)
class Draft:
    """A response, its pieces, and how many more of its tokens may be read (`room`)."""

    reader: BaseReader
    instruction: str
    text: str
    prompt: Sequence[int]
    units: tuple[Unit, ...]
    pieces: list[ReadPiece]
    plain_tokens: int
    room: int
    prompt_tokens: int = 0

    @classmethod
    def of(cls, reader: BaseReader, row: Row) -> Draft:
        """Begin with the plain response of `row`."""
        text = row.response
        units, plain = find_units(text), len(reader.encode(text))
        pieces, prompt = cut(text, units, reader.encode), reader.encode_prompt(row.instruction)
        return cls(reader, row.instruction, text, prompt, units, pieces, plain, LENGTHS * plain)

    # What may be read

    def lay(self, threads: Sequence[ReadThread] = ()) -> Laid:
        """Lay the response out, `threads` as chunks."""
        return lay_pieces(self.reader, self.prompt, self.pieces, threads)

    def lay_heads(self, threads: Sequence[ReadThread], most: int) -> Laid:
        """Lay the response out, of each thread only its first tokens."""
        return self.lay([ReadThread(one.first, one.last, one.topic, most) for one in threads])

    def spare(self, threads: int) -> int:
        """Return the tokens that may be read before the annotation is, with so many chunks."""
        return self.room - self.plain_tokens - PROMISE_TOKENS * threads

    def size(self, *laid: Laid) -> int:
        """Return the tokens of the layouts, prompts not counted."""
        return sum(len(one.layout.tokens) - len(self.prompt) for one in laid)

    def pay(self, *laid: Laid) -> tuple[Laid, ...]:
        """Return the layouts, to be read now."""
        self.room -= self.size(*laid)
        self.prompt_tokens += len(self.prompt) * len(laid)
        assert self.room >= 0, f"more than {LENGTHS} times the response were read"
        return laid

    def cost(self) -> dict[str, float]:
        """Return what was read so far; see `Likelihood.annotate`."""
        return {
            "plain_tokens": self.plain_tokens,
            "model_tokens": LENGTHS * self.plain_tokens - self.room,
            "prompt_tokens": self.prompt_tokens,
        }

    # What it says

    def states(self, reading: Reading) -> Tensor | None:
        """Return what a head reads: the states behind the prompt and each unit, read in order."""
        if reading.states_TD is None:
            return None
        laid = self.lay()
        ends = [laid.tokens[n][-1] for n, piece in enumerate(self.pieces) if piece.unit is not None]
        return reading.states_TD[[len(self.prompt) - 1, *ends]]

    def see(self, reading: Reading) -> list[Seen] | None:
        """Return what the head says of each unit; None without a head."""
        states_VD, head = self.states(reading), self.reader.head
        return head.see(states_VD) if head and states_VD is not None else None

    def part(self, thread: ReadThread) -> TopicPart:
        """Return the characters of a thread, which begins and ends with a unit."""
        first, last = self.pieces[thread.first].unit, self.pieces[thread.last].unit
        assert first is not None, "a thread begins with a unit"
        assert last is not None, "a thread ends with a unit"
        return TopicPart(self.units[first].start, self.units[last].end)

    def topics(self, threads: Sequence[ReadThread], most: int) -> list[list[str]]:
        """Return a few topics for each thread, best first; no two first ones are the same."""
        found: list[list[str]] = []
        for choices in topic_choices(self.text, [self.part(thread) for thread in threads]):
            few = list(islice(dict.fromkeys(filter(is_topic, choices)), most))
            best = first_new(few, [own[0] for own in found])
            found.append([best, *(one for one in few if one != best)])
        return found

    def tree(self, threads: Sequence[ReadThread], syncs: frozenset[int]) -> Tree:
        """Return the annotated response; a sync stands before each of the pieces `syncs`."""
        return tuple(self._nodes(threads, syncs))

    def _nodes(self, threads: Sequence[ReadThread], syncs: frozenset[int]) -> Iterator[Node]:
        at = 0
        events: Mapping[int, ReadThread | None] = dict.fromkeys(syncs) | {
            t.first: t for t in threads
        }
        for place in sorted(events):
            unit = self.pieces[place].unit
            assert unit is not None, "nothing but a unit follows a sync"
            start = self.units[unit].start
            if start > at:
                yield Span(self.text[at:start])
            if place in syncs:
                yield Sync()
            if thread := events[place]:
                part = self.part(thread)
                body = self.text[part.start : part.end]
                yield Chunk(thread.topic, valid_tokens(len(self.reader.encode(body))), body)
                start = part.end
            at = start
        if at < len(self.text):
            yield Span(self.text[at:])
