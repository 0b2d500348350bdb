"""Topics for the parts of one answer: one to three words each, from which a part could be written.

A part's own title gives its topic if it has one; otherwise the phrase of its text that says most
about it. Phrases are runs of words between stop words, after the RAKE method of keyword extraction.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
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
STOP_WORDS = frozenset(
    """
    a able about above according across actually add addition additional additionally affects
    after again against ago aimed all allow allowed allowing allows almost along already also
    alternatively although always am amid among an and another any anyone anything appear
    appears are aren't around as aside ask at available away back based be became because become
    becomes becoming been before began begin begins behind being believe below best better
    between beyond boosts both bring brings but by call called calls came can can't cannot case
    cases cause caused causes causing certain certainly choose clear come comes coming common
    commonly compared consider considered consists contain contains could couldn't course
    currently defines depend depending depends despite did didn't different difficult do does
    doesn't doing don't done down due during e.g each eager easier easily easy effective
    effectively either else enable enables end enough ensure ensures ensuring enters especially
    essential etc even eventually ever every everyone everything exactly example examples exist
    extremely fact far few finally find finding first firstly five focus focused follow followed
    following follows for found four from full fully further furthermore gave general generally
    get gets getting give given gives giving go goes going gone good got great greatly had
    happen happens has have haven't having he he's held hello help helped helpful helping helps
    hence her here here's hers herself high highly him himself his hold holds hosts hour hours
    how however huge i i'd i'm i've i.e if ignores imagine important in include included
    includes including incredibly indeed instance instead into introduction involve involved
    involves is isn't it it's its itself join just keep keeping keeps kept key kind know known
    large last lastly later launched lay least leave left less let let's lets lies like likely
    little ll long longer look looking looks lot lots made main mainly major make makes making
    many matter matters may maybe me mean means meanwhile merely might minutes month months more
    moreover most mostly much multiple must my myself near nearly necessary need needed needs
    neither never new next no nobody none nor not note nothing noting now number numerous obtain
    occur occurs of off offer offered offering offers often okay old on once one ones only onto
    or order other others otherwise our out over overall own particular particularly people per
    perhaps person play plays please popular possible potentially prevent primarily primary
    probably produce produces provide provided provides providing put quite range rarely rather
    re reach reality really refer referred refers regarding regardless related remember require
    required requires result resulting results right run s said same saw say says second
    secondly see seem seems seen set sets several she should show shows significant
    significantly similar similarly simple simply since small so some somebody someone something
    sometimes soon sorry specific specifically stars start started starting starts still strong
    such suggest suggests sure t take taken takes taking tell ten than that that's the their
    theirs them themselves then there there's therefore these they they're thing things think
    third thirdly this those though three through throughout thus til till to together too took
    toward towards tried true try trying turn two type types typically ultimately under
    understand understanding unique unless until unto up upon us use used useful uses using
    usually various vary ve versus very via want was wasn't way ways we we're week weeks well
    went were weren't what what's whatever when whenever where whereas wherever whether which
    while who who's whole whom whose why wide widely will wish with within without won't worth
    would wouldn't yes yet you you'd you'll you're you've your yours yourself
    """.split()  # noqa: SIM905
)


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
    """Return the first choice that no sibling has; a number if all are taken."""
    numbered = (f"part {number}" for number in count(len(taken) + 1))
    fit = (choice for choice in choices if 0 < len(choice) <= MAX_CHARS)
    return next(one for one in chain(fit, numbered) if one not in taken)


def _from_title(title: str, uses: Counter[str]) -> Iterator[str]:
    """Yield the title itself if it is short enough, then its best phrases."""
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
