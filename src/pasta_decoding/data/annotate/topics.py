"""Topics for the parts of one answer: one to three words from which a part could be written.

A part's title gives its topic. Without a title, it is the phrase of its text with the highest
score. Phrases are runs of words between stop words, as in RAKE, a method of keyword extraction.
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
SENTENCE_DISCOUNT = 1.0  # how much each sentence before a phrase lowers its score
PHRASE_DISCOUNT = 0.3  # and each phrase before it in its sentence
REPETITION_BONUS = 0.35  # how much each further use of a word in the part adds, three at most
WORD_WEIGHTS = (1.0, 0.5, 0.1)  # of a phrase's words, by falling score

_WORD = re.compile(r"[^\W_]+(?:[.'\u2019&+/-]+[^\W_]+)*[+#]*")
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\n+")
_PHRASE = re.compile(r"[^\w\s'\u2019.&+/#*`-]+|\.\s|\s[-\u2013\u2014]\s")
_MARKUP = re.compile(r"\([^)]*\)|[*_`#]+")
_LEADING = re.compile(r"^(?:the|a|an|your|my|our|its|their)\s+", re.I)

# English words that are never part of a topic; a phrase ends at them.
STOP_WORDS = frozenset(files(__package__).joinpath("stop_words.txt").read_text("utf-8").split())


def name_parts(text: str, parts: Iterable[Part]) -> list[Part]:
    """Return the parts with topics that all differ. In `parts`, `topic` holds a part's title."""
    named: list[Part] = []
    for part in parts:
        body = text[part.start : part.end]
        uses = Counter(word.lower() for word in _WORD.findall(body))
        choices = chain(_from_title(part.topic or "", uses), _from_text(body, uses))
        named.append(replace(part, topic=_first_new(choices, [other.topic for other in named])))
    return named


def _first_new(choices: Iterable[str], taken: Sequence[str | None]) -> str:
    """Return the first choice that is short enough and not taken, else a number."""
    short_choices = (choice for choice in choices if 0 < len(choice) <= MAX_CHARS)
    numbers = (f"part {number}" for number in count(len(taken) + 1))
    return next(topic for topic in chain(short_choices, numbers) if topic not in taken)


def _from_title(title: str, uses: Counter[str]) -> Iterator[str]:
    plain = _MARKUP.sub("", title).strip()
    words = _WORD.findall(_LEADING.sub("", plain))
    if len(words) <= MAX_WORDS and any(word.lower() not in STOP_WORDS for word in words):
        yield _clean(words)
    phrases = sorted(_phrases(plain), key=lambda phrase: _score(phrase, uses), reverse=True)
    yield from map(_clean, phrases)


def _from_text(body: str, uses: Counter[str]) -> Iterator[str]:
    """Yield the phrases of `body` by falling score; early phrases have higher ones."""
    scored = [
        (
            _score(phrase, uses)
            / (1 + SENTENCE_DISCOUNT * sentences_before)
            / (1 + PHRASE_DISCOUNT * phrases_before),
            phrase,
        )
        for sentences_before, sentence in enumerate(filter(str.strip, _SENTENCE.split(body)))
        for phrases_before, phrase in enumerate(_phrases(sentence))
    ]
    scored.sort(key=lambda pair: -pair[0])
    yield from (_clean(phrase) for score, phrase in scored if score > 0)


def _score(phrase: Sequence[str], uses: Counter[str]) -> float:
    """Return the score of a phrase: its second word counts for half, its third for little."""
    words = (word.lower() for word in phrase if len(word) > 1)
    scores = [1 + REPETITION_BONUS * min(3, uses[word] - 1) for word in words]
    scores.sort(reverse=True)
    return sum(score * weight for score, weight in zip(scores, WORD_WEIGHTS, strict=False))


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
