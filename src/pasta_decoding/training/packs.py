"""From rows to packs: what stage 1 shows the model, fixed in advance."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pasta_decoding.data.rows import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.check import check
from pasta_decoding.lang.layout import Layout
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import Span, has_chunk, read, strip, without_topics
from pasta_decoding.models.control_tokens import ControlTokens
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.loss import Example
from pasta_decoding.training.view import compile_answer, pack

log = logging.getLogger(__name__)


def hold_out(rows: Iterable[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Return the rows that stay, and about a `share` of all; rows of one id go the same way.

    Raises PastaError if either part is empty.
    """
    parts: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        digest = hashlib.sha256(f"held out {row.id}".encode()).hexdigest()
        parts[int(digest, 16) < share * 16 ** len(digest)].append(row)
    if not all(parts):
        raise PastaError(
            f"a share of {share:g} leaves {len(parts[0])} rows and holds out {len(parts[1])}",
            hint="Give another eval_share, or --eval-data.",
        )
    return parts


def compile_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    control: ControlTokens,
    config: SftConfig,
    *,
    end: int,
) -> list[Layout]:
    """Lay every row out between its prompt and `end`; rows that cannot be used are left out."""
    encoder = PromptEncoder(tokenizer, forbidden_ids=control.ids)
    layouts: list[Layout] = []
    left_out: dict[str, list[str]] = {}
    for row in rows:
        try:
            layouts += compile_row(row, encoder, control, config, end=end)
        except PastaError as reason:
            left_out.setdefault(str(reason), []).append(row.id)
    for why, ids in left_out.items():
        log.info("%d rows left out, the first is %s: %s", len(ids), ids[0], why)
    if not layouts:
        raise PastaError("no row to train on", hint="Raise --max-length or give other rows.")
    return layouts


def compile_row(
    row: Row, encoder: PromptEncoder, control: ControlTokens, config: SftConfig, *, end: int
) -> list[Layout]:
    """Lay one row out, for each join.

    Raises PastaError, which says why, if it teaches nothing or wrong things.
    """
    has_topics = config.topic == "required"
    tree = read(row.response) if has_topics else without_topics(read(row.response))
    text = strip(tree)
    if problems := check(row.response, topic_required=has_topics):
        raise PastaError(f"broken tags ({problems[0].rule})")
    if has_chunk(read(text)):
        raise PastaError("annotated twice: its tags are text")
    if not text.strip():
        raise PastaError("empty response")
    layouts = compile_answer(
        encoder.encode(row.conversation),
        (Span(text),) if config.plain else tree,
        control=control,
        encode=encoder.encode_text,
        scheme=scheme_named(config.scheme),
        end=end,
        max_tokens=config.max_tokens,
        joinings=config.joins,
    )
    if not layouts:
        raise PastaError(f"longer than {config.max_tokens} tokens")
    return layouts


def plan_packs(layouts: Sequence[Layout], config: SftConfig) -> list[list[Layout]]:
    """Fix the packs of the whole run in advance, so that a resumed run sees the same ones."""
    packs = []
    shuffle = random.Random(config.seed)
    for _ in range(config.epochs):
        order = list(layouts)
        shuffle.shuffle(order)
        packs += pack(order, config.pack_tokens)
    limit = None if config.max_steps is None else config.max_steps * config.packs_per_step
    return packs[:limit]


def shared_out(packs: Sequence[Sequence[Layout]], per_step: int, processes: int) -> list[Example]:
    """Return the packs in an order that the processes take in turns, each the same number.

    So a step has the same packs however many processes share them. Left to itself the sampler
    would show the first packs again to fill the last turn; one without labels teaches nothing.
    """
    found = []
    for first in range(0, len(packs), per_step):
        step = list(packs[first : first + per_step])
        unlabelled = [replace(one, label=(None,) * len(one.label)) for one in step[-1]]
        step += [unlabelled] * (-len(step) % processes)
        labels = sum(len(Example(layouts).labels) for layouts in step)
        found += [Example(layouts, len(step) / labels) for layouts in step]
    return found


def tokens_of(packs: Iterable[Sequence[Layout]]) -> int:
    return sum(len(layout.tokens) for layouts in packs for layout in layouts)
