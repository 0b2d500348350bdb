"""Annotate a plain response by what a model pays for hiding its parts from each other.

No other model is needed, and none that knows the language: the base model reads each response a
few times, in the project's own layouts.

1. In reading order: what each token costs with all earlier text in view. From plain facts about a
   candidate (`prior.py`), and from what the model's hidden states say about its units if there is
   a head for them (`head.py`), follows how likely a careful reader would take it; the chunks that
   promise most are taken.
2. The first tokens of each chunk under several topics: it gets the one under which it begins most
   likely. As many are tried as there is room for.
3. As annotated: what hiding really costs. A chunk that costs more than `max_nats` a token goes back
   to the main thread, and a sync goes before main text that loses more than `sync_nats` a token.

Altogether at most three times the tokens of the plain response go through the model, prompts not
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from statistics import fmean
from typing import TypeVar

from pasta_decoding.data.annotate.base import Annotated
from pasta_decoding.data.annotate.candidates import Candidate, find_candidates
from pasta_decoding.data.annotate.draft import Draft
from pasta_decoding.data.annotate.lattice import choose, semi_markov_marginals
from pasta_decoding.data.annotate.limits import Limits
from pasta_decoding.data.annotate.prior import READERS, Seen, find_facts, log_odds
from pasta_decoding.data.annotate.reading import (
    BaseReader,
    Laid,
    Nats,
    Reading,
    ReadThread,
    read_together,
)
from pasta_decoding.data.annotate.topics import first_new
from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.tree import show

HEAD_TOKENS = 12  # of a chunk, by which its topics are judged
MAX_TOPICS = 3  # that are tried for a chunk
READINGS = 3  # of a response, at most
MIN_SYNC_TOKENS = 10  # main text with fewer is not worth a wait

Result = TypeVar("Result")
Asking = Generator[Sequence[Laid], list[Reading], Result]


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The annotator `likelihood`; see `Annotator`.

    together: rows that are read side by side.
    part:     hears what share of a row's work was done, whenever the model has read for one.
    """

    reader: BaseReader
    limits: Limits = field(default_factory=Limits)
    together: int = 8
    part: Callable[[float], None] = lambda _share: None

    def annotate(self, rows: Iterable[Row]) -> Iterator[Annotated]:
        """Yield one result a row, in order.

        `cost`: `plain_tokens` of the response; `model_tokens`, which went through the model behind
        the prompts; and `prompt_tokens`.
        """
        waiting = iter(rows)
        while batch := list(islice(waiting, self.together)):
            readings = [annotate_row(self.reader, row, self.limits) for row in batch]
            yield from read_together(readings, self.reader.read, lambda: self.part(1 / READINGS))


def annotate_row(reader: BaseReader, row: Row, limits: Limits) -> Asking[Annotated]:
    """Annotate one response; what it asks for is read by the model (`read_together`)."""
    draft = Draft.of(reader, row)
    threads: list[ReadThread] = []
    syncs: frozenset[int] = frozenset()
    candidates = find_candidates(draft.units)
    if candidates and draft.size(draft.lay()) <= draft.room:
        (seen,) = yield draft.pay(draft.lay())
        threads = _choose(draft, candidates, draft.see(seen), limits)
        threads = yield from _name(draft, threads)
        threads, syncs = yield from _check(draft, threads, seen.nats, limits)
    annotated = show(draft.tree(threads, syncs))
    return Annotated(replace(row, response=annotated), cost=draft.cost())


def _choose(
    draft: Draft, candidates: Sequence[Candidate], seen: Sequence[Seen] | None, limits: Limits
) -> list[ReadThread]:
    """Return what a careful reader would most likely take as chunks, not yet named."""
    head = draft.reader.head
    weights = head.weights if head else READERS
    facts = find_facts(draft.instruction, draft.text, draft.units, candidates, seen)
    odds = [log_odds(one, weights) for one in facts]
    _, likely = semi_markov_marginals(len(draft.units), candidates, odds)
    gains = [probability - limits.probability for probability in likely]
    place = {piece.unit: n for n, piece in enumerate(draft.pieces)}
    chosen = choose(len(draft.units), candidates, gains)
    return [ReadThread(place[one.first], place[one.last], "") for one in chosen]


def _name(draft: Draft, threads: Sequence[ReadThread]) -> Asking[list[ReadThread]]:
    """Give each chunk the topic under which its first tokens cost least, of those tried."""
    names = draft.topics(threads, MAX_TOPICS)
    columns = [
        [
            replace(one, topic=own[min(n, len(own) - 1)])
            for one, own in zip(threads, names, strict=True)
        ]
        for n in range(MAX_TOPICS)
    ]
    heads = [draft.lay_heads(column, HEAD_TOKENS) for column in columns]
    while len(heads) > 1 and draft.size(*heads) > draft.spare(len(threads)):
        heads.pop()
    if not threads or len(heads) == 1:
        return columns[0]
    read = yield draft.pay(*heads)
    return list(_cheapest(columns, [one.nats for one in read]))


def _cheapest(
    columns: Sequence[Sequence[ReadThread]], read: Sequence[Nats]
) -> Iterator[ReadThread]:
    """Yield each chunk under the topic of the column in which it costs least, all different."""
    taken: list[str] = []
    for options in zip(*columns[: len(read)], strict=True):
        paid = [sum(_nats(one, nats)) for one, nats in zip(options, read, strict=True)]
        by_nats = sorted(range(len(options)), key=paid.__getitem__)
        taken.append(first_new([options[n].topic for n in by_nats], taken))
        yield replace(options[0], topic=taken[-1])


def _check(
    draft: Draft, threads: Sequence[ReadThread], seen: Nats, limits: Limits
) -> Asking[tuple[list[ReadThread], frozenset[int]]]:
    """Return the chunks that may be hidden at the price, and the pieces that a sync goes before."""
    while threads and draft.size(draft.lay(threads)) > draft.room:
        threads = threads[:-1]  # very long topics in a very short response
    if not threads:
        return [], frozenset()
    (read,) = yield draft.pay(draft.lay(threads))
    hidden = read.nats
    kept = [
        one
        for one in threads
        if fmean(_nats(one, hidden)) - fmean(_nats(one, seen)) <= limits.max_nats
    ]
    losses = {n: [a - b for a, b in zip(nats, seen[n], strict=True)] for n, nats in hidden.items()}
    return kept, frozenset(_syncs(draft, kept, losses, limits.sync_nats))


def _syncs(
    draft: Draft, threads: Sequence[ReadThread], losses: Nats, sync_nats: float
) -> Iterator[int]:
    """Yield the first pieces of paragraphs of main text that lose too much without the chunks."""
    chunk_of = {n: thread for thread in threads for n in range(thread.first, thread.last + 1)}
    unjoined = False

    def key(place: int) -> tuple[ReadThread | None, int | None]:
        unit = draft.pieces[place].unit
        return chunk_of.get(place), None if unit is None else draft.units[unit].block

    for (thread, block), places in groupby(range(len(draft.pieces)), key):
        run = list(places)
        lost = [nats for place in run for nats in losses[place]]
        if thread:
            unjoined = True
        elif (
            block is not None
            and unjoined
            and len(lost) >= MIN_SYNC_TOKENS
            and fmean(lost) > sync_nats
        ):
            yield run[0]
            unjoined = False


def _nats(thread: ReadThread, paid: Nats) -> list[float]:
    """Return what the tokens of a chunk cost, as far as they were read."""
    return [nats for n in range(thread.first, thread.last + 1) for nats in paid.get(n, [])]
