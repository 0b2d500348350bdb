"""What a response means: for every token its thread, its position, and whom it may see.

This is the one definition. Training builds masks, positions and labels from it; decoding produces
the same integers as it goes. All counting is in tokens of the main thread, prompt included: the
n-th one, from 0, has the ordinal n.

- A main token with ordinal i has visible_until = visible_from = i.
- A chunk token's visible_until is the ordinal of its PROMISE_CLOSE, and its visible_from the
  ordinal of the SYNC that joined it, or the main thread's length if none did.
- A token sees itself, the earlier tokens of its own thread, and of the other threads those with
  visible_from <= its visible_until.

That is the `kv` join: nothing is computed again. Under the `text` join an answer is several such
layouts, *rows*: each SYNC begins a new one, whose prompt is all of the answer so far in reading
order, ids with their tags. Within a row there is no join; so a row is what an engine can decode
that knows nothing but causal sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pasta_decoding.lang.positions import SHARED_MAX, Scheme

MAIN = 0


class Joining(StrEnum):
    """How main comes to see finished chunks; `pasta.json` lists those of a checkpoint."""

    kv = "kv"
    text = "text"


@dataclass(frozen=True, slots=True)
class MainRun:
    """Main-thread text. `forced` ids at its end were not the model's choice (a prompt: all)."""

    ids: tuple[int, ...]
    forced: int = 0


@dataclass(frozen=True, slots=True)
class PromiseRun:
    """PROMISE_OPEN, the topic, PROMISE_CLOSE. `promised` is the length that the closing carries."""

    ids: tuple[int, ...]
    promised: int
    forced: int = 0


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """ASYNC_OPEN and the chunk. ASYNC_CLOSE is never fed; `closed` says that the model wrote it."""

    ids: tuple[int, ...]
    closed: bool = True


@dataclass(frozen=True, slots=True)
class SyncRun:
    """The SYNC token."""

    id: int


Segment = MainRun | PromiseRun | ChunkRun | SyncRun


@dataclass(frozen=True, slots=True)
class Layout:
    """One answer in reading order, T tokens, all columns of length T.

    tokens:        token ids, exactly those that decoding feeds.
    thread:        0 for the main thread, k for the k-th chunk.
    position:      position ids; threads that run side by side overlap.
    visible_until: ordinal of the last main token that this one may see.
    visible_from:  ordinal of the first main token that may see this one.
    label:         the id to predict from this token; None where the model chose nothing.
    step:          forward pass that feeds it at unlimited width; 0 is the prefill.
    """

    tokens: tuple[int, ...]
    thread: tuple[int, ...]
    position: tuple[int, ...]
    visible_until: tuple[int, ...]
    visible_from: tuple[int, ...]
    label: tuple[int | None, ...]
    step: tuple[int, ...]

    @property
    def critical_path(self) -> int:
        """Steps after the prefill that the answer needs at unlimited width."""
        return max(self.step, default=0)


def sees(layout: Layout, query: int, key: int) -> bool:
    """May token `query` attend to token `key`? The rule itself, one pair at a time."""
    if layout.thread[query] == layout.thread[key]:
        return key <= query
    return layout.visible_from[key] <= layout.visible_until[query]


def lay_out(
    prompt: Sequence[int],
    segments: Sequence[Segment],
    scheme: Scheme,
    *,
    async_close: int,
    end: int | None,
) -> Layout:
    """Lay one answer out behind `prompt`.

    A chunk follows its promise directly. `async_close` and `end` are the labels of a chunk's and
    of the main thread's last token; `end` is None for an answer that was cut off.
    """
    return _Builder(scheme, async_close).layout(prompt, segments, end)


def lay_out_rows(
    prompt: Sequence[int], segments: Sequence[Segment], *, async_close: int, end: int | None
) -> tuple[Layout, ...]:
    """Lay one answer out for the `text` join: one row for each stretch between its syncs.

    A row's copy of what came before is main text, takes one step, that of its SYNC, and carries
    no loss: SYNC itself is predicted in the row before. Positions count from 0 in every row. An
    answer without a sync has one row, the same as under the `kv` join with `shared-max`.
    """
    rows: list[Layout] = []
    copied_ids = tuple(prompt)
    stretch: list[Segment] = []
    builder = _Builder(SHARED_MAX, async_close)
    for segment in segments:
        if not isinstance(segment, SyncRun):
            stretch.append(segment)
            continue
        rows.append(builder.layout(copied_ids, stretch, segment.id))
        copied_ids += (*in_reading_order(stretch, async_close), segment.id)
        step = rows[-1].critical_path + 1
        builder = _Builder(SHARED_MAX, async_close, first_step=step, threads=builder.threads)
        stretch = []
    return (*rows, builder.layout(copied_ids, stretch, end))


