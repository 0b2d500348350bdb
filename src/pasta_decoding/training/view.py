"""From annotated rows to the tensors of a training forward.

Shapes: T tokens of one pack (several answers in a row), L labelled tokens, Q queries, K keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pasta_decoding.data.rows import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.check import check
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
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, has_chunk, read, strip, without_topics
from pasta_decoding.models.checkpoint import ControlTokens
from pasta_decoding.models.load import Loaded
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.training.config import SftConfig

log = logging.getLogger(__name__)

# Rows to layouts


def compile_rows(rows: Sequence[Row], loaded: Loaded, config: SftConfig) -> list[Layout]:
    """Lay out the rows that teach something. Raises PastaError if none is left."""
    control = loaded.checkpoint.control
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=control.ids)
    layouts: list[Layout] = []
    left_out: dict[str, list[str]] = {}
    for row in rows:
        try:
            segments = segments_of(_taught(row.response, config), control, encoder.encode_text)
            prompt = encoder.encode(row.conversation)
            layouts += compile_answer(prompt, segments, control.async_close, loaded.end, config)
        except PastaError as reason:
            left_out.setdefault(str(reason), []).append(row.id)
    for why, ids in left_out.items():
        log.info("%d rows left out, the first is %s: %s", len(ids), ids[0], why)
    if not layouts:
        raise PastaError("no row to train on", hint="Raise --max-length or give other rows.")
    return layouts


def _taught(response: str, config: SftConfig) -> Tree:
    """Return what a response teaches. Raises PastaError if that is nothing, or wrong."""
    has_topics = config.topic == "required"
    tree = read(response) if has_topics else without_topics(read(response))
    text = strip(tree)
    if problems := check(response, topic_required=has_topics):
        raise PastaError(f"broken tags ({problems[0].rule})")
    if has_chunk(read(text)):
        raise PastaError("annotated twice: its tags are text")
    if not text.strip():
        raise PastaError("empty response")
    return (Span(text),) if config.plain else tree


def compile_answer(
    prompt: Sequence[int], segments: Sequence[Segment], close: int, end: int, config: SftConfig
) -> list[Layout]:
    """Lay an annotated answer out. Raises PastaError if it is too long.

    For each join: one layout for `kv`, a row for each stretch between syncs for `text`. The first
    of these rows is left out where it is how the `kv` layout begins.
    """
    sizes = (1 if isinstance(one, SyncRun) else len(one.ids) for one in segments)
    if len(prompt) + sum(sizes) > config.max_tokens:
        raise PastaError(f"longer than {config.max_tokens} tokens")
    laid: list[Layout] = []
    if Joining.kv in config.joins:
        scheme = scheme_named(config.scheme)
        laid.append(lay_out(prompt, segments, scheme, async_close=close, end=end))
    if Joining.text in config.joins:
        rows = lay_out_rows(prompt, segments, async_close=close, end=end)
        known = laid and laid[0].position[: len(rows[0].position)] == rows[0].position
        laid += rows[1:] if known else rows
    return laid


def segments_of(
    tree: Tree, control: ControlTokens, encode: Callable[[str], Sequence[int]]
) -> list[Segment]:
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


# Layouts to packs, and packs to tensors


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


def tokens_of(packs: Iterable[Sequence[Layout]]) -> int:
    return sum(len(layout.tokens) for layouts in packs for layout in layouts)


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


def packed_batch(layouts: Sequence[Layout]) -> PackedBatch:
    def column(name: str) -> Tensor:
        return torch.tensor([value for layout in layouts for value in getattr(layout, name)])

    labels = [label for layout in layouts for label in layout.label]
    sources = [n for n, label in enumerate(labels) if label is not None]
    return PackedBatch(
        tokens_T=column("tokens"),
        position_T=column("position"),
        document_T=torch.tensor([n for n, layout in enumerate(layouts) for _ in layout.tokens]),
        thread_T=column("thread"),
        visible_until_T=column("visible_until"),
        visible_from_T=column("visible_from"),
        source_L=torch.tensor(sources, dtype=torch.long),
        label_L=torch.tensor([labels[source] for source in sources], dtype=torch.long),
    )


def visibility(batch: PackedBatch, window: int | None = None) -> Tensor:
    """Return mask_QK (bool): may query token q attend to key token k?

    A token sees the earlier tokens of its own thread, and of the other threads those with
    `visible_from` <= its `visible_until`. That one rule covers fork, join and siblings. In a layer
    with a window it sees only those of them at positions above its own - window.
    """
    index_T = torch.arange(len(batch.tokens_T), device=batch.tokens_T.device)
    query, key = index_T[:, None], index_T[None, :]
    seen = (query >= key) & (batch.document_T[query] == batch.document_T[key])
    same = batch.thread_T[query] == batch.thread_T[key]
    seen = seen & (same | (batch.visible_from_T[key] <= batch.visible_until_T[query]))
    if window is not None:
        seen = seen & (batch.position_T[query] - batch.position_T[key] < window)
    return seen


def attention_masks(
    batch: PackedBatch, windows: Mapping[str, int | None]
) -> Tensor | dict[str, Tensor]:
    """Return what a Hugging Face forward takes as `attention_mask`: bool [1, 1, Q, K].

    `windows` names the kinds of layers, as `attention_windows` has them; where there are several,
    each has a mask of its own.
    """
    masks = {kind: visibility(batch, window)[None, None] for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))
