"""Find the parts of a plain response by rule: what its layout sets side by side becomes chunks.

List items, sections under headings, and else paragraphs or sentences behind the opening
become chunks of about 12 to 120 words. Stories, verse, dialogue, code, tables, steps,
openings and closings stay in the main thread. The limits below were set on responses that
a careful reader had annotated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pasta_decoding.data.annotate.base import Part
from pasta_decoding.data.annotate.outline import Block, blocks, outline
from pasta_decoding.data.annotate.sequence import is_procedure, is_sequence
from pasta_decoding.data.annotate.topics import TopicPart, name_parts

# In words. A part with fewer stays in the main thread: a promise would cost more than it saves.
MIN_WORDS = 12
RUN_WORDS = 9  # a run of sentences with fewer takes the next one in
OPENING_WORDS = 60  # an opening paragraph with fewer is not divided
LEAD_IN_WORDS = 35  # a paragraph with fewer in front of a list or code introduces it
LONG_PARAGRAPH_WORDS = 100  # longer ones are divided into runs of sentences,
LONG_SECTION_WORDS = 110  # into items and paragraphs,
LONG_ITEM_WORDS = 140  # and into sub-items

_SENTENCE = re.compile(r"(?<=[.!?])[\"'\u201d\u2019)]*\s+(?=[\"'\u201c\u2018(\[*]*[A-Z0-9])")
ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Za-z]|Dr|Mr|Mrs|Ms|St|vs|etc|No|Inc|Jr|Prof|e\.g|i\.e|U\.S)|^\W*\d{1,3})\.$"
)
LEANS_BACK = re.compile(
    r"(?:this|these|those|that|such|however|but|yet|for (?:example|instance)|as a result|thus|then"
    r"|hence|therefore|otherwise|in other words|in fact|instead|consequently|because of this|so"
    r"|here|again|note)\b",
    re.I,
)
_CONCLUDES = re.compile(r"(?:therefore|thus|as a result|so|hence)\b", re.I)
CLOSING = re.compile(
    r"\W*(?:in (?:conclusion|summary|short|closing|essence|the end)|to (?:sum|conclude|summarize)"
    r"|overall|ultimately|all in all|conclusion|therefore|thus|so,|that being said"
    r"|with th(?:is|ese|e right)|these are|note|remember"
    r"|it(?:.s| is) (?:also )?(?:important|worth|essential|crucial)"
    r"|by (?:following|using|taking|incorporating|understanding|doing|implementing)"
    r"|if you|i hope|please|let me|feel free|thank|don.t"
    r"|(?:additional |further )?(?:references?|reading|resources|sources?)\b)",
    re.I,
)
_INTRODUCTION = re.compile(r"\W*introduction", re.I)
LABELS = (
    re.compile(r"(?:\*\*|__)(?P<title>[^*\n]{2,80}?)(?:\*\*|__)"),
    re.compile(r"(?P<title>[^\s:.!?,(][^:.!?,\n]{1,50}):(?=\s)"),
)
_TITLES = (
    LABELS[0],
    re.compile(r"(?P<title>[^\s:.!?(][^:.!?\n]{1,60}):(?=\s)"),
    re.compile(r"(?P<title>[^\s:.!?(][^:.!?\n]{1,50}?)\s+[-\u2013\u2014]\s"),
    re.compile(r"(?P<title>[^\s:.!?][^:.!?\n]{1,60})[.!?]?\s*\n"),
)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Blocks under one heading or under none, and where they stand in the response.

    opening, closing: they begin, end the response.
    plain: the response has neither headings nor items, so paragraphs are all there is.
    """

    body: tuple[Block, ...]
    opening: bool
    closing: bool
    plain: bool


def find_parts(response: str) -> list[Part]:
    """Return the parts of `response` that can be written side by side, each with its topic."""
    found = [] if is_sequence(response) else _parts_by_layout(response)
    return name_parts(response, found) if len(found) > 1 else []


def _parts_by_layout(response: str) -> list[TopicPart]:
    """Return the parts of a response that is no sequence, without topics."""
    layout = outline(response)
    plain = all(block.kind not in {"item", "heading"} for block in layout)
    parts: list[TopicPart] = []
    for heading, body in _sections(layout):
        opening = heading is None or heading is layout[0]
        closing = not body or body[-1] is layout[-1]
        stretch = _Stretch(tuple(body), opening, closing, plain)
        if heading is None:
            parts += _inner_parts(response, stretch)
        else:
            parts += _section_parts(response, heading, stretch)
    return parts


def _sections(layout: Sequence[Block]) -> list[tuple[Block | None, list[Block]]]:
    """Return each heading with the blocks below it; None heads what stands before the first."""
    sections: list[tuple[Block | None, list[Block]]] = [(None, [])]
    for block in layout:
        if block.kind == "heading":
            sections.append((block, []))
        else:
            sections[-1][1].append(block)
    return sections


