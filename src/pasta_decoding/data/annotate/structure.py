"""Finds the parts of a plain response by its layout: lists, sections, paragraphs and sentences.

List items and sections under headings become parts. In a response without these, the paragraphs
after the opening do. A response of one paragraph is divided into runs of sentences. Stories, verse,
dialogue, code, tables, steps, openings and closings stay in the main thread. The limits were set on
responses that a careful reader had annotated. Every character offset counts from the start of the
response.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from pasta_decoding.data.annotate.base import Part
from pasta_decoding.data.annotate.topics import name_parts

# In words. A part with fewer stays in the main thread: a promise would cost more than it saves.
MIN_WORDS = 12
RUN_WORDS = 9  # a run of sentences with fewer takes in the next sentence
OPENING_WORDS = 60  # an opening paragraph with fewer stays in the main thread
LONG_WORDS = 100  # another paragraph with fewer is one part
PARAGRAPH_WORDS = 10  # a line with fewer, or that does not end a sentence, goes on in the next line

# These patterns match a line without the white space at its edges.
_TABLE = re.compile(r"\|.*\|$|\+?[-=+|]{5,}$")
_LEAD_IN = r"(?!.*\b(?:are|is|include|includes|following|follows|these|here|can|how to)\b)"
_HEADING = re.compile(
    r"#{1,6}\s+(?=\S)|(?=(?:\*\*|__)[^*_]{1,80}(?:\*\*|__)\s?:?$|(?:Title|Headline): "
    rf"|{_LEAD_IN}[A-Z][^.!?:|]{{1,50}}:$)"
)
_ITEM = re.compile(
    r"(?:(?P<number>\d{1,3})[.)]|\(?[a-z]\)|[-*+\u2022\xb7\u2013\u25aa\u25e6])\s+(?=\S)"
)
_PARAGRAPH_END = re.compile(r"[.:!?][\"'\u201d\u2019)\]*]{0,4}$")

_SENTENCE = re.compile(r"(?<=[.!?])[\"'\u201d\u2019)]*\s+(?=[\"'\u201c\u2018(\[*]*[A-Z0-9])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Za-z]|Dr|Mr|Mrs|Ms|St|vs|etc|No|Inc|Jr|Prof|e\.g|i\.e|U\.S)|^\W*\d{1,3})\.$"
)
_LEANS_BACK = re.compile(
    r"(?:this|these|those|that|such|however|but|yet|for (?:example|instance)|as a result|thus|then"
    r"|hence|therefore|otherwise|in other words|in fact|instead|consequently|because of this|so"
    r"|here|again|note)\b",
    re.I,
)
_CLOSING = re.compile(
    r"\W*(?:in (?:conclusion|summary|short|closing|essence|the end)|to (?:sum|conclude|summarize)"
    r"|overall|ultimately|all in all|conclusion|therefore|thus|so,|that being said"
    r"|with th(?:is|ese|e right)|these are|note|remember"
    r"|it(?:.s| is) (?:also )?(?:important|worth|essential|crucial)"
    r"|by (?:following|using|taking|incorporating|understanding|doing|implementing)"
    r"|if you|i hope|please|let me|feel free|thank|don.t"
    r"|(?:additional |further )?(?:references?|reading|resources|sources?)\b)",
    re.I,
)
# The title that a text gives itself: bold, before a colon, before a dash.
_TITLES = (
    re.compile(r"(?:\*\*|__)(?P<title>[^*\n]{2,80}?)(?:\*\*|__)"),
    re.compile(r"(?P<title>[^\s:.!?(][^:.!?\n]{1,60}):(?=\s)"),
    re.compile(r"(?P<title>[^\s:.!?(][^:.!?\n]{1,50}?)\s+[-\u2013\u2014]\s"),
)

# Responses that are one thread by nature: stories, verse, dialogue, letters, derivations.
_STEP = re.compile(r"^[^\w\n]*step \d", re.I | re.M)
_TURN = re.compile(r"[\s*_]*([A-Z][\w .]{0,20}:|[A-Z][A-Z ]{2,30}(?=\W*\(|\W*$))")
_LETTER = re.compile(r"\W*(?:(?:Dear|Hi|Hello)\b[^.!?\n]{0,60},\s*$|Subject:|To whom)", re.I | re.M)
_TALE = re.compile(
    r"\W*(?:once upon a time|fade in|scene|chapter \w+|act \w+)\b|(?:^|.*\n\W*)(?:int|ext)\. ", re.I
)
_MATH = re.compile(r"^[^\n]*[=\u2248][ \t]*[-\d(\\a-z\u221a][^\n]*$", re.M)
_FOLLOWS = re.compile(
    r"^\W*(?:next|then|now|repeat|continue|once|after|finally|when|while|meanwhile|add|stir|bake|serve|place"
    r"|preheat)\b"
    r"|\b(?:is done|until|minutes)\b",
    re.I,
)
_NARRATION = re.compile(r"\b(?:he|she|him|her|his|hers|i|me|my|we|us|our|they|them)\b", re.I)
_PAST = re.compile(r"\b(?:was|were|had|said|felt|knew|came|went|looked|\w{3,}ed)\b", re.I)
_MARKED = re.compile(r"^[ \t]*(?:#{1,6}\s|[-*\u2022]\s|\d{1,3}[.)]\s|\*\*|\|)", re.M)


BlockKind = Literal["blank", "heading", "item", "code", "table", "text"]


@dataclass(frozen=True, slots=True)
class Block:
    """Lines that belong together: the characters `[start, end)`. An item includes its sub-items.

    body:   where the text begins, after the list marker or the hashes of a heading.
    indent: white space before the first line, in characters.
    """

    kind: BlockKind
    start: int
    body: int
    end: int
    indent: int = 0
    numbered: bool = False


def find_parts(response: str) -> list[Part]:
    """Return the parts of `response` that can be written side by side, each with its topic."""
    if is_sequence(response):
        return []
    layout = outline(response)
    headings = [index for index, block in enumerate(layout) if block.kind == "heading"]
    bounds = [*headings, len(layout)]
    parts = _inner_parts(response, layout, range(bounds[0]))
    for heading, stop in pairwise(bounds):
        parts += _section_parts(response, layout, heading, stop)
    return name_parts(response, parts) if len(parts) > 1 else []


def _section_parts(text: str, layout: Sequence[Block], heading: int, stop: int) -> list[Part]:
    """Return the section under a heading as one part, or as its items and paragraphs.

    heading, stop: indices of `layout`; the section ends before `stop`.
    """
    title = text[layout[heading].body : layout[heading].end].strip()
    body = layout[heading + 1 : stop]
    if not body or _CLOSING.match(title):
        return []
    section = part_of(text, body[0].body, body[-1].end, title)
    inner = _inner_parts(text, layout, range(heading + 1, stop))
    kinds = {block.kind for block in body}
    opens = heading == 0 and body[0].kind == "text"
    divided = "code" in kinds or ("item" in kinds and len(inner) > 1)
    if opens or divided or text[: section.end].endswith(":"):
        return inner
    return [section] if _words(text, section) >= MIN_WORDS else []


def _inner_parts(text: str, layout: Sequence[Block], indices: range) -> list[Part]:
    """Return the items and paragraphs at some indices of the layout that are long enough."""
    parts: list[Part] = []
    for kind, run in groupby(indices, key=lambda index: layout[index].kind):
        if kind == "item":
            items = [_titled(text, layout[index]) for index in run]
            if not is_procedure([text[item.start : item.end] for item in items]):
                parts += items
        elif kind == "text":
            for index in run:
                parts += _paragraph_parts(text, layout, index)
    return [part for part in parts if _words(text, part) >= MIN_WORDS]


def _paragraph_parts(text: str, layout: Sequence[Block], index: int) -> list[Part]:
    """Return a paragraph as one part or as runs of sentences.

    Openings, closings and paragraphs that introduce the next block stay in the main thread.
    """
    paragraph = _titled(text, layout[index])
    words = _words(text, paragraph)
    is_prose = all(block.kind not in {"item", "heading"} for block in layout)
    has_heading = index > 0 and layout[index - 1].kind == "heading"
    next_kind = layout[index + 1].kind if index + 1 < len(layout) else None
    if text[: paragraph.end].endswith(":") or next_kind in {"item", "code", "table"}:
        return []
    if index == 0 or (index == 1 and has_heading):
        if is_prose and (next_kind is None or words > OPENING_WORDS):
            return _sentence_runs(text, paragraph)[1:]
        return []
    is_last = next_kind is None and not has_heading
    if is_last and (not is_prose or _CLOSING.match(text, paragraph.start)):
        return []
    return _sentence_runs(text, paragraph) if words > LONG_WORDS else [paragraph]


def _sentence_runs(text: str, paragraph: Part) -> list[Part]:
    """Return runs of sentences without the closing. A sentence that leans back starts no run."""
    runs: list[Part] = []
    for start, end in sentences(text, paragraph.start, paragraph.end):
        leans_back = _LEANS_BACK.match(text, start) is not None
        if runs and (leans_back or _words(text, runs[-1]) < RUN_WORDS):
            runs[-1] = part_of(text, runs[-1].start, end)
        else:
            runs.append(part_of(text, start, end))
    if runs and runs[-1].end >= paragraph.end and _CLOSING.match(text, runs[-1].start):
        del runs[-1]
    return runs


def sentences(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each sentence in `text[start:end]`, with the white space after it."""
    sentence_start = start
    for gap in _SENTENCE.finditer(text, start, end):
        last_word = text[max(sentence_start, gap.start() - 8) : gap.start()]
        if not _ABBREVIATION.search(last_word):
            yield sentence_start, gap.end()
            sentence_start = gap.end()
    if sentence_start < end:
        yield sentence_start, end


