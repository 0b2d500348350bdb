"""Topics for the parts of one answer: one to three words each, from which a part could be written.

A part's own title gives its topic if it has one; otherwise the phrase of its text that says most
about it. Phrases are runs of words between stop words, after the RAKE method of keyword extraction.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import chain, count

from pasta_decoding.data.annotate.base import Part

MAX_WORDS = 3
MAX_CHARS = 60

# Weights, set on responses whose topics a careful reader had chosen.
EARLY = 1.0  # how much each sentence that goes before a phrase takes off,
LATE = 0.3  # and each phrase before it in its own sentence
REPEATED = 0.35  # how much each further use in the part adds, three at most
WEIGHTS = (1.0, 0.5, 0.1)  # of a phrase's words, the best one first

_WORD = re.compile(r"[^\W_]+(?:[.'\u2019&+/-]+[^\W_]+)*[+#]*")
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\n+")
_PHRASE = re.compile(r"[^\w\s'\u2019.&+/#*`-]+|\.\s|\s[-\u2013\u2014]\s")
_MARKUP = re.compile(r"\([^)]*\)|[*_`#]+")
_LEADING = re.compile(r"^(?:the|a|an|your|my|our|its|their)\s+", re.I)

# English words that are never part of a topic; a phrase ends at them.
STOP_WORDS = frozenset(files(__package__).joinpath("stop_words.txt").read_text("utf-8").split())


def name_parts(text: str, parts: Iterable[Part]) -> list[Part]:
    """Return the parts with one topic each, all different; what they have is a title, if any."""
    named: list[Part] = []
    for part in parts:
        body = text[part.start : part.end]
        uses = Counter(word.lower() for word in _WORD.findall(body))
        choices = chain(_from_title(part.topic or "", uses), _from_text(body, uses))
        named.append(replace(part, topic=_first_new(choices, [one.topic for one in named])))
    return named


def _first_new(choices: Iterable[str], taken: Sequence[str | None]) -> str:
    numbered = (f"part {number}" for number in count(len(taken) + 1))
    fit = (choice for choice in choices if 0 < len(choice) <= MAX_CHARS)
    return next(one for one in chain(fit, numbered) if one not in taken)


def _from_title(title: str, uses: Counter[str]) -> Iterator[str]:
    plain = _MARKUP.sub("", title).strip()
    found = _WORD.findall(_LEADING.sub("", plain))
    if len(found) <= MAX_WORDS and any(word.lower() not in STOP_WORDS for word in found):
        yield _clean(found)
    phrases = sorted(_phrases(plain), key=lambda phrase: _score(phrase, uses), reverse=True)
    yield from map(_clean, phrases)


def _from_text(body: str, uses: Counter[str]) -> Iterator[str]:
    """Yield the phrases of `body`, best first; early ones count for more."""
    scored = [
        (_score(phrase, uses) / (1 + EARLY * place) / (1 + LATE * order), phrase)
        for place, sentence in enumerate(filter(str.strip, _SENTENCE.split(body)))
        for order, phrase in enumerate(_phrases(sentence))
    ]
    scored.sort(key=lambda pair: -pair[0])
    yield from (_clean(phrase) for score, phrase in scored if score > 0)


def _score(phrase: Sequence[str], uses: Counter[str]) -> float:
    """Two telling words say more than one, a third adds little."""
    telling = (word.lower() for word in phrase if len(word) > 1)
    scores = sorted((1 + REPEATED * min(3, uses[word] - 1) for word in telling), reverse=True)
    return sum(score * weight for score, weight in zip(scores, WEIGHTS, strict=False))


def _phrases(sentence: str) -> Iterator[list[str]]:
    """Yield runs of words between stop words, numbers and punctuation, cut to the last three."""
    for stretch in _PHRASE.split(sentence):
        run: list[str] = []
        for word in [*_WORD.findall(stretch), ""]:
            low = word.lower().replace("\u2019", "'")
            if low and low not in STOP_WORDS and not low[0].isdigit():
                run.append(word)
                continue
            if run:
                yield run[-MAX_WORDS:]
            run = []


def _clean(words: Sequence[str]) -> str:
    return " ".join(words).lower().replace("\u2019", "'").removesuffix("'s")
