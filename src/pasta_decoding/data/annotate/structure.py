"""Find the parts of a plain response by rule: what its layout sets side by side becomes chunks.

List items, sections under headings, and else paragraphs behind the opening become chunks; of a
lone paragraph, runs of sentences. Stories, verse, dialogue, code, tables, steps, openings and
closings stay in the main thread. The limits were set on responses that a careful reader had
annotated. Every character offset counts from the start of the response.
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
RUN_WORDS = 9  # a run of sentences with fewer takes the next one in
OPENING_WORDS = 60  # an opening paragraph with fewer is not divided
LONG_WORDS = 100  # another paragraph with fewer is not divided
PARAGRAPH_WORDS = 10  # a line that has them, and ends with a sentence, is a paragraph

# Each is matched from a line's first character that is not white space to its last.
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
    """Lines that belong together, `[start, end)`; an item holds its sub-items.

    body: where the text begins, behind marker or hashes.
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
    """Return what stands under a heading as one part, or its items and paragraphs."""
    title = text[layout[heading].body : layout[heading].end].strip()
    body = layout[heading + 1 : stop]
    if not body or _CLOSING.match(title):
        return []
    whole = part_of(text, body[0].body, body[-1].end, title)
    inner = _inner_parts(text, layout, range(heading + 1, stop))
    kinds = {block.kind for block in body}
    opens = heading == 0 and body[0].kind == "text"
    divided = "code" in kinds or ("item" in kinds and len(inner) > 1)
    if opens or divided or text[: whole.end].endswith(":"):
        return inner
    return [whole] if _words(text, whole) >= MIN_WORDS else []


def _inner_parts(text: str, layout: Sequence[Block], places: range) -> list[Part]:
    """Return the items and paragraphs at some places of the layout that are long enough."""
    parts: list[Part] = []
    for kind, run in groupby(places, key=lambda place: layout[place].kind):
        if kind == "item":
            items = [_titled(text, layout[place]) for place in run]
            if not is_procedure([text[one.start : one.end] for one in items]):
                parts += items
        elif kind == "text":
            parts += [part for place in run for part in _paragraph_parts(text, layout, place)]
    return [part for part in parts if _words(text, part) >= MIN_WORDS]


def _paragraph_parts(text: str, layout: Sequence[Block], place: int) -> list[Part]:
    """Return a paragraph as one part, its runs of sentences, or nothing if it opens or closes."""
    whole = _titled(text, layout[place])
    words = _words(text, whole)
    prose = all(block.kind not in {"item", "heading"} for block in layout)
    headed = place > 0 and layout[place - 1].kind == "heading"
    after = layout[place + 1].kind if place + 1 < len(layout) else None
    if text[: whole.end].endswith(":") or after in {"item", "code", "table"}:
        return []
    if place == 0 or (place == 1 and headed):
        divided = prose and (after is None or words > OPENING_WORDS)
        return list(_sentence_runs(text, whole))[1:] if divided else []
    if after is None and not headed and (not prose or _CLOSING.match(text, whole.start)):
        return []
    return list(_sentence_runs(text, whole)) if words > LONG_WORDS else [whole]


def _sentence_runs(text: str, whole: Part) -> Iterator[Part]:
    """Yield runs of sentences; one that leans on the sentence before it stays in its run."""
    runs: list[Part] = []
    for left, right in sentences(text, whole.start, whole.end):
        leans = _LEANS_BACK.match(text, left) is not None
        if runs and (leans or _words(text, runs[-1]) < RUN_WORDS):
            runs[-1] = part_of(text, runs[-1].start, right)
        else:
            runs.append(part_of(text, left, right))
    yield from (run for run in runs if run.end < whole.end or not _CLOSING.match(text, run.start))


def sentences(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the sentences of `text[start:end]` begin and end, white space behind included."""
    left = start
    for gap in _SENTENCE.finditer(text, start, end):
        if not _ABBREVIATION.search(text[max(left, gap.start() - 8) : gap.start()]):
            yield left, gap.end()
            left = gap.end()
    if left < end:
        yield left, end


def part_of(text: str, start: int, end: int, title: str | None = None) -> Part:
    """Return the part between `start` and `end` without white space at its edges."""
    body = text[start:end]
    start += len(body) - len(body.lstrip())
    return Part(start, start + len(body.strip()), title)


def _titled(text: str, block: Block) -> Part:
    body = text[block.body : block.end]
    titles = (found["title"] for pattern in _TITLES if (found := pattern.match(body)))
    return part_of(text, block.body, block.end, next(titles, None))


def _words(text: str, part: Part) -> int:
    return len(text[part.start : part.end].split())


def outline(text: str) -> list[Block]:
    found: list[Block] = []
    gap = False
    for line in _lines(text):
        if line.kind != "blank":
            if found and _continues(text, found[-1], line, gap=gap):
                found[-1] = replace(found[-1], end=line.end)
            else:
                found.append(line)
        gap = line.kind == "blank"
    return found


def _lines(text: str) -> Iterator[Block]:
    start, in_code = 0, False
    for raw in text.split("\n"):
        fence = raw.lstrip().startswith(("```", "~~~"))
        line = _line(raw, start)
        yield replace(line, kind="code") if in_code or fence else line
        in_code ^= fence
        start += len(raw) + 1


def _line(raw: str, start: int) -> Block:
    shown, end = raw.strip(), start + len(raw)
    indent = len(raw) - len(raw.lstrip())
    body = start + indent
    if not shown:
        return Block("blank", start, end, end)
    if _TABLE.match(shown):
        return Block("table", start, body, end, indent)
    if item := _ITEM.match(shown):
        return Block("item", start, body + item.end(), end, indent, item["number"] is not None)
    if heading := _HEADING.match(shown):
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
    before = text[text.rfind("\n", 0, block.end) + 1 : block.end].rstrip()
    return len(before.split()) < PARAGRAPH_WORDS or not _PARAGRAPH_END.search(before)


def is_sequence(text: str) -> bool:
    """Tell whether no part of the text can be written without the ones before it."""
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
    """Tell whether half of a list's items are steps that build on the ones before them."""
    return len(items) > 2 and 2 * sum(bool(_FOLLOWS.search(one)) for one in items) >= len(items)


def _is_talk(lines: list[str]) -> bool:
    turns = Counter(turn[1] for line in lines if (turn := _TURN.match(line)))
    of_speakers = [count for count in turns.values() if count >= 2]
    return len(of_speakers) >= 2 and sum(of_speakers) > len(lines) / 3


def _is_tale(text: str, words: int) -> bool:
    """Tell whether persons act in the past tense: each is one word of twenty."""
    return words > 60 and all(
        20 * len(pattern.findall(text)) > words for pattern in (_NARRATION, _PAST)
    )