def part_of(text: str, start: int, end: int, title: str | None = None) -> Part:
    """Return the part between `start` and `end` without white space at its edges."""
    body = text[start:end]
    start += len(body) - len(body.lstrip())
    return Part(start, start + len(body.strip()), title)


def _titled(text: str, block: Block) -> Part:
    body = text[block.body : block.end]
    for pattern in _TITLES:
        if match := pattern.match(body):
            return part_of(text, block.body, block.end, match["title"])
    return part_of(text, block.body, block.end)


def _words(text: str, part: Part) -> int:
    return len(text[part.start : part.end].split())


def outline(text: str) -> list[Block]:
    """Return the blocks of a text in order; blank lines belong to none."""
    blocks: list[Block] = []
    gap = False
    for line in _lines(text):
        if line.kind != "blank":
            if blocks and _continues(text, blocks[-1], line, gap=gap):
                blocks[-1] = replace(blocks[-1], end=line.end)
            else:
                blocks.append(line)
        gap = line.kind == "blank"
    return blocks


def _lines(text: str) -> Iterator[Block]:
    """Yield each line as a block; from one code fence to the next, all lines are code."""
    start = 0
    in_code = False
    for raw in text.split("\n"):
        is_fence = raw.lstrip().startswith(("```", "~~~"))
        line = _line(raw, start)
        yield replace(line, kind="code") if in_code or is_fence else line
        if is_fence:
            in_code = not in_code
        start += len(raw) + 1


