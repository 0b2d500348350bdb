r"""The text form as events: the whole vocabulary of the language, one class a tag.

`pos` is the index of an event's first source character, escapes included; error messages and golden
files refer to it. Reading undoes the escapes: of k backslashes before a tag, k // 2 remain, and the
tag is text if k is odd. Backslashes elsewhere stay as they are.
"""

import re
from dataclasses import dataclass

DEFAULT_TOKENS = 50
"""The promised length, in tokens, of a promise without a readable `tokens`."""

MAX_PROMISE_CHARS = 250
"""Characters between `<promise ` and `>`; a longer promise is text."""

ATTEMPT = re.compile(rf"<(?:promise [^<>]{{0,{MAX_PROMISE_CHARS}}}|async|/async|sync/)>")
"""A tag, valid or not. Two matches never overlap: a match has no `<` after its first character."""

_WITH_BACKSLASHES = re.compile(rf"(?<!\\)(\\*)({ATTEMPT.pattern})")
_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Text:
    """Answer text, escapes undone. Two such events never follow each other."""

    pos: int
    text: str


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise as written, `source`.

    Of an attribute given twice the first counts. `topic` is None if it is missing, `tokens` also if
    it is no number.
    """

    pos: int
    topic: str | None
    tokens: int | None
    source: str


@dataclass(frozen=True, slots=True)
class AsyncOpen:
    """`<async>`: the promised chunk begins."""

    pos: int
    source: str = "<async>"


@dataclass(frozen=True, slots=True)
class AsyncClose:
    """`</async>`: the chunk is finished."""

    pos: int
    source: str = "</async>"


@dataclass(frozen=True, slots=True)
class Sync:
    """`<sync/>`: wait for every chunk promised so far, and see them from here on."""

    pos: int
    source: str = "<sync/>"


TagEvent = Text | Promise | AsyncOpen | AsyncClose | Sync


def parse(text: str) -> list[TagEvent]:
    """Return the events of a complete text. Any text is accepted."""
    events: list[TagEvent] = []
    span = ""  # the text since the last tag, escapes undone
    span_start = 0
    read_chars = 0
    for attempt in _WITH_BACKSLASHES.finditer(text):
        backslashes, source = attempt.groups()
        span += text[read_chars : attempt.start()] + "\\" * (len(backslashes) // 2)
        read_chars = attempt.end()
        if len(backslashes) % 2:
            span += source
            continue
        if span:
            events.append(Text(span_start, span))
        events.append(_tag(attempt.start(2), source))
        span = ""
        span_start = read_chars
    span += text[read_chars:]
    if span:
        events.append(Text(span_start, span))
    return events


def _tag(pos: int, source: str) -> TagEvent:
    match source:
        case "<async>":
            return AsyncOpen(pos)
        case "</async>":
            return AsyncClose(pos)
        case "<sync/>":
            return Sync(pos)
    first_values = dict(reversed(attributes(source)))  # of a doubled attribute the first one counts
    tokens = first_values.get("tokens", "")
    length = int(tokens) if _NUMBER.fullmatch(tokens) else None
    return Promise(pos, first_values.get("topic"), length, source)


def attributes(source: str) -> list[tuple[str, str]]:
    """Return the name and value of every `name="value"` of a promise tag, in order."""
    return _ATTRIBUTE.findall(source)


def promise_tag(topic: str | None, tokens: int) -> str:
    """Return the one canonical spelling of a promise."""
    if topic is None:
        return f'<promise tokens="{tokens}"/>'
    return f'<promise topic="{topic}" tokens="{tokens}"/>'


def escape(text: str, *, before_tag: bool) -> str:
    r"""Return the text form of `text`: n backslashes before a literal tag become 2n + 1.

    With `before_tag` a real tag follows, and the n backslashes at the end become 2n.
    """
    escaped = _WITH_BACKSLASHES.sub(r"\1\1\\\2", text)
    if before_tag:
        final_backslashes = len(text) - len(text.rstrip("\\"))
        escaped += "\\" * final_backslashes
    return escaped


def has_escape(text: str) -> bool:
    """Does `text` hold an escaped tag?"""
    return any(len(attempt[1]) % 2 for attempt in _WITH_BACKSLASHES.finditer(text))
