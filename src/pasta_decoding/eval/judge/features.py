"""What the local judge sees of an answer: numbers that a reader could count by hand.

No model is asked. Length is none of them: the judge treats it apart, so that it can compare two
answers as if they were equally long. Shares are in [0, 1], rates count per word or character.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence

from pasta_decoding.lang.measures import repeated_grams

_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|\d+(?:[.,]\d+)*")
_SENTENCE = re.compile(r"[^.!?\n]+[.!?]*")
_ITEM = re.compile(r"^\s*(?:[-*•+]|\d{1,2}[.)]|[a-z][.)])\s+\S", re.MULTILINE)
_HEADING = re.compile(r"^\s*(?:#{1,6}\s+\S|\*\*[^*\n]+\*\*:?\s*$)", re.MULTILINE)
_REFUSAL = re.compile(
    r"\b(?:i'm sorry|i am sorry|i apologi[sz]e|i can(?:'|no)t|i am unable|i'm unable|unable to|"
    r"i do not have|i don't have|as an ai|language model|cannot (?:assist|provide|fulfil))"
)
_OPENER = re.compile(r"\W*(?:sure|certainly|of course|absolutely|great|here(?:'s| is| are)|yes)\b")
# Marks of a prompt template or of another speaker, which a reader should never see.
_LEAK = re.compile(
    r"###|<\||\|>|</?s>|\[/?inst\]|<nooutput>|"
    r"^(?:human|user|assistant|instruction|input|response|output|question|answer) ?:",
    re.MULTILINE,
)
_FUNCTION_WORDS = frozenset(
    _WORD.findall(
        "the a an and or but if then than so as of in on at to for from by with about into over "
        "after before between through during is are was were be been being am do does did have "
        "has had will would can could shall should may might must not no nor it its it's he she "
        "they them their his her him you your we our us i me my this that these those there "
        "here which who whom whose what when where why how all any each every some such only "
        "own same too very also more most other both few just up down out off again further "
        "once because while until against"
    )
)
# "the of", "a.", "their is": an article or the like must be followed by what it belongs to.
_DETERMINER = re.compile(r"\b(?:the|an?|my|your|our|their|its)\b")
_ASTRAY = re.compile(
    r"\b(?:the|an?|my|your|our|their|its)"
    r"(?:[.,;:!?)]|\s*$|\s+(?:the|an?|of|to|in|on|at|by|for|from|with|and|or|but|is|are|was|were|be|"
    r"can|will|that|this|it|they|you|we|he|she)\b)",
    re.MULTILINE,
)
_FIRST_PERSON = frozenset(_WORD.findall("i me my mine i'm i've i'd i'll"))
_SECOND_PERSON = frozenset(_WORD.findall("you your yours you're you'll you've you'd"))
_WINDOW_WORDS = 50
_COMPRESSED_BYTES = 4000


def features(prompt: str, answer: str) -> dict[str, float]:
    """Return every feature of an answer by its name; FEATURES lists them in this order."""
    answer = answer.replace("\u2019", "'")
    words, sentences = _words(answer), [one for one in _SENTENCE.findall(answer) if one.strip()]
    return (
        _repetition(answer, words, sentences)
        | _relevance(_words(prompt.replace("\u2019", "'")), words, sentences)
        | _structure(answer, words)
        | _fluency(answer, words, sentences)
        | _ending(answer, words)
        | _manner(answer, words)
    )


def _repetition(answer: str, words: list[str], sentences: list[str]) -> dict[str, float]:
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    content = Counter(word for word in words if word not in _FUNCTION_WORDS)
    return {
        "repeated_pairs": repeated_grams(answer, 2),
        "repeated_fours": repeated_grams(answer, 4),
        "repeated_eights": repeated_grams(answer, 8),
        "repeated_lines": _repeated(lines),
        "repeated_sentences": _repeated([one.strip().casefold() for one in sentences]),
        "repeated_openings": _repeated([" ".join(line.split()[:3]) for line in lines]),
        "commonest_word": _share(max(content.values(), default=0), len(words)),
        "distinct_words": _distinct_in_windows(words),
        "compressed": _compressed(answer),
    }


def _relevance(prompt: list[str], words: list[str], sentences: list[str]) -> dict[str, float]:
    asked, content = set(_stems(prompt)), _stems(words)
    first = set(_stems(_words(sentences[0]))) if sentences else set()
    prompt_runs, runs = set(_runs(prompt)), _runs(words)
    return {
        "asked_covered": _share(len(asked & set(content)), len(asked)),
        "asked_in_first_sentence": _share(len(asked & first), len(asked)),
        "on_topic": _share(sum(word in asked for word in content), len(content)),
        "copied": _share(sum(run in prompt_runs for run in runs), len(runs)),
        "copied_at_start": _share(sum(run in prompt_runs for run in runs[:12]), len(runs[:12])),
    }


def _structure(answer: str, words: list[str]) -> dict[str, float]:
    items = len(_ITEM.findall(answer.casefold()))
    return {
        "has_list": float(items >= 2),
        "items": math.log1p(items),
        "item_rate": _share(items, len(words)),
        "headings": math.log1p(len(_HEADING.findall(answer))),
        "bold": math.log1p(answer.count("**")),
        "code": float("```" in answer),
        "paragraphs": math.log1p(answer.count("\n\n")),
        "lines": math.log1p(answer.count("\n")),
    }


def _fluency(answer: str, words: list[str], sentences: list[str]) -> dict[str, float]:
    lengths = [len(_words(one)) for one in sentences] or [0]
    mean = sum(lengths) / len(lengths)
    spread = math.sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths))
    letters = sum(map(str.isalpha, answer))
    plain, text = answer.encode("ascii", "ignore"), answer.casefold()
    return {
        "word_chars": _share(sum(map(len, words)), len(words)),
        "function_words": _share(sum(word in _FUNCTION_WORDS for word in words), len(words)),
        "words_astray": _share(len(_ASTRAY.findall(text)), len(_DETERMINER.findall(text))),
        "sentence_words": math.log1p(mean),
        "sentence_spread": math.log1p(spread),
        "longest_sentence": math.log1p(max(lengths)),
        "not_ascii": 1 - _share(len(plain), len(answer)) if answer else 0.0,
        "capitals": _share(sum(map(str.isupper, answer)), letters),
        "digits": _share(sum(map(str.isdigit, answer)), len(answer)),
        "punctuation": _share(sum(map(answer.count, ",;:()\"'")), len(answer)),
        "exclamations": _share(answer.count("!"), len(words)),
        "questions": _share(answer.count("?"), len(words)),
    }


def _ending(answer: str, words: list[str]) -> dict[str, float]:
    end = answer.rstrip()[-1:]
    return {
        "ends_a_sentence": float(end in tuple(".!?")),
        "ends_a_bracket": float(end in tuple("\"')]}`*|")),
        "ends_in_a_word": float(end.isalnum()),
        "ends_half": float(end in tuple(",;:-")),
        "almost_empty": float(len(words) <= 3),
        "starts_small": float(answer.lstrip()[:1].islower()),
    }


def _manner(answer: str, words: list[str]) -> dict[str, float]:
    text = answer.casefold()
    return {
        "refuses_at_once": float(bool(_REFUSAL.search(text[:300]))),
        "refuses": float(bool(_REFUSAL.search(text))),
        "polite_opener": float(bool(_OPENER.match(text))),
        "template_leaks": float(bool(_LEAK.search(text))),
        "first_person": _share(sum(word in _FIRST_PERSON for word in words), len(words)),
        "second_person": _share(sum(word in _SECOND_PERSON for word in words), len(words)),
    }


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _stems(words: Sequence[str]) -> list[str]:
    """Return the starts of the words that carry meaning: "river" and "rivers" are one."""
    return [word[:5] for word in words if word not in _FUNCTION_WORDS]


def _runs(words: Sequence[str]) -> list[tuple[str, str, str]]:
    return list(zip(words, words[1:], words[2:], strict=False))


def _repeated(parts: Sequence[str]) -> float:
    return 1 - len(set(parts)) / len(parts) if parts else 0.0


def _distinct_in_windows(words: list[str]) -> float:
    """Return the share of distinct words, in windows of one size: long texts repeat words more."""
    starts = range(0, max(1, len(words) - _WINDOW_WORDS + 1), _WINDOW_WORDS)
    windows = [words[start : start + _WINDOW_WORDS] for start in starts]
    return sum(_share(len(set(window)), len(window)) for window in windows) / len(windows)


def _compressed(answer: str) -> float:
    start = answer.encode("utf-8", "replace")[:_COMPRESSED_BYTES]
    return _share(len(zlib.compress(start)), len(start))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


FEATURES = tuple(features("", ""))