def _line(raw: str, start: int) -> Block:
    stripped = raw.strip()
    end = start + len(raw)
    indent = len(raw) - len(raw.lstrip())
    body = start + indent
    if not stripped:
        return Block("blank", start, end, end)
    if _TABLE.match(stripped):
        return Block("table", start, body, end, indent)
    if item := _ITEM.match(stripped):
        return Block("item", start, body + item.end(), end, indent, item["number"] is not None)
    if heading := _HEADING.match(stripped):
        return Block("heading", start, body + heading.end(), end, indent)
    return Block("text", start, body, end, indent)


def _continues(text: str, block: Block, line: Block, *, gap: bool) -> bool:
    """Does a line belong to the block before it? `gap`: there is a blank line between them."""
    deeper = line.indent > block.indent
    if block.kind == "item":
        if line.kind == "item":
            return deeper or (block.numbered and not line.numbered)
        return deeper or (not gap and line.kind != "heading")
    if line.kind != block.kind or line.kind == "heading" or (gap and line.kind != "code"):
        return False
    if line.kind != "text":
        return True
    last_line = text[text.rfind("\n", 0, block.end) + 1 : block.end].rstrip()
    return len(last_line.split()) < PARAGRAPH_WORDS or not _PARAGRAPH_END.search(last_line)


def is_sequence(text: str) -> bool:
    """Tell whether every part of the text needs the parts before it."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return True
    if _is_talk(lines) or _LETTER.match(text) or _TALE.match(text) or len(_STEP.findall(text)) >= 2:
        return True
    if len(_MATH.findall(text)) >= max(3, len(lines) / 3):
        return True
    words = len(text.split())
    is_verse = len(lines) >= 6 and words < 9 * len(lines)
    return len(_MARKED.findall(text)) < 0.2 * len(lines) and (is_verse or _is_tale(text, words))


def is_procedure(items: list[str]) -> bool:
    """Tell whether half of a list's items are steps that build on earlier steps."""
    steps = [item for item in items if _FOLLOWS.search(item)]
    return len(items) > 2 and 2 * len(steps) >= len(items)


def _is_talk(lines: list[str]) -> bool:
    turns = Counter(turn[1] for line in lines if (turn := _TURN.match(line)))
    turns_per_speaker = [count for count in turns.values() if count >= 2]
    return len(turns_per_speaker) >= 2 and sum(turns_per_speaker) > len(lines) / 3


def _is_tale(text: str, words: int) -> bool:
    """Tell whether persons act in the past tense: both words of persons and verbs are frequent."""
    return words > 60 and all(
        20 * len(pattern.findall(text)) > words for pattern in (_NARRATION, _PAST)
    )
