"""What an annotation costs a model that reads it, in nats a token: the price of its speed."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pasta_decoding.data.annotate.reading import (
    BaseReader,
    Laid,
    Reading,
    ReadPiece,
    ReadThread,
    lay_pieces,
    read_together,
)
from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, read


@dataclass(frozen=True, slots=True)
class HidingCost:
    """What the tokens of chunks cost (nats, summed), and how many they are.

    hidden: with their siblings hidden, but the prompt, the main text before and the topic in view.
    seen:   with all earlier text in view, in reading order and without topics.
    """

    chunk_tokens: int = 0
    hidden: float = 0.0
    seen: float = 0.0


def hiding_costs(
    reader: BaseReader, rows: Iterable[Row], *, together: int = 8
) -> Iterator[HidingCost]:
    """Yield the cost of each annotated row, in order; `together` of them are read side by side."""
    waiting = iter(rows)
    while batch := list(islice(waiting, together)):
        yield from read_together([_read(reader, row) for row in batch], reader.read)


def _read(reader: BaseReader, row: Row) -> Generator[Sequence[Laid], list[Reading], HidingCost]:
    pieces, threads, syncs = _cut(read(row.response), reader)
    if not threads:
        return HidingCost()
    prompt = reader.encode_prompt(row.instruction)
    hidden, seen = yield (
        lay_pieces(reader, prompt, pieces, threads, syncs),
        lay_pieces(reader, prompt, pieces),
    )
    places = [thread.first for thread in threads]
    return HidingCost(
        sum(len(seen.nats[place]) for place in places),
        sum(sum(hidden.nats[place]) for place in places),
        sum(sum(seen.nats[place]) for place in places),
    )


def _cut(
    tree: Tree, reader: BaseReader
) -> tuple[list[ReadPiece], list[ReadThread], frozenset[int]]:
    """Return an annotated answer as pieces, the threads among them, and what syncs go before.

    The blank in front of a chunk is read as its own, as ids of running text have it.
    """
    pieces: list[ReadPiece] = []
    threads: list[ReadThread] = []
    syncs: set[int] = set()
    rest = ""
    for node in tree:
        match node:
            case Span(text):
                rest += text
            case Chunk(topic, _, text):
                marker = rest.rstrip(" ")
                pieces += _piece(reader, marker)
                threads.append(ReadThread(len(pieces), len(pieces), topic or ""))
                pieces.append(ReadPiece(tuple(reader.encode(rest[len(marker) :] + text)), None))
                rest = ""
            case Sync():
                pieces += _piece(reader, rest)
                syncs.add(len(pieces))
                rest = ""
    return pieces + _piece(reader, rest), threads, frozenset(syncs)


def _piece(reader: BaseReader, text: str) -> list[ReadPiece]:
    return [ReadPiece(tuple(reader.encode(text)), None)] if text else []
