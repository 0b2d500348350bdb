"""Find the parts of a plain response by APAR's rules: what follows a title or a first sentence.

This makes a rival's training data, to compare with. APAR (Liu et al. 2024, arXiv:2401.06761)
takes parts to be independent wherever the layout looks like it: of every list item the title
stays in the parent and the detail goes to a child thread; in a response without such a list the
first sentence of every paragraph stays and the rest goes. The parent goes on at once, and nobody
ever sees a child. Our language says that without topics and without syncs. Train with
the setting `topic: none` of `pasta train sft`, under `shared-max`: as in APAR, a child goes on at
its parent's next position.

As published (the preparation scripts of THUDM/APAR, commit 76b64e6): the list rule first, the
paragraph rule where it finds nothing; three forks at least; a list item's detail has ten
characters, what stays of every paragraph twenty; what may be code, mathematics, a table, a link or
Chinese, Japanese or Korean does not fork; one level.

Not as published:
- A fork is two tokens here instead of one, and the second one tells the length of the chunk.
- White space at the edges stays in the main thread; APAR writes its own line breaks there.
- Bullets count as numbers do; the scripts match numbers only. Of an item without a title the first
  sentence stays, as of a paragraph; the scripts leave such lists alone.
- Sentences are found as the annotator `structure` finds them. The scripts cut at every full stop
  with a space behind it, and leave out responses with `Mr.`, `Mrs.` and `Dr.`.
- Responses that do not fork are kept. The paper mixes structured and unstructured ones half and
  half; here the share is what the responses make it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from pasta_decoding.data.annotate.base import Part
from pasta_decoding.data.annotate.outline import outline
from pasta_decoding.data.annotate.structure import part_of, sentences

MIN_FORKS = 3
MIN_DETAIL_CHARS = 10
MIN_KEPT_CHARS = 20

_SEQUENTIAL = re.compile(r"```|\$\$|[<>=|]|---|http|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_TITLE = re.compile(r"[^\n:]{1,100}:(?:\*\*|__)?(?=\s)")
_BLANK_LINES = re.compile(r"(\n\s*\n)")


def find_parts(response: str) -> list[Part]:
    """Return what child threads write, in order; nothing if the response stays sequential."""
    if _SEQUENTIAL.search(response):
        return []
    found = _list_parts(response) or _paragraph_parts(response)
    return found if len(found) >= MIN_FORKS else []


def _list_parts(text: str) -> list[Part]:
    """Return the details of list items; nothing if they are too few."""
    parts = []
    for item in (block for block in outline(text) if block.kind == "item"):
        title = _TITLE.match(text, item.body, item.end)
        if detail := (
            _behind_sentence(text, item.body, item.end)
            if title is None
            else _if_long(part_of(text, title.end(), item.end))
        ):
            parts.append(detail)
    return parts if len(parts) >= MIN_FORKS else []


def _paragraph_parts(text: str) -> list[Part]:
    """Return the rest of every paragraph; nothing if too little would stay of one."""
    parts = []
    for paragraph in _paragraphs(text):
        rest = _behind_sentence(text, paragraph.start, paragraph.end)
        kept_end = paragraph.end if rest is None else rest.start
        if kept_end - paragraph.start < MIN_KEPT_CHARS:
            return []
        parts += [] if rest is None else [rest]
    return parts


def _paragraphs(text: str) -> Iterator[Part]:
    """Yield what stands between blank lines."""
    at = 0
    for piece in _BLANK_LINES.split(text):
        paragraph = part_of(text, at, at + len(piece))
        if paragraph.start < paragraph.end:
            yield paragraph
        at += len(piece)


def _behind_sentence(text: str, start: int, end: int) -> Part | None:
    second = next(islice(sentences(text, start, end), 1, None), None)
    return None if second is None else _if_long(part_of(text, second[0], end))


def _if_long(part: Part) -> Part | None:
    return part if part.end - part.start >= MIN_DETAIL_CHARS else None
