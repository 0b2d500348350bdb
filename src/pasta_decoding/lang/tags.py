r"""The text form as events: the whole vocabulary of the language, one class a tag.

`pos` is the index of an event's first source character, escapes included; error messages and golden
files refer to it. Reading undoes the escapes: of k backslashes before an attempt at a tag k // 2
remain, and if k is odd the tag is text. Backslashes elsewhere stay as they are.
"""

import re
from dataclasses import dataclass

DEFAULT_TOKENS = 50
"""The length of a chunk whose promise does not say one that can be read."""

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
    """Return the events of a whole text, whatever it holds."""
    events: list[TagEvent] = []
    said, begin, done = "", 0, 0  # the text since the last tag, where that ended, and what is read
    for found in _WITH_BACKSLASHES.finditer(text):
        backslashes, source = found.groups()
        kept, literal = divmod(len(backslashes), 2)
        said += text[done : found.start()] + "\\" * kept + (source if literal else "")
        done = found.end()
        if not literal:
            events += [Text(begin, said)] if said else []
            events.append(_tag(found.start(2), source))
            said, begin = "", done
    said += text[done:]
    return [*events, Text(begin, said)] if said else events


def _tag(pos: int, source: str) -> TagEvent:
    match source:
        case "<async>":
            return AsyncOpen(pos)
        case "</async>":
            return AsyncClose(pos)
        case "<sync/>":
            return Sync(pos)
    first = dict(reversed(attributes(source)))
    tokens = first.get("tokens", "")
    length = int(tokens) if _NUMBER.fullmatch(tokens) else None
    return Promise(pos, first.get("topic"), length, source)


def attributes(source: str) -> list[tuple[str, str]]:
    """Return every `name="value"` of a promise tag in order; what has another form is skipped."""
    return _ATTRIBUTE.findall(source)


def promise_tag(topic: str | None, tokens: int) -> str:
    """Return the one canonical spelling of a promise."""
    about = "" if topic is None else f'topic="{topic}" '
    return f'<promise {about}tokens="{tokens}"/>'


def escape(text: str, *, before_tag: bool) -> str:
    r"""Return the text form of `text`: n backslashes before a literal tag become 2n + 1.

    With `before_tag` a real tag follows, and the n backslashes at the end become 2n.
    """
    escaped = _WITH_BACKSLASHES.sub(r"\1\1\\\2", text)
    return escaped + "\\" * (len(text) - len(text.rstrip("\\"))) if before_tag else escaped


def has_escape(text: str) -> bool:
    return any(len(found[1]) % 2 for found in _WITH_BACKSLASHES.finditer(text))
