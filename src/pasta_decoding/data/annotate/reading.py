"""Plain responses laid out for a model that only reads: what it pays for each token, in nats.

The parts of a response are cut once and then laid out in several ways, always as the same ids, so
that what a token costs in one view can be compared with what it costs in another. No control token
is needed: a promise is its topic in brackets, told to the model and not asked of it.

Shapes: L labelled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from torch import Tensor

from pasta_decoding.data.annotate.candidates import Unit
from pasta_decoding.data.annotate.head import Head
from pasta_decoding.lang.layout import ChunkRun, Layout, PromiseRun, Run, Segment, SyncRun, lay_out
from pasta_decoding.lang.positions import Scheme

Result = TypeVar("Result")
Encode = Callable[[str], Sequence[int]]
Read = Callable[[Sequence[Layout]], Iterable[tuple[Tensor, Tensor | None]]]
"""For each layout logprobs_L of its labels and, where wanted, states_TD; as `read_layouts` does."""

Nats = Mapping[int, Sequence[float]]
"""For each piece of a layout, what each of its tokens costs."""


@dataclass(frozen=True, slots=True)
class BaseReader:
    """How one model reads.

    encode:        the ids of a text; never a special token.
    encode_prompt: the ids of an instruction, ready for the answer.
    head:          what tells from its hidden states; `read` then gives those that it wants.
    """

    encode: Encode
    encode_prompt: Encode
    read: Read
    scheme: Scheme
    head: Head | None = None


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """Some ids of a response. `unit` is which unit they are; None: what lies between two.

    A unit's ids begin with the blank in front of it, as ids of running text do.
    """

    ids: tuple[int, ...]
    unit: int | None


@dataclass(frozen=True, slots=True)
class ReadThread:
    """Pieces `first` to `last`, both included, to be read as a chunk on `topic`.

    most: how many of their tokens to read.
    """

    first: int
    last: int
    topic: str
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading a layout gave: `nats` of its pieces, and its tokens' hidden states if wanted."""

    nats: Nats
    states_TD: Tensor | None


@dataclass(frozen=True, slots=True)
class Laid:
    """A layout, and for each piece in it the indices of its tokens."""

    layout: Layout
    tokens: Mapping[int, range]


def cut(text: str, units: Sequence[Unit], encode: Encode) -> list[ReadPiece]:
    """Return the pieces of `text` in order; their ids are those of the whole text, near enough."""
    pieces: list[ReadPiece] = []
    at = 0
    for number, unit in enumerate(units):
        gap = text[at : unit.start]
        marker = gap.rstrip(" ")
        pieces += [ReadPiece(tuple(encode(marker)), None)] if marker else []
        pieces.append(ReadPiece(tuple(encode(text[at + len(marker) : unit.end])), number))
        at = unit.end
    return pieces + ([ReadPiece(tuple(encode(text[at:])), None)] if at < len(text) else [])


def lay_pieces(
    reader: BaseReader,
    prompt: Sequence[int],
    pieces: Sequence[ReadPiece],
    threads: Sequence[ReadThread] = (),
    syncs: frozenset[int] = frozenset(),
) -> Laid:
    """Lay out the pieces, those of `threads` as chunks; a sync stands before each of `syncs`."""
    builder = _Builder(reader, pieces, [], {}, len(prompt))
    starting = {thread.first: thread for thread in threads}
    at = 0
    while at < len(pieces):
        if at in syncs:
            builder.add_sync()
        if thread := starting.get(at):
            builder.add_thread(thread)
        else:
            builder.add_main(at)
        at = thread.last + 1 if thread else at + 1
    layout = lay_out(prompt, builder.segments, reader.scheme, async_close=0, end=None)
    return Laid(layout, builder.tokens)


@dataclass(slots=True)
class _Builder:
    """Segments, and where each piece's tokens are among all of them."""

    reader: BaseReader
    pieces: Sequence[ReadPiece]
    segments: list[Segment]
    tokens: dict[int, range]
    at: int

    def add_main(self, piece: int) -> None:
        self._place(piece, self.pieces[piece].ids)
        self.segments.append(Run(self.pieces[piece].ids))

    def add_thread(self, thread: ReadThread) -> None:
        promise = tuple(self.reader.encode(f" [{thread.topic}]"))
        opener = self.reader.encode(":")[-1]
        self.segments.append(PromiseRun(promise, 0, forced=len(promise)))
        self.at += len(promise) + 1
        body: list[int] = []
        for piece in range(thread.first, thread.last + 1):
            room = None if thread.most is None else max(0, thread.most - len(body))
            ids = self.pieces[piece].ids[:room]
            self._place(piece, ids)
            body += ids
        self.segments.append(ChunkRun((opener, *body), closed=False))

    def add_sync(self) -> None:
        self.segments.append(SyncRun(self.reader.encode("\n")[-1]))
        self.at += 1

    def _place(self, piece: int, ids: Sequence[int]) -> None:
        self.tokens[piece] = range(self.at, self.at + len(ids))
        self.at += len(ids)


def read_together(
    readings: Sequence[Generator[Sequence[Laid], list[Reading], Result]],
    read: Read,
    note: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Run readings side by side; each asks for layouts and is sent what was paid for each.

    note: called whenever what one of them asked for was read.
    """
    results: dict[int, Result] = {}
    asked: dict[int, Sequence[Laid]] = {}

    def go_on(number: int, answers: list[Reading] | None) -> None:
        reading = readings[number]
        try:
            asked[number] = next(reading) if answers is None else reading.send(answers)
        except StopIteration as stop:
            asked.pop(number, None)
            results[number] = stop.value

    for number in range(len(readings)):
        go_on(number, None)
    while asked:
        laid = [one for together in asked.values() for one in together]
        done = map(_reading, laid, read([one.layout for one in laid]))
        answers: dict[int, list[Reading]] = {}
        for number, laid_out in asked.items():
            answers[number] = list(islice(done, len(laid_out)))
            note()
        for number, own in answers.items():
            go_on(number, own)
    return [results[number] for number in range(len(readings))]


def _reading(laid: Laid, found: tuple[Tensor, Tensor | None]) -> Reading:
    logprobs_L, states_TD = found
    return Reading(piece_nats(laid, logprobs_L), states_TD)


def piece_nats(laid: Laid, logprobs_L: Tensor) -> Nats:
    """Return what each token of each piece costs (nats)."""
    nats = list(token_nats(laid.layout, logprobs_L.tolist()))
    found: dict[int, list[float]] = {}
    for piece, places in laid.tokens.items():
        known = [nats[place] for place in places]
        assert None not in known, "every token of the response is predicted by the one before it"
        found[piece] = [one for one in known if one is not None]
    return found


def token_nats(layout: Layout, logprobs: Sequence[float]) -> Iterator[float | None]:
    """Yield what each token of a layout costs (nats); None for what is given, not predicted.

    A label belongs to the token from which it is predicted; here it is found with the next token
    of the same thread.
    """
    labelled = (n for n, label in enumerate(layout.label) if label is not None)
    at = dict(zip(labelled, logprobs, strict=True))
    before: dict[int, int] = {}
    for token, thread in enumerate(layout.thread):
        source = before.get(thread)
        yield -at[source] if source in at else None
        before[thread] = token
