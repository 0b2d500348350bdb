"""Annotate a plain response by rule: what its layout sets side by side becomes chunks.

List items, sections under headings, and else paragraphs or sentences behind the opening
become chunks of about 12 to 120 words. Stories, verse, dialogue, code, tables, numbered
derivations, openings and closings stay in the main thread.
"""

from __future__ import annotations

import re
from itertools import groupby
from collections.abc import Callable, Iterable, Iterator, Sequence

from pasta_decoding.data.annotate.outline import Block, blocks, outline
from pasta_decoding.data.annotate.sequence import is_procedure, is_sequence
from pasta_decoding.data.annotate.topics import Part, name_parts, stem_of, words
from pasta_decoding.data.annotate.words import STOP_WORDS
STOP={stem_of(w) for w in STOP_WORDS}
from pasta_decoding.lang.tree import Chunk, Node, Span, show

MIN_WORDS = 12
RUN_WORDS = 9
OPENING_WORDS = 45
OVERLAP = 9
STRETCH=60
LEAD_IN_WORDS = 35
LONG_PARAGRAPH_WORDS = 100
LONG_SECTION_WORDS = 110
LONG_ITEM_WORDS = 140

_SENTENCE = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(\[*]*[A-Z0-9])")
_ABBREVIATION = re.compile(r"(?:\b(?:[A-Za-z]|Dr|Mr|Mrs|Ms|St|vs|etc|No|Inc|Jr|Prof|e\.g|i\.e|U\.S)|^\W*\d+)\.$")
_LEANS_BACK = re.compile(
    r"(?:this|these|those|that|such|however|but|yet|for (?:example|instance)|as a result|thus|then|hence"
    r"|therefore|otherwise|in other words|in fact|instead|consequently|because of this|so|and|or|both|either"
    r"|here|again|note)\b",
    re.I,
)
_CLOSING = re.compile(
    r"\W*(?:in (?:conclusion|summary|short|closing|essence|the end)|overall|to (?:sum|conclude|summarize)|remember"
    r"|ultimately|by (?:following|using|taking|incorporating|understanding|doing|implementing)|i hope|please|let me"
    r"|so,|note|conclusion|with (?:these|this|the right)|all in all|these are|if you|feel free|sources?\b|references?\b)",
    re.I,
)
_TITLES = (
    re.compile(r"(?:\*\*|__)(?P<title>[^*\n]{2,80}?)(?:\*\*|__)"),
    re.compile(r"(?P<title>[^\s:.!?(][^:.!?\n]{1,60}):(?=\s)"),
    re.compile(r"(?P<title>[^\s:.!?(][^:.!?\n]{1,50}?)\s+[-–—]\s"),
    re.compile(r"(?P<title>[^\s:.!?][^:.!?\n]{1,60})[.!?]?\s*\n"),
)


def annotate(response: str, count_tokens: Callable[[str], int]) -> str:
    """Return `response` in text form, its independent parts promised; plain with fewer than two.

    `count_tokens` tells how many tokens a chunk's text is. Taking the tags out of the
    result gives `response` exactly, whatever it holds.
    """
    found = find_parts(response)
    if len(found) < 2:
        return show((Span(response),) if response else ())
    context = response[: found[0].start]
    topics = name_parts(response, found, context)
    return show(tuple(_nodes(response, found, topics, count_tokens)))


def find_parts(response: str) -> list[Part]:
    """Return the parts of `response` that can be written side by side, in order."""
    if is_sequence(response):
        return []
    layout = outline(response)
    lists = any(block.kind in {"item", "heading"} for block in layout)
    parts: list[Part] = []
    for heading, body in _sections(layout):
        last = not body or body[-1] is layout[-1]
        if heading is None:
            parts += _loose_parts(response, body, opening=True, closing=last, lists=lists)
        else:
            parts += _section_parts(response, heading, body, closing=last)
    return [part for part in parts if _words(response[part.start : part.end]) >= MIN_WORDS]


