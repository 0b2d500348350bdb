"""From an annotated response to the tensors of a training forward.

Shapes: T tokens of one pack (several answers in a row), L labelled tokens, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from pasta_decoding.lang.layout import (
    ChunkRun,
    Joining,
    Layout,
    PromiseRun,
    Run,
    Segment,
    SyncRun,
    lay_out,
    lay_out_rows,
)
from pasta_decoding.lang.positions import Scheme
from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree
from pasta_decoding.models.control_tokens import ControlTokens

EncodeText = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One pack, flattened in reading order, plus who may see whom.

    tokens_T:   int64, token ids.
    position_T: int64, the position ids that decoding uses; not monotone.
    document_T: int64, which answer of the pack; answers do not see each other.
    thread_T:   int64, 0 for the main thread, 1.. for chunks.
    visible_until_T:  int64, ordinal of the last main token that this one may see.
    visible_from_T:   int64, ordinal of the first main token that may see this one.
    source_L:   int64, index in T of the tokens from which something is predicted.
    label_L:    int64, the token id to predict there.
    """

    tokens_T: Tensor
    position_T: Tensor
    document_T: Tensor
    thread_T: Tensor
    visible_until_T: Tensor
    visible_from_T: Tensor
    source_L: Tensor
    label_L: Tensor

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the same on `device`."""
        columns = (getattr(self, field.name).to(device) for field in fields(PackedBatch))
        return PackedBatch(*columns)


def segments_of(tree: Tree, control: ControlTokens, encode: EncodeText) -> list[Segment]:
    """Encode an annotated response piece by piece; no token ever spans a tag.

    Promises say the lengths that the chunks have in these tokens, whoever annotated it and with
    which tokenizer: the numbers of the text form are advice.
    """
    segments: list[Segment] = []
    for node in tree:
        match node:
            case Span(text):
                segments.append(Run(tuple(encode(text))))
            case Chunk(topic, _, text):
                body = tuple(encode(text))
                bucket = control.bucket(len(body))
                words = tuple(encode(topic)) if topic else ()
                promise = (control.promise_open, *words, control.promise_close[bucket])
                segments.append(PromiseRun(promise, bucket))
                segments.append(ChunkRun((control.async_open, *body)))
            case Sync():
                segments.append(SyncRun(control.sync))
    return segments


def crop(segments: Sequence[Segment], max_tokens: int) -> tuple[list[Segment], bool]:
    """Keep the first segments that fit into `max_tokens`; say whether all of them did.

    The cut falls between segments, so that no chunk is taught to end in mid-sentence.
    """
    kept: list[Segment] = []
    for segment in segments:
        size = 1 if isinstance(segment, SyncRun) else len(segment.ids)
        if size > max_tokens:
            if kept and isinstance(kept[-1], PromiseRun):
                kept.pop()
            return kept, False
        kept.append(segment)
        max_tokens -= size
    return kept, True


def compile_answer(
    prompt: Sequence[int],
    tree: Tree,
    *,
    control: ControlTokens,
    encode: EncodeText,
    scheme: Scheme,
    end: int,
    max_tokens: int,
    joinings: Collection[Joining] = (Joining.kv,),
) -> list[Layout]:
    """Lay an annotated answer out behind its prompt; nothing if not even a part of it fits.

    For each of `joinings`: one layout for `kv`, a row for each stretch between syncs for `text`.
    A row is left out that teaches nothing new: the first where it is how the `kv` layout begins,
    the last where the answer was cut behind its sync.
    """
    segments, whole = crop(segments_of(tree, control, encode), max_tokens - len(prompt))
    if not segments:
        return []
    closing, close = end if whole else None, control.async_close
    laid: list[Layout] = []
    if Joining.kv in joinings:
        laid.append(lay_out(prompt, segments, scheme, async_close=close, end=closing))
    if Joining.text in joinings:
        rows = lay_out_rows(prompt, segments, async_close=close, end=closing)
        known = laid and laid[0].position[: len(rows[0].position)] == rows[0].position
        laid += rows[1:] if known else rows
    return [row for row in laid if any(label is not None for label in row.label)]


def pack(layouts: Iterable[Layout], max_tokens: int) -> list[list[Layout]]:
    """Fill packs of at most `max_tokens` in the order given; an answer is never cut."""
    packs: list[list[Layout]] = []
    room = 0
    for layout in layouts:
        size = len(layout.tokens)
        if not packs or size > room:
            packs.append([])
            room = max_tokens
        packs[-1].append(layout)
        room -= size
    return packs


def packed_batch(layouts: Sequence[Layout]) -> PackedBatch:
    """Turn one pack into tensors."""

    def column(name: str) -> Tensor:
        return torch.tensor([value for layout in layouts for value in getattr(layout, name)])

    labels = [label for layout in layouts for label in layout.label]
    documents = [n for n, layout in enumerate(layouts) for _ in layout.tokens]
    return PackedBatch(
        tokens_T=column("tokens"),
        position_T=column("position"),
        document_T=torch.tensor(documents),
        thread_T=column("thread"),
        visible_until_T=column("visible_until"),
        visible_from_T=column("visible_from"),
        source_L=torch.tensor(
            [n for n, label in enumerate(labels) if label is not None], dtype=torch.long
        ),
        label_L=torch.tensor([label for label in labels if label is not None], dtype=torch.long),
    )


def visibility(batch: PackedBatch, window: int | None = None) -> Tensor:
    """Return mask_QK (bool): may query token q attend to key token k?

    A token sees the earlier tokens of its own thread, and of the other threads those with
    `visible_from` <= its `visible_until`. That one rule covers fork, join and siblings. In a layer
    with a window it sees only those of them at positions above its own - window.
    """
    index_T = torch.arange(len(batch.tokens_T), device=batch.tokens_T.device)
    return _sees(batch, window, index_T[:, None], index_T[None, :])


def block_mask(batch: PackedBatch, window: int | None = None) -> BlockMask:
    """Return the same for flex attention, which passes over blocks that nobody sees."""
    size = len(batch.tokens_T)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _sees(batch, window, query, key)

    return create_block_mask(sees, None, None, size, size, device=batch.tokens_T.device)


def attention_masks(
    batch: PackedBatch, windows: Mapping[str, int | None], *, blocks: bool = False
) -> Tensor | BlockMask | dict[str, Tensor | BlockMask]:
    """Return what a Hugging Face forward takes as `attention_mask`: bool [1, 1, Q, K], or blocks.

    `windows` names the kinds of layers, as `attention_windows` has them; where there are several,
    each has a mask of its own. `blocks` is for models that compute flex attention.
    """
    masks = {
        kind: block_mask(batch, window) if blocks else visibility(batch, window)[None, None]
        for kind, window in windows.items()
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _sees(batch: PackedBatch, window: int | None, query: Tensor, key: Tensor) -> Tensor:
    """May these queries attend to these keys? Both are indices in T, of any shapes that fit."""
    seen = query >= key
    seen = seen & (batch.document_T[query] == batch.document_T[key])
    same = batch.thread_T[query] == batch.thread_T[key]
    seen = seen & (same | (batch.visible_from_T[key] <= batch.visible_until_T[query]))
    if window is not None:
        seen = seen & (batch.position_T[query] - batch.position_T[key] < window)
    return seen


def takes_blocks(model: Any) -> bool:
    """Does this model compute flex attention, which takes block masks?"""
    return bool(model.config.get_text_config()._attn_implementation == "flex_attention")
