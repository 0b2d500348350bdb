"""Instructions that ask for what their responses do: hindsight relabelling.

What a program can verify of an answer (data/checks.py) it can also ask for. Zhang et al. 2023, "The
Wisdom of Hindsight Makes Language Models Better Instruction Followers", train on answers whose
instruction was rewritten to ask for what the answer does. Here one request, or two, is added to the
instruction; the response stays as it is and passes their checks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from pasta_decoding.data.checks import BULLET, Check, count_items, count_sentences, make_check
from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.tree import read, strip

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WORD = re.compile(r"(?<!\w)[a-z]{5,}(?!\w)")
# A marker begins a line, or a chunk that begins one; the tags of its promise may stand between.
_MARKER = re.compile(
    rf"((?:^|\n)(?:<promise [^>]*/>)?(?:<async>)?)(?:{BULLET}|(\d{{1,3}})[.)])(?= )"
)
MOST_ITEMS = 12
"""Longer lists are not asked for."""
# Counts and lengths speak of the same; so do lists and headings.
_FAMILIES = {
    "sentences": "length",
    "words": "length",
    "paragraphs": "length",
    "bullets": "form",
    "numbered": "form",
    "items": "form",
    "headings": "form",
    "bold": "form",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A sentence that asks for something, and the check of it."""

    sentence: str
    check: Check


Asking = Callable[[str, str, random.Random], Request | None]
"""From an instruction and its response: a request that the response meets, if it does."""


def requests_of(instruction: str, response: str, draw: random.Random) -> list[Request]:
    """Return what could be asked of a response that it does, a request a kind, in chance order.

    response: plain text.
    """
    found = [one for ask in _KINDS if (one := ask(instruction, response, draw)) is not None]
    draw.shuffle(found)
    return [one for one in found if one.check.passes(response)]


def relabelled(rows: Iterable[Row], most: int, draw: random.Random) -> Iterator[Row]:
    """Yield each row with up to `most` requests behind its instruction, none of them of one family.

    Rows of which nothing can be asked are left out. Ids get `-asked` behind them. A row's `checks`
    say what was asked, as data/asked.py reads them.
    """
    for row in rows:
        requests = requests_of(row.instruction, strip(read(row.response)), draw)
        chosen = _of_different_families(requests)[: draw.randint(1, most)]
        if chosen:
            asked = " ".join([row.instruction.rstrip(), *(one.sentence for one in chosen)])
            checks = [
                {"kind": one.check.kind, "arguments": dict(one.check.arguments)} for one in chosen
            ]
            yield replace(
                row,
                id=f"{row.id}-asked",
                instruction=asked,
                extra={**row.extra, "checks": checks},
            )


def with_twins(rows: Iterable[Row], draw: random.Random) -> Iterator[Row]:
    """Yield each row with a list twice: as it is, and with the other kind of list markers.

    Each asks for its own: so many bullets, or so many numbered items. What to do then depends on
    what is asked alone. Rows without such a list are left out. Ids get the kind behind them.
    """
    for row in rows:
        other = with_other_markers(row.response)
        for response in [] if other is None else [row.response, other]:
            text = strip(read(response))
            request = _bullets(row.instruction, text, draw) or _numbered(
                row.instruction, text, draw
            )
            if request is None or not request.check.passes(text):
                continue
            kind, arguments = request.check.kind, dict(request.check.arguments)
            yield replace(
                row,
                id=f"{row.id}-{kind}",
                instruction=f"{row.instruction.rstrip()} {request.sentence}",
                response=response,
                extra={**row.extra, "checks": [{"kind": kind, "arguments": arguments}]},
            )


def with_other_markers(response: str) -> str | None:
    """Return an annotated response with numbers for its bullets, or bullets for its numbers.

    None unless its items are of one kind and one level, and its numbers count from 1 throughout.
    """
    bullets, numbered = count_items(strip(read(response)))
    markers = list(_MARKER.finditer(response))
    if not markers or min(bullets, numbered) or len(markers) != bullets + numbered:
        return None
    if numbered and [int(one[2]) for one in markers] != list(range(1, numbered + 1)):
        return None
    number = count(1)
    changed = _MARKER.sub(
        lambda one: f"{one[1]}-" if one[2] else f"{one[1]}{next(number)}.", response
    )
    return changed if count_items(strip(read(changed))) == (numbered, bullets) else None


