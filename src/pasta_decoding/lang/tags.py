"""What the parser emits: the whole vocabulary of the language, one class a tag.

`pos` is the index of the event's first source character (escapes included), counted from
0 over everything fed so far. Error messages and golden files refer to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_TOKENS = 50
"""The length of a chunk whose promise does not say one that can be read."""

MAX_PROMISE_CHARS = 250
"""Characters between `<promise ` and `>`. It bounds what a streaming reader must hold back."""

ATTEMPT = re.compile(rf"<(?:promise [^<>]{{0,{MAX_PROMISE_CHARS}}}|async|/async|sync/)>")
"""An attempt at a tag. Two attempts never overlap: neither holds a `<` but its first."""

_ESCAPED = re.compile(rf"(?<!\\)(?:\\\\)*\\{ATTEMPT.pattern}")
_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class Text:
    """Answer text, escapes undone. It may be cut anywhere; only the sum of neighbours counts."""

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


Event = Text | Promise | AsyncOpen | AsyncClose | Sync


def tag_event(pos: int, source: str) -> Promise | AsyncOpen | AsyncClose | Sync:
    """Return the event of a tag: `source` is one whole match of `ATTEMPT`."""
    match source:
        case "<async>":
            return AsyncOpen(pos)
        case "</async>":
            return AsyncClose(pos)
        case "<sync/>":
            return Sync(pos)
        case _:
            return _promise(pos, source)


def attributes(source: str) -> list[tuple[str, str]]:
    """Return every `name="value"` of a promise tag in order; what has another form is skipped."""
    return _ATTRIBUTE.findall(source)


def _promise(pos: int, source: str) -> Promise:
    first = dict(reversed(attributes(source)))
    tokens = first.get("tokens", "")
    return Promise(
        pos,
        first.get("topic"),
        int(tokens) if _NUMBER.fullmatch(tokens) else None,
        source,
    )


def promise_tag(topic: str | None, tokens: int) -> str:
    """Return the one canonical spelling of a promise."""
    about = "" if topic is None else f'topic="{topic}" '
    return f'<promise {about}tokens="{tokens}"/>'


def escape(text: str, *, before_tag: bool) -> str:
    r"""Return the text form of `text`: n backslashes before a literal tag become 2n + 1.

    With `before_tag` a real tag follows, and the n backslashes at the end become 2n.
    """
    pieces: list[str] = []
    done = 0
    for attempt in ATTEMPT.finditer(text):
        pieces += [_doubled_end(text[done : attempt.start()]), "\\", attempt.group()]
        done = attempt.end()
    rest = text[done:]
    return "".join(pieces) + (_doubled_end(rest) if before_tag else rest)


def has_escape(text: str) -> bool:
    """Does a text form hold a tag that is text?"""
    return _ESCAPED.search(text) is not None


def _doubled_end(text: str) -> str:
    return text + "\\" * (len(text) - len(text.rstrip("\\")))