def _section_parts(text: str, heading: Block, stretch: _Stretch) -> list[TopicPart]:
    """Return the section's body as one part, or its items and paragraphs if it is long."""
    title, body = text[heading.body : heading.end].strip(), stretch.body
    if not body or CLOSING.match(title) or _INTRODUCTION.match(title):
        return []
    inner = _inner_parts(text, stretch)
    whole = part_of(text, body[0].body, body[-1].end, title)
    words = _words(text, whole)
    starts = stretch.opening and body[0].kind == "text"
    code, listed = (any(block.kind == kind for block in body) for kind in ("code", "item"))
    many = len(inner) > 1 and (words > LONG_SECTION_WORDS or listed)
    if starts or code or many or text[: whole.end].endswith(":"):
        return inner
    return [whole] if words >= MIN_WORDS else []


def _inner_parts(text: str, stretch: _Stretch) -> list[TopicPart]:
    """Return the items, paragraphs and runs of sentences of a stretch that are long enough."""
    parts: list[TopicPart] = []
    items: list[TopicPart] = []
    for index, block in enumerate(stretch.body):
        if block.kind == "item":
            items += _item_parts(text, block)
            continue
        parts += _unless_steps(text, items)
        items = []
        if block.kind == "text":
            parts += _paragraph_parts(text, stretch, index)
    parts += _unless_steps(text, items)
    return [part for part in parts if _words(text, part) >= MIN_WORDS]


def _unless_steps(text: str, items: list[TopicPart]) -> list[TopicPart]:
    return [] if is_procedure([text[item.start : item.end] for item in items]) else items


def _item_parts(text: str, block: Block) -> list[TopicPart]:
    """Return an item as one part, or its sub-items if it is long."""
    whole = part_of(text, block.body, block.end, _title(text[block.body : block.end], _TITLES))
    if _words(text, whole) > LONG_ITEM_WORDS:
        subs = [sub for sub in blocks(block.lines[1:], text) if sub.kind == "item"]
        inner = [part_of(text, s.body, s.end, _title(text[s.body : s.end], _TITLES)) for s in subs]
        if sum(_words(text, part) >= MIN_WORDS for part in inner) > 1:
            return inner
    return [whole]


def _paragraph_parts(text: str, stretch: _Stretch, index: int) -> list[TopicPart]:
    """Return a paragraph as one part, its runs of sentences, or nothing if it opens or closes."""
    block, alone = stretch.body[index], len(stretch.body) == 1
    first = stretch.opening and index == 0
    last = stretch.closing and index == len(stretch.body) - 1 and not alone
    whole = part_of(text, block.body, block.end, _title(text[block.body : block.end], LABELS))
    words = _words(text, whole)
    if (last and not stretch.plain) or _leads_or_ends(text, stretch.body, index, last=last):
        return []
    if not first:
        divided = words > LONG_PARAGRAPH_WORDS
        return list(_sentence_runs(text, whole)) if divided else [whole]
    if stretch.plain and (alone or words > OPENING_WORDS):
        return list(_sentence_runs(text, whole))[1:]
    return []


def _leads_or_ends(text: str, body: Sequence[Block], index: int, *, last: bool) -> bool:
    """Tell whether the paragraph introduces what follows it or concludes what goes before."""
    paragraph = text[body[index].body : body[index].end].rstrip()
    leads = any(after.kind in {"item", "code", "table"} for after in body[index + 1 : index + 2])
    if paragraph.endswith(":") or (last and CLOSING.match(paragraph)):
        return True
    short = len(paragraph.split()) < LEAD_IN_WORDS
    return (short and leads) or (index > 0 and bool(_CONCLUDES.match(paragraph)))


def _sentence_runs(text: str, whole: TopicPart) -> Iterator[TopicPart]:
    """Yield runs of sentences; one that leans on the sentence before it stays in its run."""
    runs: list[tuple[int, int]] = []
    for left, right in sentences(text, whole.start, whole.end):
        leans = LEANS_BACK.match(text, left) is not None
        if runs and (leans or len(text[slice(*runs[-1])].split()) < RUN_WORDS):
            runs[-1] = (runs[-1][0], right)
        else:
            runs.append((left, right))
    for left, right in runs:
        if right < whole.end or not CLOSING.match(text, left):
            yield part_of(text, left, right)


def sentences(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the sentences of `text[start:end]` begin and end, white space behind included."""
    left = start
    for gap in _SENTENCE.finditer(text, start, end):
        if not ABBREVIATION.search(text[max(left, gap.start() - 8) : gap.start()]):
            yield left, gap.end()
            left = gap.end()
    if left < end:
        yield left, end


def part_of(text: str, start: int, end: int, title: str | None = None) -> TopicPart:
    """Return the part between `start` and `end` without white space at its edges."""
    body = text[start:end]
    start += len(body) - len(body.lstrip())
    return TopicPart(start, start + len(body.strip()), title)


def _title(body: str, patterns: Iterable[re.Pattern[str]]) -> str | None:
    """Return the title a text gives itself: bold, before a colon, a dash or a line break."""
    return next((found["title"] for pattern in patterns if (found := pattern.match(body))), None)


def _words(text: str, part: TopicPart) -> int:
    return len(text[part.start : part.end].split())