def _of_different_families(requests: Sequence[Request]) -> list[Request]:
    first: dict[str, Request] = {}
    for one in requests:
        first.setdefault(_FAMILIES.get(one.check.kind, one.check.kind), one)
    return list(first.values())


def _request(sentence: str, kind: str, **arguments: Any) -> Request:
    return Request(sentence, make_check(kind, arguments))


def _number(number: int, draw: random.Random) -> str:
    """Write a number as people do: in digits, or small ones as a word."""
    if number < len(_NUMBERS) and draw.random() < 0.5:
        return _NUMBERS[number]
    return str(number)


def _bullets(_instruction: str, response: str, draw: random.Random) -> Request | None:
    bullets, numbered = count_items(response)
    if not 2 <= bullets <= MOST_ITEMS or numbered:
        return None
    if draw.random() < 0.3:
        at_least = max(2, bullets - draw.randint(0, 2))
        said = _number(at_least, draw)
        sentence = draw.choice(
            (f"Use a bulleted list with {said} or more points.", f"I want at least {said} bullets.")
        )
        return _request(sentence, "bullets", at_least=at_least)
    said = _number(bullets, draw)
    sentence = draw.choice(
        (
            f"Answer with {said} bullet points.",
            f"Put it into a bulleted list of {said} points.",
            f"Write exactly {said} bullets.",
            f"I want {said} bullet points, not more and not fewer.",
        )
    )
    return _request(sentence, "bullets", at_least=bullets, at_most=bullets)


def _numbered(_instruction: str, response: str, draw: random.Random) -> Request | None:
    bullets, numbered = count_items(response)
    if not 2 <= numbered <= MOST_ITEMS or bullets:
        return None
    said = _number(numbered, draw)
    sentence = draw.choice(
        (
            f"Number the items from 1 to {numbered}.",
            f"Make it a numbered list with {said} items.",
            f"I need {said} numbered points.",
            f"Answer as a numbered list, {said} entries exactly.",
        )
    )
    return _request(sentence, "numbered", at_least=numbered, at_most=numbered)


def _items(_instruction: str, response: str, draw: random.Random) -> Request | None:
    items = sum(count_items(response))
    if not 2 <= items <= MOST_ITEMS:
        return None
    if draw.random() < 0.5:
        said = _number(items, draw)
        sentence = draw.choice((f"List {said} of them.", f"The list has {said} entries."))
        return _request(sentence, "items", at_least=items, at_most=items)
    at_most = min(items + draw.randint(0, 2), MOST_ITEMS)
    said = _number(at_most, draw)
    sentence = draw.choice((f"Not more than {said} list items.", f"A list of up to {said} things."))
    return _request(sentence, "items", at_least=1, at_most=at_most)


def _sentences(_instruction: str, response: str, draw: random.Random) -> Request | None:
    number = count_sentences(response)
    if sum(count_items(response)) or not 1 <= number <= 8:
        return None
    said, s = _number(number, draw), "" if number == 1 else "s"
    if draw.random() < 0.4:
        sentence = draw.choice(
            (f"Use no more than {said} sentence{s}.", f"Keep it to {said} sentence{s} at the most.")
        )
        return _request(sentence, "sentences", at_least=1, at_most=number)
    sentence = draw.choice(
        (
            f"Answer in exactly {said} sentence{s}.",
            f"Write {said} sentence{s}.",
            f"Your answer has {said} sentence{s}.",
        )
    )
    return _request(sentence, "sentences", at_least=number, at_most=number)


