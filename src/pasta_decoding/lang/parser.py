r"""Text form in, events out, without I/O.

The parser never raises, and how its input was cut never matters. One pass undoes the
escapes: of k backslashes before an attempt at a tag k // 2 remain, and if k is odd the tag is
text. Backslashes elsewhere stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from pasta_decoding.lang.tags import ATTEMPT, MAX_PROMISE_CHARS, Event, Text, tag_event

_PROMISE = "<promise "
_BEGINNINGS = ("<async>", "</async>", "<sync/>", _PROMISE)


def parse(text: str) -> list[Event]:
    """Return the events of a whole text, neighbouring `Text` merged."""
    parser = Parser()
    return merged([*parser.feed(text), *parser.finish()])


def merged(events: Iterable[Event]) -> list[Event]:
    """Return `events` with every run of `Text` as one: the form that no cutting changes."""
    out: list[Event] = []
    for _, group in groupby(events, key=lambda one: isinstance(one, Text)):
        run = list(group)
        texts = [one.text for one in run if isinstance(one, Text)]
        out += [Text(run[0].pos, "".join(texts))] if texts else run
    return out


class Parser:
    """Feed it text as it is decoded; it returns every event that is certain by then.

    It holds back what may still become a tag, at most 259 characters, and counts the
    backslashes before that: whether they are escapes depends on what follows.
    """

    def __init__(self) -> None:
        self._pos = 0
        self._slashes = 0
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        """Consume `text` and return the events that it completes, in order."""
        return self._read(self._held + text, final=False)

    def finish(self) -> list[Event]:
        """Consume the end of the stream. A half-written tag turns out to have been text."""
        return self._read(self._held, final=True)

    def _read(self, source: str, *, final: bool) -> list[Event]:
        events: list[Event] = []
        done = 0
        for attempt in ATTEMPT.finditer(source):
            events += self._decided(source[done : attempt.start()], attempt.group())
            done = attempt.end()
        return events + self._rest(source[done:], final=final)

    def _decided(self, before: str, tag: str) -> list[Event]:
        """Return the events of the text before an attempt and of the attempt itself."""
        before = "\\" * self._slashes + before
        body = before.rstrip("\\")
        kept, literal = divmod(len(before) - len(body), 2)
        text = body + "\\" * kept + (tag if literal else "")
        events: list[Event] = [Text(self._pos, text)] if text else []
        if not literal:
            events.append(tag_event(self._pos + len(before), tag))
        self._pos += len(before) + len(tag)
        self._slashes = 0
        return events

    def _rest(self, source: str, *, final: bool) -> list[Event]:
        """Release what is certain to be text, and hold the end that is not."""
        end = len(source) if final else _growing(source)
        body = source[:end] if final else source[:end].rstrip("\\")
        self._held = source[end:]
        text = "\\" * self._slashes + body if body or final else ""
        events: list[Event] = [Text(self._pos, text)] if text else []
        if text:
            self._pos += len(text)
            self._slashes = 0
        self._slashes += end - len(body)
        return events


def _growing(source: str) -> int:
    """Return where the text begins that could still grow into a tag (its end if there is none)."""
    start = source.rfind("<")
    tail = source[start:]
    if tail.startswith(_PROMISE):
        grows = len(tail) <= len(_PROMISE) + MAX_PROMISE_CHARS and ">" not in tail
    else:
        grows = start >= 0 and any(beginning.startswith(tail) for beginning in _BEGINNINGS)
    return start if grows else len(source)