def _nodes(
    text: str, parts: Sequence[Part], topics: Sequence[str], count_tokens: Callable[[str], int]
) -> Iterator[Node]:
    at = 0
    for part, topic in zip(parts, topics, strict=True):
        if part.start > at:
            yield Span(text[at : part.start])
        body = text[part.start : part.end]
        yield Chunk(topic, max(10, -(-count_tokens(body) // 10) * 10), body)
        at = part.end
    if at < len(text):
        yield Span(text[at:])


def _sections(layout: Sequence[Block]) -> list[tuple[Block | None, list[Block]]]:
    """Return each heading with the blocks below it; None heads what stands before the first."""
    sections: list[tuple[Block | None, list[Block]]] = [(None, [])]
    for block in layout:
        if block.kind == "heading":
            sections.append((block, []))
        else:
            sections[-1][1].append(block)
    return sections


def _section_parts(text: str, heading: Block, body: Sequence[Block], *, closing: bool) -> list[Part]:
    """Return the section's body as one part, or its items and paragraphs if it is long."""
    title = text[heading.body : heading.end].strip()
    if not body or _CLOSING.match(title) or re.match(r"\W*introduction", title, re.I):
        return []
    inner = _loose_parts(text, body, opening=False, closing=closing, lists=True)
    inner = [part for part in inner if _words(text[part.start : part.end]) >= MIN_WORDS]
    whole = _part(text, body[0].body, body[-1].end, title)
    long = _words(text[whole.start : whole.end]) > LONG_SECTION_WORDS
    if len(inner) > 1 and (long or body[-1].kind == "item") or any(block.kind == "code" for block in body):
        return inner
    return [whole]


def _loose_parts(
    text: str, body: Sequence[Block], *, opening: bool, closing: bool, lists: bool
) -> Iterator[Part]:
    """Yield the parts of blocks that stand under one heading or under none."""
    for kind, run in groupby(enumerate(body), key=lambda pair: pair[1].kind):
        group = list(run)
        if kind == "item":
            yield from _list_parts(text, [block for _, block in group])
        for index, block in group if kind == "text" else []:
            first, last = opening and index == 0, closing and index == len(body) - 1
            if not _introduces(text, body[index : index + 2]):
                yield from _paragraph_parts(text, block, first=first, last=last and len(body) > 1, lists=lists, more=len(body) > 1)


def _list_parts(text: str, items: Sequence[Block]) -> Iterator[Part]:
    """Yield the items of one list that are long enough, unless they are steps."""
    parts = [part for item in items for part in _item_parts(text, item)]
    if is_procedure([text[part.start : part.end] for part in parts]):
        return
    yield from (part for part in parts if _words(text[part.start : part.end]) >= MIN_WORDS)


def _introduces(text: str, pair: Sequence[Block]) -> bool:
    """Is the first block a paragraph that only leads to the list or code behind it?"""
    kinds = [block.kind for block in pair]
    short = _words(text[pair[0].body : pair[0].end]) < LEAD_IN_WORDS
    return short and kinds[0] == "text" and kinds[1:] in (["item"], ["code"], ["table"])


def _item_parts(text: str, block: Block) -> list[Part]:
    """Return an item as one part, or its sub-items if it is long."""
    whole = _part(text, block.body, block.end, _title(text[block.body : block.end]))
    if _words(text[whole.start : whole.end]) > LONG_ITEM_WORDS:
        inner = [part for sub in blocks(block.lines[1:], text) if sub.kind == "item" for part in _item_parts(text, sub)]
        inner = [part for part in inner if _words(text[part.start : part.end]) >= MIN_WORDS]
        if len(inner) > 1:
            return inner
    return [whole]


def _paragraph_parts(text: str, block: Block, *, first: bool, last: bool, lists: bool, more: bool) -> list[Part]:
    body = text[block.body : block.end].rstrip()
    if body.endswith(":") or (last and _CLOSING.match(body)) or (last and lists):
        return []
    if not first and _words(body) <= LONG_PARAGRAPH_WORDS:
        return [_part(text, block.body, block.end, None)]
    if first and (lists or (more and _words(body) <= OPENING_WORDS)):
        return []
    return list(_sentence_parts(text, block.body, block.end, skip_first=first))


def _sentence_parts(text: str, start: int, end: int, *, skip_first: bool) -> Iterator[Part]:
    """Yield runs of sentences; one that leans on the sentence before it stays in its run."""
    runs: list[tuple[int, int]] = []
    for left, right in _sentences(text, start, end):
        if runs and _joins(text[runs[-1][0] : runs[-1][1]], text[left:right]):
            runs[-1] = (runs[-1][0], right)
        else:
            runs.append((left, right))
    for left, right in runs[1:] if skip_first else runs:
        if not _CLOSING.match(text[left:right]) or right < end:
            yield _part(text, left, right, None)


def _joins(run: str, sentence: str) -> bool:
    """Does `sentence` belong to the run of sentences before it?"""
    if _words(run) < RUN_WORDS or _LEANS_BACK.match(sentence): return True
    a={stem_of(w) for w in words(run)}-STOP; b={stem_of(w) for w in words(sentence)}-STOP
    return len(a&b)>=OVERLAP and _words(run)+_words(sentence)<=STRETCH


def _sentences(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    left = start
    for gap in _SENTENCE.finditer(text, start, end):
        if not _ABBREVIATION.search(text[left : gap.start()]):
            yield left, gap.end()
            left = gap.end()
    if left < end:
        yield left, end


def _part(text: str, start: int, end: int, title: str | None) -> Part:
    """Return the part between `start` and `end` without white space at its edges."""
    body = text[start:end]
    start += len(body) - len(body.lstrip())
    return Part(start, max(start, start + len(body.strip())), title)


def _title(item: str) -> str | None:
    """Return the title that an item gives itself: bold, before a colon, a dash or a line break."""
    for pattern in _TITLES:
        if found := pattern.match(item):
            return found["title"]
    return None


def _words(text: str) -> int:
    return len(text.split())

