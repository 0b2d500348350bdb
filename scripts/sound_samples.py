"""Rows for stage 1 from sampled answers: the sound ones, and those that one mend makes sound.

A policy cannot learn from its own sound answers what it never does: close with given words, write
in capitals, stop at the third sentence. So where a prompt has too few, an answer is mended: its
text stays as it was sampled, its form is made what the prompt asks, and it is kept if it then
passes every check. Answers with a chunk get last words and nothing else: what is cut elsewhere
would make promised lengths untrue.

    python scripts/sound_samples.py runs/sampled --prompts asked.jsonl -o sound.jsonl

The run folder is one of `pasta train preference`, which may be ended when it begins to score. Sound
is what `Asked.is_sound` says, without chunks that repeat another or the main text. Of a prompt's
sound samples the two with most plain tokens a step are taken.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

from pasta_decoding.data.annotate.structure import sentences
from pasta_decoding.data.asked import Asked, read_all_asked
from pasta_decoding.data.checks import BULLET, NUMBER
from pasta_decoding.data.dataset import Row, write_rows
from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.measures import echoes, repetitions
from pasta_decoding.lang.tree import Span, Tree, has_chunk, read, show, strip

MOST_ROWS = 2
"""Of one prompt."""
FEWEST_TITLED_WORDS = 25
_ITEM = re.compile(rf"^\s*(?:{BULLET}|{NUMBER})\s", re.MULTILINE)
_SUBJECT = re.compile(
    r"(?:\babout|^Explain|^Describe) (?:the |a |an )?([\w' -]+?)"
    r"(?= with | under | and |[.,;(]|$)"
)

Arguments = Mapping[str, Any]
Line = dict[str, Any]
Mend = Callable[[str, str, Arguments], Iterator[str]]
"""(instruction, answer, the check's arguments) -> answers that may pass, the nearest first."""


def sentences_of(text: str) -> list[str]:
    """Return the sentences of prose; none of a list or a text of several lines."""
    text = text.strip()
    if _ITEM.search(text) or "\n" in text:
        return []
    return [text[start:end].strip() for start, end in sentences(text, 0, len(text))]


def first_sentences(_instruction: str, text: str, _arguments: Arguments) -> Iterator[str]:
    """Cut behind a sentence: the longest first."""
    found = sentences_of(text)
    yield from (" ".join(found[:count]) for count in range(len(found) - 1, 0, -1))


def without_sentences(_instruction: str, text: str, arguments: Arguments) -> Iterator[str]:
    """Leave out the sentences with a word that is not allowed, if at least half of all stay."""
    found = sentences_of(text)
    banned = re.compile("|".join(rf"\b{re.escape(one)}\b" for one in arguments["strings"]), re.I)
    kept = [one for one in found if not banned.search(one)]
    if 2 * len(kept) >= len(found):
        yield " ".join(kept)


def in_paragraphs(_instruction: str, text: str, arguments: Arguments) -> Iterator[str]:
    """Join the lines of prose, and break them behind sentences into as many paragraphs."""
    if _ITEM.search(text):
        return
    found = sentences_of(" ".join(text.split()))
    count = arguments.get("at_least") or arguments["at_most"]
    if len(found) >= count:
        starts = [round(len(found) * n / count) for n in range(count + 1)]
        yield "\n\n".join(" ".join(found[first:last]) for first, last in pairwise(starts))


def closed(_instruction: str, text: str, arguments: Arguments) -> Iterator[str]:
    """Add the last words: a line of its own behind a list or a letter, else a sentence."""
    yield text.rstrip() + ("\n\n" if "\n" in text.strip() else " ") + arguments["string"]


def under_title(instruction: str, text: str, _arguments: Arguments) -> Iterator[str]:
    """Put the subject of the prompt over an answer that is long enough for a title."""
    subject = _SUBJECT.search(instruction)
    if subject and len(text.split()) >= FEWEST_TITLED_WORDS:
        title = " ".join(word[:1].upper() + word[1:] for word in subject[1].split())
        yield f"# {title}\n\n{text.strip()}"


def one_word(_instruction: str, text: str, arguments: Arguments) -> Iterator[str]:
    """Keep the one of the answers allowed with which the answer begins."""
    for one in arguments["strings"]:
        if re.match(rf"\W*{re.escape(one)}\b", text, re.I):
            yield one[:1].upper() + one[1:]


def json_alone(_instruction: str, text: str, _arguments: Arguments) -> Iterator[str]:
    """Keep what stands between the outermost brackets."""
    yield from (found[0] for found in re.finditer(r"\{.*\}|\[.*\]", text, re.DOTALL))


def without_marks(_instruction: str, text: str, arguments: Arguments) -> Iterator[str]:
    """Write a mark otherwise: a stop for an exclamation, nothing for a quotation."""
    other = {"!": ".", ";": ",", '"': "", "(": "", ")": ""}
    marks = arguments["characters"]
    if all(mark in other for mark in marks):
        yield "".join(other[one] if one in marks else one for one in text.strip())


MENDS: Mapping[str, Mend] = {
    "ends": closed,
    "excludes": without_sentences,
    "json": json_alone,
    "lower": lambda _instruction, text, _arguments: iter([text.lower()]),
    "one_of": one_word,
    "paragraphs": in_paragraphs,
    "quoted": lambda _instruction, text, _arguments: iter([f'"{text.strip()}"']),
    "sentences": first_sentences,
    "titled": under_title,
    "upper": lambda _instruction, text, _arguments: iter([text.upper()]),
    "without": without_marks,
    "words": first_sentences,
}


def is_sound(asked: Asked, tree: Tree) -> bool:
    """Is an answer that ended fit to learn from?"""
    return not repetitions(tree) and not echoes(tree) and asked.is_sound(tree)


def mended(asked: Asked, tree: Tree) -> Tree | None:
    """Return an answer that does all that is asked, or None if it takes more than one mend."""
    text = strip(tree)
    if not text.strip():
        return None
    broken = [one for one in asked.checks if not one.passes(text) and one.kind in MENDS]
    for check in broken:
        for other in MENDS[check.kind](asked.instruction, text, check.arguments):
            if not has_chunk(tree):
                found: Tree = (Span(other),)
            elif check.kind == "ends":
                found = read(show((*tree, Span(other.removeprefix(text.rstrip())))))
            else:
                continue
            if is_sound(asked, found):
                return found
    return None


def rows_of(asked: Asked, samples: Sequence[Line]) -> Iterator[Row]:
    """Return up to `MOST_ROWS` rows of the samples of a prompt, sound ones before mended ones."""
    ended = [one for one in samples if not one["truncated"]]
    ended.sort(key=lambda one: -one["plain_tokens"] / max(1, one["critical_path"]))
    trees = [(one["number"], read(one["annotated"])) for one in ended]
    sound = [("sound", number, tree) for number, tree in trees if is_sound(asked, tree)]
    others = ((number, mended(asked, tree)) for number, tree in trees)
    made = (("mended", number, tree) for number, tree in others if tree)
    for kind, number, tree in islice(chain(sound, made), MOST_ROWS):
        yield Row(f"{asked.id}-{number}", f"samples/{kind}", asked.instruction, show(tree))


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    samples: dict[str, list[Line]] = {}
    for one in read_lines(options.run / "round-1/samples.jsonl"):
        samples.setdefault(one["prompt"], []).append(one)
    rows = [
        row
        for one in read_all_asked(options.prompts)
        for row in rows_of(one, samples.get(one.id, []))
    ]
    if not rows:
        sys.exit(f"no sample of {options.run} is sound or can be mended; {options.out} not written")
    write_rows(options.out, rows)
    print(json.dumps(Counter(row.source for row in rows)))


if __name__ == "__main__":
    try:
        main()
    except PastaError as error:
        sys.exit(str(error))
