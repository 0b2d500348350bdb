"""Topics for the parts of one answer: one to three words each, from which a part could be written.

A part's own title gives its topic if it has one; otherwise the phrase of its text that
says most about it and least about its siblings. Phrases are runs of words between stop
words, after the RAKE method of keyword extraction.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, takewhile

from pasta_decoding.data.annotate.base import Part
from pasta_decoding.data.annotate.words import (
    ADJECTIVE_ENDINGS,
    NOUNS_IN_LY,
    STOP_WORDS,
    VERB_MARKERS,
    WEAK_WORDS,
)

MAX_WORDS = 3
MAX_CHARS = 60

# Weights, set on responses whose topics a careful reader had chosen.
EARLY = 1.0  # how much each sentence that goes before a phrase takes off,
LATE = 0.2  # and each phrase before it in its own sentence
SHARED = 0.8  # what a word loses that all siblings hold
KNOWN = 0.5  # what is left of a word that stands in the opening
WEAK = 0.35  # and of a weak one
REPEATED = 0.35  # how much each further use in the part adds
WEIGHTS = (1.0, 0.5, 0.1)  # of a phrase's words, the best one first

_WORD = re.compile(r"[^\W_]+(?:[.'\u2019&+/-]+[^\W_]+)*[+#]*")
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\n+")
_LABEL = re.compile(
    r"^(?:(?:step|chapter|part|section|phase|tip|day|week|slide)\s+)?(?:\d+|[ivx]+)[.):]\s*", re.I
)
_LEADING = re.compile(r"^(?:the|a|an|your|my|our|its|their)\s+", re.I)
_LINKS = frozenset({"of", "and", "for", "in", "to", "with", "vs", "or", "on", "&"})


@dataclass(frozen=True, slots=True)
class TopicPart:
    """A stretch of the response that can be written by itself, and its title if it has one."""

    start: int
    end: int
    title: str | None = None


def name_parts(text: str, parts: Sequence[TopicPart]) -> list[Part]:
    """Return the parts with one topic each, all different."""
    topics: list[str] = []
    for choices in topic_choices(text, parts):
        topics.append(first_new(choices, topics))
    return [Part(one.start, one.end, topic) for one, topic in zip(parts, topics, strict=True)]


def topic_choices(text: str, parts: Sequence[TopicPart]) -> Iterator[Iterator[str]]:
    """Yield the topics that each part may have, best first; some may be given twice."""
    bodies = [text[part.start : part.end] for part in parts]
    spread = Counter(stem for body in bodies for stem in {stem_of(word) for word in words(body)})
    known = {stem_of(word) for word in words(text[: parts[0].start])} if parts else set()
    for part, body in zip(parts, bodies, strict=True):
        scorer = _Scorer(spread, len(parts), known, Counter(map(stem_of, words(body))))
        yield chain(_from_title(part.title, scorer), _from_text(body, scorer))


def words(text: str) -> list[str]:
    """Return the words of `text` in lower case, markup left out."""
    return [word.lower() for word in _WORD.findall(text)]


def stem_of(word: str) -> str:
    """Return a crude stem, the same for most forms of a word."""
    word = word.lower().removesuffix("'s").removesuffix("\u2019s")
    for ending in ("ies", "ing", "ed", "es", "ly", "s", "y", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


@dataclass(frozen=True, slots=True)
class _Scorer:
    """How telling a word is: `spread` counts the siblings that hold its stem, `here` its uses."""

    spread: Counter[str]
    siblings: int
    known: set[str]
    here: Counter[str]

    def word(self, word: str) -> float:
        if word in STOP_WORDS or word.isdigit() or len(word) < 2:
            return 0.0
        stem = stem_of(word)
        shared = (self.spread[stem] - 1) / max(1, self.siblings - 1)
        score = (1.0 - SHARED * shared) * (KNOWN if stem in self.known else 1.0)
        if word in WEAK_WORDS or (word.endswith(ADJECTIVE_ENDINGS) and len(word) > 5):
            score *= WEAK
        return score * (1.0 + REPEATED * min(3, self.here[stem] - 1))

    def phrase(self, phrase: Sequence[str]) -> float:
        """Two telling words say more than one, a third adds little."""
        scores = sorted((self.word(word.lower()) for word in phrase), reverse=True)
        return sum(score * weight for score, weight in zip(scores, WEIGHTS, strict=False))


def _from_title(title: str | None, scorer: _Scorer) -> Iterator[str]:
    """Yield the title itself if it is short enough, then its best pieces."""
    if title is None:
        return
    plain = re.sub(r"\([^)]*\)|[*_`#]+", "", title).strip()
    found = _WORD.findall(_LEADING.sub("", _LABEL.sub("", plain)))
    if 1 <= len(found) <= MAX_WORDS and any(word.lower() not in STOP_WORDS for word in found):
        yield _clean(found)
    pieces = [*_phrases(plain), *_linked(found)]
    yield from (_clean(piece) for piece in sorted(pieces, key=scorer.phrase, reverse=True))


def _from_text(body: str, scorer: _Scorer) -> Iterator[str]:
    """Yield the phrases of `body`, best first; early sentences count for more."""
    scored: list[tuple[float, str]] = []
    for place, sentence in enumerate(filter(str.strip, _SENTENCE.split(body))):
        weight = 1.0 / (1.0 + EARLY * place)
        for order, found in enumerate(_phrases(sentence)):
            scored.append((scorer.phrase(found) * weight / (1 + LATE * order), _clean(found)))
    scored.sort(key=lambda pair: -pair[0])
    yield from (topic for score, topic in scored if score > 0)
    yield from (_clean([word]) for word in _WORD.findall(body) if word.lower() not in STOP_WORDS)


def _phrases(sentence: str) -> Iterator[list[str]]:
    """Yield noun-like runs of words between stop words and punctuation, cut to three words."""
    for stretch in re.split(r"[^\w\s'\u2019.&+/#*`-]+|\.\s|\s[-\u2013\u2014]\s", sentence):
        run: list[str] = []
        before = ""
        for word in [*_WORD.findall(stretch), ""]:
            if word and not _bounds(word):
                run.append(word)
                continue
            yield from _ends(_nouns(run, before))
            run, before = [], word.lower()


def _bounds(word: str) -> bool:
    """Tell whether `word` ends a phrase: a stop word, a number, an adverb."""
    low = word.lower().replace("\u2019", "'")
    adverb = low.endswith("ly") and len(low) > 5 and low not in NOUNS_IN_LY and word.islower()
    return low in STOP_WORDS or adverb or not any(map(str.isalpha, low)) or low[0].isdigit()


def _nouns(run: list[str], before: str) -> list[str]:
    """Drop a verb behind `to` or `can`, what follows a name, and participles."""
    if before in VERB_MARKERS:
        run = run[1:]
    names = len(list(takewhile(_is_name, run)))
    if names >= 2:
        run = run[:names]
    while len(run) > 1 and run[-1].endswith(("ed", "ing")) and run[-1].islower():
        run = run[:-1]
    verbs = [
        index for index, word in enumerate(run) if index and word.endswith("ed") and word.islower()
    ]
    return run[: verbs[0]] if verbs else run


def _is_name(word: str) -> bool:
    return word[0].isupper()


def _ends(run: list[str]) -> Iterator[list[str]]:
    """Yield the end of the run: a noun phrase ends with its head."""
    if run:
        yield run[-MAX_WORDS:]
    if len(run) > 2:
        yield run[-2:]


def _linked(found: list[str]) -> Iterator[list[str]]:
    """Yield `this and that`, `part of whole`: two lone words around a link."""
    padded = ["", *found, ""]
    for index in range(len(found) - 2):
        edge, left, link, right, after = padded[index : index + 5]
        lone = all(not word or _bounds(word) for word in (edge, after))
        if lone and link.lower() in _LINKS and not _bounds(left) and not _bounds(right):
            yield [left, link, right]


def is_topic(choice: str) -> bool:
    """Tell whether a choice has a length that a topic may have."""
    return 0 < len(choice) <= MAX_CHARS


def _clean(found: Sequence[str]) -> str:
    return " ".join(found).lower().replace("\u2019", "'").removesuffix("'s")


def first_new(choices: Iterable[str], taken: Sequence[str]) -> str:
    """Return the first choice that no sibling has; numbered if all are taken."""
    for choice in choices:
        if is_topic(choice) and choice not in taken:
            return choice
    return next(name for n in count(len(taken) + 1) if (name := f"part {n}") not in taken)