def _words(_instruction: str, response: str, draw: random.Random) -> Request | None:
    number = len(response.split())
    step = 5 if number < 60 else 10 if number < 150 else 50
    if draw.random() < 0.7:
        bound = (number // step + 1) * step
        sentence = draw.choice(
            (
                f"Use fewer than {bound + 1} words.",
                f"Keep it under {bound + 1} words.",
                f"Not more than {bound} words, please.",
                f"You have {bound} words at the most.",
            )
        )
        return _request(sentence, "words", at_most=bound)
    bound = number // step * step - step
    if bound < step:
        return None
    sentence = draw.choice(
        (f"Use {bound} words or more.", f"It should be longer than {bound - 1} words.")
    )
    return _request(sentence, "words", at_least=bound)


def _paragraphs(_instruction: str, response: str, draw: random.Random) -> Request | None:
    number = len(re.findall(r"\S\s*?(?:\n\s*\n|\Z)", response.strip()))
    if sum(count_items(response)) or not 1 <= number <= 6:
        return None
    said, s = _number(number, draw), "" if number == 1 else "s"
    sentence = draw.choice(
        (
            f"Answer in {said} paragraph{s}.",
            f"Write {said} paragraph{s}, with a blank line between one and the next."
            if number > 1
            else "All of it in a single paragraph.",
            f"It should have {said} paragraph{s}.",
        )
    )
    return _request(sentence, "paragraphs", at_least=number, at_most=number)


def _includes(instruction: str, response: str, draw: random.Random) -> Request | None:
    new = sorted(set(_WORD.findall(response)) - set(_WORD.findall(instruction.casefold())))
    if len(new) < 2:
        return None
    words = draw.sample(new, draw.choice((1, 1, 2)))
    said = " and ".join(f'"{word}"' for word in words)
    s = "s" * (len(words) > 1)
    sentence = draw.choice(
        (
            f"The word{s} {said} must be in it.",
            f"Make use of the word{s} {said}.",
            f"Mention {said}.",
            f"Somewhere in the answer write {said}.",
        )
    )
    return _request(sentence, "includes", strings=words)


def _excludes(instruction: str, response: str, draw: random.Random) -> Request | None:
    there = response.casefold()
    absent = sorted(one for one in set(_WORD.findall(instruction.casefold())) if one not in there)
    if not absent:
        return None
    word = draw.choice(absent)
    sentence = draw.choice(
        (
            f'Avoid the word "{word}".',
            f'The word "{word}" is not allowed.',
            f'Do it without saying "{word}".',
            f'Never write "{word}".',
        )
    )
    return _request(sentence, "excludes", strings=[word])


def _without(_instruction: str, response: str, draw: random.Random) -> Request | None:
    names = {",": "commas", ":": "colons", "!": "exclamation marks", "?": "question marks"}
    absent = [one for one in names if one not in response]
    if not absent:
        return None
    character = draw.choice(absent)
    sentence = draw.choice(
        (f"Write it without {names[character]}.", f"There must be no {names[character]} in it.")
    )
    return _request(sentence, "without", characters=character)


def _begins(_instruction: str, response: str, draw: random.Random) -> Request | None:
    found = re.match(r"[A-Z][A-Za-z' ]*", response)
    words = found[0].split()[: draw.randint(1, 4)] if found else []
    if not words:
        return None
    string = " ".join(words)
    sentence = draw.choice(
        (
            f'Start with "{string}".',
            f'The first words are "{string}".',
            f'Let the answer open with "{string}".',
        )
    )
    return _request(sentence, "begins", string=string)


def _ends(_instruction: str, response: str, draw: random.Random) -> Request | None:
    found = re.search(r"[A-Za-z' ]*[.!?]?\Z", response.strip())
    words = found[0].split()[-draw.randint(1, 4) :] if found else []
    if not words or not any(c.isalpha() for c in words[0]):
        return None
    string = " ".join(words)
    sentence = draw.choice(
        (
            f'The last words are "{string}"',
            f'Finish with "{string}"',
            f'Close with the words "{string}"',
        )
    )
    return _request(sentence, "ends", string=string)


def _headings(_instruction: str, response: str, draw: random.Random) -> Request | None:
    number = len(re.findall(r"^#{1,6} +\S", response, re.MULTILINE))
    if not 1 <= number <= 6:
        return None
    said, s = _number(number, draw), "s" * (number > 1)
    sentence = draw.choice(
        (
            f"Structure it with {said} Markdown heading{s}.",
            f"Use {said} heading{s} that start{'' if s else 's'} with #.",
        )
    )
    return _request(sentence, "headings", at_least=number)


def _bold(_instruction: str, response: str, draw: random.Random) -> Request | None:
    number = len(re.findall(r"\*\*[^*\n]+\*\*", response))
    if not 1 <= number <= MOST_ITEMS:
        return None
    at_least = draw.randint(1, number)
    said = _number(at_least, draw)
    sentence = draw.choice(
        (
            f"Print at least {said} of the terms in **bold**.",
            f"Use bold type {said} times or more, with two stars on either side."
            if at_least > 1
            else "Put the most important words in bold, with two stars on either side.",
        )
    )
    return _request(sentence, "bold", at_least=at_least)


_KINDS: tuple[Asking, ...] = (
    _bullets,
    _numbered,
    _items,
    _sentences,
    _words,
    _paragraphs,
    _includes,
    _excludes,
    _without,
    _begins,
    _ends,
    _headings,
    _bold,
)
