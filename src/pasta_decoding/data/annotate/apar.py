"""Finds the parts of a plain response by APAR's rules: the text after a title or first sentence.

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
from collections.abc import Iterator
from itertools import islice

from pasta_decoding.data.annotate.base import Part
from pasta_decoding.data.annotate.structure import Block, outline, part_of, sentences

MIN_FORKS = 3
MIN_DETAIL_CHARS = 10
MIN_MAIN_CHARS = 20

_SEQUENTIAL = re.compile(r"```|\$\$|[<>=|]|---|http|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_TITLE = re.compile(r"[^\n:]{1,100}:(?:\*\*|__)?(?=\s)")
_BLANK_LINES = re.compile(r"\n\s*\n")


def find_parts(response: str) -> list[Part]:
    if _SEQUENTIAL.search(response):
        return []
    items = [block for block in outline(response) if block.kind == "item"]
    details = [part for item in items if (part := _detail(response, item))]
    if len(details) >= MIN_FORKS:
        return details
    paragraph_parts = _paragraph_parts(response)
    return paragraph_parts if len(paragraph_parts) >= MIN_FORKS else []


def _detail(text: str, item: Block) -> Part | None:
    """Return the part after a list item's title, or after its first sentence."""
    title = _TITLE.match(text, item.body, item.end)
    if title is None:
        return _after_first_sentence(text, item.body, item.end)
    return _if_long(part_of(text, title.end(), item.end))


def _paragraph_parts(text: str) -> list[Part]:
    """Return each paragraph without its first sentence.

    If the main thread would have too little of a paragraph, nothing is returned.
    """
    parts = []
    for paragraph in _paragraphs(text):
        part = _after_first_sentence(text, paragraph.start, paragraph.end)
        main_end = paragraph.end if part is None else part.start
        if paragraph.start < paragraph.end and main_end - paragraph.start < MIN_MAIN_CHARS:
            return []
        if part is not None:
            parts.append(part)
    return parts


def _paragraphs(text: str) -> Iterator[Part]:
    start = 0
    for gap in _BLANK_LINES.finditer(text):
        yield part_of(text, start, gap.start())
        start = gap.end()
    yield part_of(text, start, len(text))


def _after_first_sentence(text: str, start: int, end: int) -> Part | None:
    sentence_starts = [
        sentence_start for sentence_start, _ in islice(sentences(text, start, end), 2)
    ]
    if len(sentence_starts) < 2:
        return None
    return _if_long(part_of(text, sentence_starts[1], end))


def _if_long(part: Part) -> Part | None:
    return part if part.end - part.start >= MIN_DETAIL_CHARS else None
