"""Responses that are one thread by nature: stories, verse, dialogue, letters, derivations."""

from __future__ import annotations

import re
from collections import Counter

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
    """Tell whether at least two speakers take turns."""
    turns = Counter(turn[1] for line in lines if (turn := _TURN.match(line)))
    of_speakers = [count for count in turns.values() if count >= 2]
    return len(of_speakers) >= 2 and sum(of_speakers) > len(lines) / 3


def _is_tale(text: str, words: int) -> bool:
    """Tell whether persons act in the past tense: each is one word of twenty."""
    return words > 60 and all(
        20 * len(pattern.findall(text)) > words for pattern in (_NARRATION, _PAST)
    )
