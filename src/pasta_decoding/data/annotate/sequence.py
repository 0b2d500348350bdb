"""Responses that are one thread by nature: stories, verse, dialogue, letters, derivations."""

from __future__ import annotations

import re
from collections import Counter

PROCEDURE_SHARE = 0.5  # of a list's items, that must follow from others
TALE_PERSONS = 0.05  # of a tale's words, that stand for persons
TALE_PAST = 0.05  # and that are in the past tense

_STEP = re.compile(r"^[^\w\n]*step \d", re.I | re.M)
_TURN = re.compile(r"[\s*_]*([A-Z][\w .]{0,20}:|[A-Z][A-Z ]{2,30}(?=\W*\(|\W*$))")
_LETTER = re.compile(r"\W*(?:(?:Dear|Hi|Hello)\b[^.!?\n]{0,60},\s*$|Subject:|To whom)", re.I | re.M)
_TALE = re.compile(
    r"\W*(?:once upon a time|fade in|scene)\b|(?:^|.*\n\W*)(?:int|ext)\. |\W*(?:chapter|act) \w+\b",
    re.I,
)
_QUOTE = re.compile(r"[\"“][^\"”\n]{4,400}[,.!?—-][\"”]")
_MATH = re.compile(r"^[^\n]*[=≈][ \t]*[-\d(\\a-z√][^\n]*$", re.M)
_FOLLOWS = re.compile(
    r"^\W*(?:next|then|now|repeat|continue|once|after|finally|when|while|meanwhile|add|stir|bake|serve|place"
    r"|preheat)\b"
    r"|\b(?:is done|until|minutes)\b",
    re.I,
)
_NARRATION = re.compile(r"\b(?:he|she|him|her|his|hers|i|me|my|we|us|our|they|them)\b", re.I)
_PAST = re.compile(r"\b(?:was|were|had|said|felt|knew|came|went|looked|\w{3,}ed)\b", re.I)
_MARKED = re.compile(r"^[ \t]*(?:#{1,6}\s|[-*•]\s|\d{1,3}[.)]\s|\*\*|\|)", re.M)


def is_sequence(text: str) -> bool:
    """Tell whether no part of the text can be written without the ones before it."""
    if not (size := len(text.split())):
        return True
    lines = [line for line in text.split("\n") if line.strip()]
    if _is_talk(lines) or _LETTER.match(text) or _TALE.match(text) or len(_STEP.findall(text)) >= 2:
        return True
    if len(_MATH.findall(text)) >= max(3, len(lines) / 3):
        return True
    marked = len(_MARKED.findall(text)) / len(lines)
    return marked < 0.2 and (_is_verse(lines, size) or _is_tale(text, size))


def is_procedure(items: list[str]) -> bool:
    """Tell whether the items of a list are steps that build on the ones before them."""
    if len(items) < 3:
        return False
    return sum(bool(_FOLLOWS.search(item)) for item in items) >= PROCEDURE_SHARE * len(items)


def _is_verse(lines: list[str], size: int) -> bool:
    return len(lines) >= 6 and size / len(lines) < 9


def _is_talk(lines: list[str]) -> bool:
    """Tell whether at least two speakers take turns."""
    turns = Counter(turn[1] for line in lines if (turn := _TURN.match(line)))
    speakers = [decoder for decoder, count in turns.items() if count >= 2]
    return len(speakers) >= 2 and sum(turns[decoder] for decoder in speakers) > len(lines) / 3


def _is_tale(text: str, size: int) -> bool:
    """Tell whether persons act in the past tense here, or speak a lot."""
    persons = len(_NARRATION.findall(text)) / size
    told = persons > TALE_PERSONS and len(_PAST.findall(text)) / size > TALE_PAST
    return size > 60 and (told or (persons > 0.03 and len(_QUOTE.findall(text)) >= 4))
