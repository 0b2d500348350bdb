"""The layout of a response: for every token its thread, its position, and the tokens it may see.

This is the one definition. Training builds masks, positions and labels from it; decoding produces
the same integers as it goes. An *ordinal* counts the tokens of the main thread from 0, prompt
included.

- A main token with ordinal i has visible_until = visible_from = i.
- A chunk token's visible_until is the ordinal of its PROMISE_CLOSE, and its visible_from the
  ordinal of the SYNC that joined it, or the main thread's length if none did.
- A token sees itself, the earlier tokens of its own thread, and the tokens of other threads whose
  visible_from is at most its visible_until.

That is the `kv` join: nothing is computed again. Under the `text` join an answer is several such
layouts, called rows: each SYNC begins a new row, whose prompt is all of the answer so far in
reading order, tags included. There is no join within a row, so an engine that knows only causal
sequences can decode it.
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
    """Main-thread text. The model did not choose its last `forced` ids (of a prompt: all)."""

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
    """ASYNC_OPEN and the chunk. ASYNC_CLOSE is never fed; `closed`: the model wrote it."""

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
    label:         the id to predict from this token; None where the model did not choose it.
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
    """May the token at index `query` attend to the token at index `key`?"""
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
    """Lay one answer out after `prompt`.

    A chunk follows its promise directly. `async_close` is the label of a closed chunk's last token,
    `end` that of the main thread's; `end` is None for an answer that was cut off.
    """
    return _Builder(scheme, async_close).layout(prompt, segments, end)


def lay_out_rows(
    prompt: Sequence[int], segments: Sequence[Segment], *, async_close: int, end: int | None
) -> tuple[Layout, ...]:
    """Lay one answer out for the `text` join: one row for each stretch between its syncs.

    A row begins with a copy of the answer so far, as main text. The copy takes a single step, that
    of its SYNC, and carries no loss: the row before predicts SYNC. Positions count from 0 in every
    row. An answer without a sync has one row, the same as under the `kv` join with `shared-max`.
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
    """Builds one layout.

    main:          the main thread's part of `tokens`.
    open_chunks:   chunks that no SYNC has joined.
    threads:       chunks so far.
    next_position: of the main thread.
    promised:      the length of the promise whose chunk must come next; None if no chunk may.
    """

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
        ordinal = len(self.main)
        entry = _Token(token, MAIN, position, ordinal, ordinal, step)
        self.tokens.append(entry)
        self.main.append(entry)
        self.next_position = position + 1

    def _add_chunk(self, ids: Sequence[int], *, closed: bool) -> None:
        assert self.promised is not None, "a chunk keeps a promise"
        promise_close = self.main[-1]
        first_position = promise_close.position + 1
        self.threads += 1
        labels = [*ids[1:], self.async_close if closed else None]
        chunk = [
            _Token(
                token,
                self.threads,
                first_position + index,
                promise_close.visible_until,
                visible_from=0,  # `_make_visible` sets it
                step=promise_close.step + index,
                label=label,
            )
            for index, (token, label) in enumerate(zip(ids, labels, strict=True))
        ]
        self.tokens += chunk
        self.open_chunks.append(chunk)
        self.next_position = self.scheme.main_next(promise_close.position, self.promised)
        self.promised = None

    def _add_sync(self, token: int) -> None:
        chunks = [range(chunk[0].position, chunk[-1].position + 1) for chunk in self.open_chunks]
        position = self.scheme.sync(self.next_position, chunks)
        last_steps = [self.main[-1].step, *(chunk[-1].step for chunk in self.open_chunks)]
        self._make_visible(len(self.main))
        self._append_main(token, position, step=max(last_steps) + 1, chosen=True)

    def _make_visible(self, ordinal: int) -> None:
        """Show the open chunks to main tokens from `ordinal` on."""
        for chunk in self.open_chunks:
            for token in chunk:
                token.visible_from = ordinal
        self.open_chunks.clear()
