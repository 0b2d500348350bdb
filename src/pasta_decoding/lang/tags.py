r"""The text form as events: the whole vocabulary of the language, one class a tag.

`pos` is the index of an event's first source character, escapes included; error messages and golden
files refer to it. Reading undoes the escapes: of k backslashes before an attempt at a tag k // 2
remain, and if k is odd the tag is text. Backslashes elsewhere stay as they are.
"""

import re
from dataclasses import dataclass

DEFAULT_TOKENS = 50
"""The length of a chunk, in tokens, whose promise has no readable length."""

MAX_PROMISE_CHARS = 250
"""Characters between `<promise ` and `>`; with more of them it is text."""

ATTEMPT = re.compile(rf"<(?:promise [^<>]{{0,{MAX_PROMISE_CHARS}}}|async|/async|sync/)>")
"""An attempt at a tag. Two attempts never overlap: neither holds a `<` but its first."""

_WITH_BACKSLASHES = re.compile(rf"(?<!\\)(\\*)({ATTEMPT.pattern})")
_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Text:
    """Answer text, escapes undone; no two are neighbours."""

    pos: int
    text: str


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise as written: the first of doubled attributes, None for what cannot be read."""

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
        escaped_backslashes, is_literal = divmod(len(backslashes), 2)
        span += text[read_chars : attempt.start()] + "\\" * escaped_backslashes
        read_chars = attempt.end()
        if is_literal:
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
    """Return every `name="value"` of a promise tag in order; what has another form is skipped."""
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
    """Does the text hold an attempt at a tag that a backslash makes text?"""
    return any(len(attempt[1]) % 2 for attempt in _WITH_BACKSLASHES.finditer(text))