def in_reading_order(segments: Sequence[Segment], async_close: int) -> tuple[int, ...]:
    """Return the ids of an answer, or of a part of it, as one sequence with all tags."""
    ids: list[int] = []
    for segment in segments:
        match segment:
            case SyncRun(token):
                ids.append(token)
            case ChunkRun(chunk):
                ids += [*chunk, async_close]
            case _:
                ids += segment.ids
    return tuple(ids)


@dataclass(slots=True)
class _Token:
    token: int
    thread: int
    position: int
    visible_until: int
    visible_from: int
    step: int
    label: int | None = None


@dataclass(slots=True)
class _Builder:
    scheme: Scheme
    async_close: int
    first_step: int = 0
    tokens: list[_Token] = field(default_factory=list)
    main: list[_Token] = field(default_factory=list)
    open_chunks: list[list[_Token]] = field(default_factory=list)
    threads: int = 0
    next_position: int = 0
    promised: int | None = None

    def layout(self, prompt: Sequence[int], segments: Sequence[Segment], end: int | None) -> Layout:
        for token in prompt:
            self._append_main(token, self.next_position, step=self.first_step, chosen=False)
        for segment in segments:
            self._add(segment)
        assert self.promised is None, "a promise without its chunk"
        if self.main:
            self.main[-1].label = end
        self._make_visible(len(self.main))
        columns = ("token", "thread", "position", "visible_until", "visible_from", "label", "step")
        return Layout(*(tuple(getattr(token, name) for token in self.tokens) for name in columns))

    def _add(self, segment: Segment) -> None:
        assert (self.promised is not None) == isinstance(segment, ChunkRun), (
            "a chunk follows its promise directly, and nothing else does"
        )
        match segment:
            case MainRun(ids, forced):
                self._add_run(ids, forced)
            case PromiseRun(ids, promised, forced):
                self._add_run(ids, forced)
                self.promised = promised
            case ChunkRun(ids, closed):
                self._add_chunk(ids, closed=closed)
            case SyncRun(token):
                self._add_sync(token)

    def _add_run(self, ids: Sequence[int], forced: int) -> None:
        for index, token in enumerate(ids):
            step = self.main[-1].step + 1 if self.main else 1
            chosen = index < len(ids) - forced
            self._append_main(token, self.next_position, step=step, chosen=chosen)

    def _append_main(self, token: int, position: int, *, step: int, chosen: bool) -> None:
        if self.main and chosen:
            self.main[-1].label = token
        added = _Token(token, MAIN, position, len(self.main), len(self.main), step)
        self.tokens.append(added)
        self.main.append(added)
        self.next_position = position + 1

    def _add_chunk(self, ids: Sequence[int], *, closed: bool) -> None:
        assert self.promised is not None, "a chunk keeps a promise"
        close = self.main[-1]
        first = close.position + 1
        self.threads += 1
        labels = [*ids[1:], self.async_close if closed else None]
        chunk = [
            _Token(token, self.threads, first + n, close.visible_until, 0, close.step + n, label)
            for n, (token, label) in enumerate(zip(ids, labels, strict=True))
        ]
        self.tokens += chunk
        self.open_chunks.append(chunk)
        self.next_position = self.scheme.main_next(close.position, self.promised)
        self.promised = None

    def _add_sync(self, token: int) -> None:
        chunks = [range(chunk[0].position, chunk[-1].position + 1) for chunk in self.open_chunks]
        position = self.scheme.sync(self.next_position, chunks)
        ends = [chunk[-1].step for chunk in self.open_chunks]
        self._make_visible(len(self.main))
        self._append_main(token, position, step=max([self.main[-1].step, *ends]) + 1, chosen=True)

    def _make_visible(self, ordinal: int) -> None:
        for chunk in self.open_chunks:
            for token in chunk:
                token.visible_from = ordinal
        self.open_chunks.clear()
