"""Find the parts of a plain response by APAR's rules: what follows a title or a first sentence.

This makes the training data of a baseline, APAR (Liu et al. 2024, arXiv:2401.06761). The title of
each list item stays in the parent, and the detail goes to a child thread; without such a list, the
first sentence of each paragraph stays. The parent goes on at once and never sees a child: our
language without topics and syncs. Train with `topic: none` under `shared-max`, where a child goes
on at its parent's next position, as in APAR.

The limits are those of the published scripts (THUDM/APAR, commit 76b64e6). What differs:
- A fork is two tokens instead of one, and the second one tells the length of the chunk.
- White space at the edges stays in the main thread; APAR writes its own line breaks there.
- Bullets count as numbers do, and items without a title keep their first sentence.
- Sentences are found as by `structure`; the scripts cut at every full stop before a space.
- Responses that do not fork are kept; the paper mixes both kinds half and half.
"""

import re
from itertools import islice

from pasta_decoding.data.annotate.base import Part
from pasta_decoding.data.annotate.structure import Block, outline, part_of, sentences

MIN_FORKS = 3
MIN_DETAIL_CHARS = 10
MIN_KEPT_CHARS = 20

_SEQUENTIAL = re.compile(r"```|\$\$|[<>=|]|---|http|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_TITLE = re.compile(r"[^\n:]{1,100}:(?:\*\*|__)?(?=\s)")
_BLANK_LINES = re.compile(r"\n\s*\n")


def find_parts(response: str) -> list[Part]:
    if _SEQUENTIAL.search(response):
        return []
    items = [block for block in outline(response) if block.kind == "item"]
    found = [part for item in items if (part := _detail(response, item))]
    found = found if len(found) >= MIN_FORKS else _paragraph_parts(response)
    return found if len(found) >= MIN_FORKS else []


def _detail(text: str, item: Block) -> Part | None:
    """Return what stands behind a list item's title, or behind its first sentence."""
    title = _TITLE.match(text, item.body, item.end)
    if title is None:
        return _behind_sentence(text, item.body, item.end)
    return _if_long(part_of(text, title.end(), item.end))


def _paragraph_parts(text: str) -> list[Part]:
    """Return the rest of every paragraph; nothing if too little would stay of one."""
    parts = []
    bounds = [0, *(at for gap in _BLANK_LINES.finditer(text) for at in gap.span()), len(text)]
    for start, end in zip(bounds[::2], bounds[1::2], strict=True):
        paragraph = part_of(text, start, end)
        rest = _behind_sentence(text, paragraph.start, paragraph.end)
        kept_end = paragraph.end if rest is None else rest.start
        if paragraph.start < paragraph.end and kept_end - paragraph.start < MIN_KEPT_CHARS:
            return []
        parts += [] if rest is None else [rest]
    return parts


def _behind_sentence(text: str, start: int, end: int) -> Part | None:
    second = next(islice(sentences(text, start, end), 1, None), None)
    return None if second is None else _if_long(part_of(text, second[0], end))


def _if_long(part: Part) -> Part | None:
    return part if part.end - part.start >= MIN_DETAIL_CHARS else None
