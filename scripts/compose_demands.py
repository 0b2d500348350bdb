"""Compose answers that do exactly what is asked, out of parts that were written once.

data/written_parts.txt holds things to list and subjects, each with parts: a name of one to three
words and two sentences that need none of the others. data/written_demands.txt holds what can be
asked of an answer (so many bullets, one paragraph, a last word), in several wordings, and short
questions with their answers. Drawn against each other they make rows in which the request alone
decides the form. Every row passes its own checks.

    python scripts/compose_demands.py --count 1600 --seed 1 -o data/annotated_demands.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add, mul, sub
from pathlib import Path
from string import Formatter
from typing import Any

from pasta_decoding.cli.console import token_counter
from pasta_decoding.data.checks import make_check
from pasta_decoding.data.dataset import Row, write_rows
from pasta_decoding.lang.tree import Chunk, Node, Span, Tree, read, show, strip, valid_tokens

DATA = Path(__file__).parent.parent / "data"
SOURCE = "written/demands"
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FEWEST_CHUNK_WORDS = 6
"""What is shorter is written by the main thread: a promise would cost as much."""
WORD_LIMITS = (15, 20, 25, 30, 40, 50, 60, 80, 100, 150)
CHARACTERS = {
    ",": "commas", "!": "exclamation marks", "?": "question marks", ":": "colons",
    "*": "asterisks", "0123456789": "digits",
}  # fmt: skip
RECKONING = {"+": add, "-": sub, "x": mul}

Draw = random.Random
Ask = tuple[str, dict[str, Any]]
"""The kind and the arguments of a check (data/checks.py)."""


def read_blocks(path: Path) -> dict[str, list[str]]:
    """Return the lines below each heading of a file, a heading without what explains it."""
    blocks = re.split(r"^# ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    lines = (block.strip().split("\n") for block in blocks)
    return {re.split("[:,]", head)[0] if explained(head) else head: rest for head, *rest in lines}


def explained(head: str) -> bool:
    """Does a heading say what its columns are? That of a list or a subject names it instead."""
    return not head.startswith(("list: ", "subject: "))


DEMANDS = read_blocks(DATA / "written_demands.txt")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an answer: its name, and two sentences."""

    name: str
    first: str
    second: str

    @property
    def both(self) -> str:
        """Both sentences."""
        return f"{self.first} {self.second}"


@dataclass(frozen=True, slots=True)
class Written:
    """What there is to say of one thing. listed: the parts are its kinds, not its aspects."""

    what: str
    listed: bool
    parts: tuple[Part, ...]

    def some(self, count: int, draw: Draw) -> list[Part]:
        """Draw so many parts, in the order in which they were written."""
        return [self.parts[at] for at in sorted(draw.sample(range(len(self.parts)), count))]

    def question(self, draw: Draw) -> str:
        """Ask about it without a demand."""
        what = self.what
        if self.listed:
            good = "good " * what.startswith(("ways", "tips", "reasons", "gifts", "questions"))
            return draw.choice(
                (f"What are {good}{what}?", f"Tell me some {what}.", f"List {what}.")
            )
        return draw.choice(
            (
                f"Tell me about {what}.",
                f"What should I know about {what}?",
                f"Describe {what}.",
                f"Write about {what}.",
                f"Explain {what} to a beginner.",
            )
        )


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything that there is to write about."""

    lists: tuple[Written, ...]
    subjects: tuple[Written, ...]

    def any(self, draw: Draw) -> Written:
        """Draw a list or a subject."""
        return draw.choice((draw.choice(self.lists), draw.choice(self.subjects)))


@dataclass(frozen=True, slots=True)
class Composed:
    """An instruction, its answer, and what a program verifies of it."""

    instruction: str
    tree: Tree
    checks: tuple[Ask, ...] = ()


Maker = Callable[[Sources, Draw], Composed]


def read_parts() -> Sources:
    """Read what was written."""
    found = []
    for head, lines in read_blocks(DATA / "written_parts.txt").items():
        kind, _, what = head.partition(": ")
        parts = tuple(Part(*cells(line)) for line in lines)
        found.append(Written(what, kind == "list", parts))
    return Sources(
        tuple(one for one in found if one.listed), tuple(one for one in found if not one.listed)
    )


# Wordings


def cells(line: str) -> list[str]:
    """Return the columns of a line."""
    return line.split(" | ")


def worded(kind: str, draw: Draw, **values: object) -> str:
    """Draw one of the wordings of a demand. A value that is a function is drawn for each anew."""
    filled = []
    for wording in DEMANDS[kind]:
        names = [name for _, name, _, _ in Formatter().parse(wording) if name]
        own = {name: value() if callable(value := values[name]) else value for name in names}
        filled.append(wording.format(**own))
    return draw.choice(filled)


def about(
    written: Written, draw: Draw, wording: str, answer: str | Sequence[Node], *checks: Ask
) -> Composed:
    """Ask about something, with a demand behind the question."""
    return answered(f"{written.question(draw)} {wording}", answer, *checks)


def answered(instruction: str, answer: str | Sequence[Node], *checks: Ask) -> Composed:
    """Return a row. A text is written by one thread."""
    nodes = [Span(answer)] if isinstance(answer, str) else answer
    return Composed(instruction, merged(nodes), checks)


def exactly(n: int) -> dict[str, Any]:
    """Return the bounds of a count."""
    return {"at_least": n, "at_most": n}


def number(n: int, draw: Draw) -> str:
    """Write a number as people do."""
    return NUMBERS[n] if draw.random() < 0.5 else str(n)


def capital(text: str) -> str:
    """Return a text with a capital letter in front."""
    return text[:1].upper() + text[1:]


def named(words: Sequence[str]) -> dict[str, str]:
    """Return how wordings name some words: in quotes, without, and the plural's s."""
    quoted = " and ".join(f'"{word}"' for word in words)
    return {"quoted": quoted, "bare": " and ".join(words), "s": "s" * (len(words) > 1)}


# Pieces of answers


def chunks(parts: Sequence[Part], texts: Sequence[str]) -> list[Node]:
    """Return a chunk a text if they are long enough for it, else main text."""
    words = sum(len(text.split()) for text in texts)
    if words < FEWEST_CHUNK_WORDS * len(texts):
        return [Span(text) for text in texts]
    return [Chunk(part.name, 10, text) for part, text in zip(parts, texts, strict=True)]


def paragraphs_of(parts: Sequence[Part]) -> list[Node]:
    """Return a paragraph a part."""
    return chunks(parts, [part.both for part in parts])


def item_texts(parts: Sequence[Part], draw: Draw, style: str | None = None) -> list[Node]:
    """Return what stands behind the markers, all items in one style."""
    styles = ("name", "first", "both", "bold first", "bold both", "colon first", "colon both")
    style = style or draw.choice(styles)
    texts = []
    for part in parts:
        name = capital(part.name)
        label = {"bold": f"**{name}**: ", "colon": f"{name}: "}.get(style.split()[0], "")
        text = {"name": name, "first": part.first, "both": part.both}[style.split()[-1]]
        texts.append(label + text)
    return chunks(parts, texts)


def joined(texts: Sequence[Node], between: str = "\n\n") -> list[Node]:
    """Return nodes with main text between them."""
    return [node for text in texts for node in (Span(between), text)][1:]


def headed(texts: Sequence[Node], heads: Sequence[str], between: str) -> list[Node]:
    """Return nodes with main text in front of each, a marker or a heading, and between them."""
    nodes: list[Node] = []
    for head, text in zip(heads, texts, strict=True):
        nodes += [Span(between * bool(nodes) + head), text]
    return nodes


def listed(texts: Sequence[Node], *, numbers: bool) -> list[Node]:
    """Return a list, an item a line."""
    markers = [f"{place}. " if numbers else "- " for place in range(1, len(texts) + 1)]
    return headed(texts, markers, "\n")


def merged(nodes: Sequence[Node]) -> Tree:
    """Return the nodes with neighbouring main text in one."""
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, Span) and found and isinstance(found[-1], Span):
            found[-1] = Span(found[-1].text + node.text)
        else:
            found.append(node)
    return tuple(found)


def prose(written: Written, fewest: int, most: int, draw: Draw) -> str:
    """Return one paragraph about so many of the parts."""
    parts = written.some(draw.randint(fewest, most), draw)
    return " ".join(draw.choice((part.first, part.both)) for part in parts)


def body(written: Written, draw: Draw) -> list[Node]:
    """Return a text of one thread, or of a few."""
    if draw.random() < 0.5:
        return [Span(prose(written, 2, 3, draw))]
    return joined(paragraphs_of(written.some(draw.randint(2, 4), draw)))


# Lists


def of_a_list(sources: Sources, draw: Draw, fewest: int = 2) -> tuple[Written, int]:
    """Draw a list, and how many of its items."""
    written = draw.choice(sources.lists)
    return written, draw.randint(fewest, len(written.parts))


def counted(sources: Sources, draw: Draw, *, numbers: bool) -> Composed:
    """So many items with the markers that are asked for."""
    written, n = of_a_list(sources, draw)
    said, kinds = number(n, draw), ("bullets", "numbered")
    kind, other = kinds[::-1] if numbers else kinds
    values = {"n": n, "said": said, "Said": capital(said), "what": written.what}
    wording = worded(kind, draw, question=lambda: written.question(draw), **values)
    answer = listed(item_texts(written.some(n, draw), draw), numbers=numbers)
    return answered(wording, answer, (kind, exactly(n)), (other, exactly(0)))


def bullets(sources: Sources, draw: Draw) -> Composed:
    """So many bullets."""
    return counted(sources, draw, numbers=False)


def numbered(sources: Sources, draw: Draw) -> Composed:
    """So many numbered items."""
    return counted(sources, draw, numbers=True)


def items(sources: Sources, draw: Draw) -> Composed:
    """So many items of a length that is asked for, with either markers."""
    written, n = of_a_list(sources, draw)
    said = number(n, draw)
    style, how = cells(draw.choice(DEMANDS["items"]))
    numbers = draw.choice((False, True))
    answer = listed(item_texts(written.some(n, draw), draw, style), numbers=numbers)
    return answered(f"List {said} {written.what}. {how}", answer, ("items", exactly(n)))


def free_list(sources: Sources, draw: Draw) -> Composed:
    """A list of which nothing is asked."""
    written, n = of_a_list(sources, draw, fewest=3)
    style = draw.choice(("both", "bold both", "colon both"))
    texts = item_texts(written.some(n, draw), draw, style)
    if draw.random() < 0.4:
        return answered(written.question(draw), joined(texts))
    numbers = draw.choice((False, True))
    return answered(written.question(draw), listed(texts, numbers=numbers))


def json_array(sources: Sources, draw: Draw) -> Composed:
    """An array of names."""
    written, n = of_a_list(sources, draw)
    wording = worded("json array", draw, said=lambda: number(n, draw), what=written.what)
    text = json.dumps([part.name for part in written.some(n, draw)])
    return answered(wording, text, ("json", {"array": True, "length": n}))


def json_object(sources: Sources, draw: Draw) -> Composed:
    """An object with keys."""
    written = sources.any(draw)
    part = draw.choice(written.parts)
    name, fact = draw.choice((("name", "fact"), ("topic", "text"), ("title", "note")))
    what = f"one of these: {written.what}" if written.listed else f"one fact about {written.what}"
    wording = worded("json object", draw, about=what, name=name, fact=fact)
    text = json.dumps({name: part.name, fact: part.first})
    return answered(wording, text, ("json", {"keys": [name, fact]}))


# Texts of a length


def sentences(sources: Sources, draw: Draw) -> Composed:
    """So many sentences, in one thread."""
    written, n = sources.any(draw), draw.randint(1, 5)
    wording = worded("sentences", draw, said=number(n, draw), s="s" * (n > 1))
    text = " ".join(part.first for part in written.some(n, draw))
    return about(written, draw, wording, text, ("sentences", exactly(n)))


def one_paragraph(sources: Sources, draw: Draw) -> Composed:
    """One paragraph, in one thread."""
    written = sources.any(draw)
    wording = worded("one paragraph", draw)
    return about(written, draw, wording, prose(written, 2, 4, draw), ("paragraphs", exactly(1)))


def paragraphs(sources: Sources, draw: Draw) -> Composed:
    """So many paragraphs, a chunk each."""
    written, n = sources.any(draw), draw.randint(2, 4)
    wording = worded("paragraphs", draw, said=number(n, draw))
    answer = joined(paragraphs_of(written.some(n, draw)))
    return about(written, draw, wording, answer, ("paragraphs", exactly(n)))


def most_words(sources: Sources, draw: Draw) -> Composed:
    """At most so many words, in one thread."""
    written = sources.any(draw)
    text = prose(written, 1, 3, draw)
    n = next(n for n in WORD_LIMITS if n >= len(text.split()))
    wording = worded("most words", draw, n=n, more=n + 1)
    return about(written, draw, wording, text, ("words", {"at_most": n}))


def least_words(sources: Sources, draw: Draw) -> Composed:
    """At least so many words, a paragraph a chunk."""
    written = sources.any(draw)
    parts = written.some(draw.randint(3, len(written.parts)), draw)
    n = sum(len(part.both.split()) for part in parts) // 10 * 10
    wording = worded("least words", draw, n=n, twice=2 * n)
    answer = joined(paragraphs_of(parts))
    return about(written, draw, wording, answer, ("words", {"at_least": n, "at_most": 2 * n}))


def lines(sources: Sources, draw: Draw) -> Composed:
    """So many lines, in one thread."""
    written, n = sources.any(draw), draw.randint(2, 5)
    wording = worded("lines", draw, said=number(n, draw))
    text = "\n".join(part.first for part in written.some(n, draw))
    return about(written, draw, wording, text, ("lines", exactly(n)))


def free_text(sources: Sources, draw: Draw) -> Composed:
    """A text of which nothing is asked: paragraphs of two sentences or of four."""
    written = draw.choice(sources.subjects)
    if draw.choice((False, True, True)):
        a, b, c, d = written.some(4, draw)
        texts = chunks((a, c), (f"{a.both} {b.both}", f"{c.both} {d.both}"))
    else:
        texts = paragraphs_of(written.some(draw.randint(3, len(written.parts)), draw))
    between = draw.choice(("\n\n", "\n\n", " "))
    return answered(written.question(draw), joined(texts, between))


# Texts with marks


def sections(sources: Sources, draw: Draw) -> Composed:
    """Headings, a chunk under each."""
    written, n = draw.choice(sources.subjects), draw.randint(2, 4)
    wording = worded("headings", draw, said=number(n, draw))
    parts = written.some(n, draw)
    heads = [f"## {capital(part.name)}\n\n" for part in parts]
    answer = headed(paragraphs_of(parts), heads, "\n\n")
    return about(written, draw, wording, answer, ("headings", exactly(n)))


def titled(sources: Sources, draw: Draw) -> Composed:
    """A title."""
    written = sources.any(draw)
    wording = worded("titled", draw)
    title = capital(written.what.removeprefix("a ").removeprefix("the "))
    head = draw.choice((f"# {title}", f"**{title}**", title))
    return about(
        written, draw, wording, [Span(f"{head}\n\n"), *body(written, draw)], ("titled", {})
    )


def bold(sources: Sources, draw: Draw) -> Composed:
    """Bold words."""
    written, n = sources.any(draw), draw.randint(2, 4)
    wording = worded("bold", draw)
    texts = item_texts(written.some(n, draw), draw, draw.choice(("bold first", "bold both")))
    answer = joined(texts, draw.choice(("\n", "\n\n")))
    return about(written, draw, wording, answer, ("bold", {"at_least": 1}))


def cased(sources: Sources, draw: Draw) -> Composed:
    """Capitals or small letters only, in one thread."""
    written = sources.any(draw)
    text = prose(written, 1, 2, draw)
    kind = "upper" if draw.random() < 0.5 else "lower"
    wording = worded(kind, draw)
    text = text.upper() if kind == "upper" else text.lower()
    return about(written, draw, wording, text, (kind, {}))


def quoted(sources: Sources, draw: Draw) -> Composed:
    """Quotation marks around it, in one thread."""
    written = sources.any(draw)
    text = prose(written, 1, 3, draw)
    return about(written, draw, worded("in quotes", draw), f'"{text}"', ("quoted", {}))


# Words that are there, and those that are not


def includes(sources: Sources, draw: Draw) -> Composed:
    """Words that are in it."""
    written = sources.any(draw)
    tree = merged(body(written, draw))
    known = set(re.findall(r"[a-z]{4,}", written.question(draw).casefold()))
    there = sorted(set(re.findall(r"\b[a-z]{5,}\b", strip(tree))) - known)
    if not there:
        return includes(sources, draw)
    words = draw.sample(there, min(len(there), draw.choice((1, 1, 2))))
    wording = worded("includes", draw, **named(words))
    return about(written, draw, wording, tree, ("includes", {"strings": words}))


def occurs(sources: Sources, draw: Draw) -> Composed:
    """A word that is in it so often."""
    written = draw.choice(sources.subjects)
    tree = merged(body(written, draw))
    text = strip(tree).casefold()
    counts = {one: len(re.findall(rf"\b{one}\b", text)) for one in re.findall(r"[a-z]{4,}", text)}
    word = draw.choice(sorted(counts, key=lambda one: (-counts[one], one))[:4])
    n = counts[word]
    wording = f'Use the word "{word}" at least {number(n, draw)} time{"s" * (n > 1)}.'
    check = {"word": word, "at_least": n}
    if n == 1 and draw.random() < 0.6:
        wording = worded("once", draw, word=word)
        check["at_most"] = 1
    return about(written, draw, wording, tree, ("occurs", check))


def excludes(sources: Sources, draw: Draw) -> Composed:
    """Words that one would expect and that are not in it."""
    written = sources.any(draw)
    tree = merged(body(written, draw))
    there = set(re.findall(r"\w+", strip(tree).casefold()))
    absent = [one for one in DEMANDS["common words"] if one not in there]
    words = draw.sample(absent, draw.choice((1, 1, 2)))
    wording = worded("excludes", draw, **named(words))
    return about(written, draw, wording, tree, ("excludes", {"strings": words}))


def without(sources: Sources, draw: Draw) -> Composed:
    """Characters that are not in it, commas most often."""
    written = sources.any(draw)
    parts = [part for part in written.parts if "," not in part.both]
    if len(parts) < 2:
        return without(sources, draw)
    texts = paragraphs_of(draw.sample(parts, draw.randint(2, len(parts))))
    tree = merged(joined(texts, draw.choice((" ", "\n\n"))))
    absent = [one for one in CHARACTERS if not set(one) & set(strip(tree))]
    character = draw.choice([",", *absent])
    wording = worded("without", draw, said=CHARACTERS[character])
    return about(written, draw, wording, tree, ("without", {"characters": character}))


# First and last words


def begins(sources: Sources, draw: Draw) -> Composed:
    """First words."""
    written = sources.any(draw)
    opening = draw.choice(DEMANDS["openings"])
    string = opening[:-1]
    wording = worded("begins", draw, string=string)
    gap = draw.choice((" ", "\n\n"))
    answer = [Span(opening + gap), *body(written, draw)]
    return about(written, draw, wording, answer, ("begins", {"string": string}))


def ends(sources: Sources, draw: Draw) -> Composed:
    """Last words, or a question at the end."""
    written = sources.any(draw)
    if draw.random() < 0.3:
        string, closing = "?", draw.choice(DEMANDS["closing questions"])
        wording = worded("ends with a question", draw)
    else:
        string = draw.choice(DEMANDS["closings"])
        closing = string if string.endswith("?") else f"{string}."
        wording = worded("ends", draw, string=string)
    nodes = body(written, draw)
    gap = draw.choice((" ", "\n\n"))
    return about(
        written, draw, wording, [*nodes, Span(gap + closing)], ("ends", {"string": string})
    )


def begins_and_ends(sources: Sources, draw: Draw) -> Composed:
    """Both."""
    first, last = begins(sources, draw), ends(sources, draw)
    ((_, asked),) = first.checks
    opening = Span(f"{asked['string']}.\n\n")
    wording = f'{last.instruction} Begin with "{asked["string"]}".'
    return answered(wording, [opening, *last.tree], *last.checks, *first.checks)


# Short answers


def total(_sources: Sources, draw: Draw) -> Composed:
    """Sums, products and differences."""
    a, b, c = (draw.randint(2, 30) for _ in range(3))
    n, price = draw.randint(2, 9), draw.choice((2, 3, 4, 5, 10, 20))
    line = draw.choice(DEMANDS["sums"]).format(a=a, b=b, c=c, n=n, price=price, both=a + b)
    question, reckoned = cells(line)
    first, *rest = reckoned.split()
    value = int(first)
    for sign, further in zip(rest[::2], rest[1::2], strict=True):
        value = RECKONING[sign](value, int(further))
    how, form = cells(draw.choice((" | {reckoned} = {value}", *DEMANDS["total"])))
    text = form.format(reckoned=reckoned, value=value).replace("//", "\n\n")
    return answered(f"{question} {how}".strip(), text, ("total", {"value": value}))


def fact(_sources: Sources, draw: Draw) -> Composed:
    """A short fact."""
    question, word, sentence = cells(draw.choice(DEMANDS["facts"]))
    how, text = draw.choice(
        (("", sentence), (" Answer briefly.", sentence), (" A short answer, please.", f"{word}."))
    )
    return answered(question + how, capital(text), ("includes_any", {"strings": [word]}))


def one_word(_sources: Sources, draw: Draw) -> Composed:
    """Yes or no, true or false, a letter, a label."""
    only = draw.choice(DEMANDS["one word"])
    kinds = ("questions of yes or no", "statements", "letters", "labels", "reviews")
    kind = kinds[draw.randrange(len(kinds))]
    text, answer = cells(draw.choice(DEMANDS[kind]))
    match kind:
        case "questions of yes or no":
            instruction = f"{text} {draw.choice(DEMANDS['yes or no'])}"
        case "statements":
            instruction = worded("true or false", draw, text=text, only=only)
        case "letters":
            instruction = f"{text} The letter is enough."
        case "labels":
            instruction = f"{text} {only}"
        case _:
            instruction = worded("positive or negative", draw, text=text, only=only)
    said = answer if kind == "letters" else capital(answer)
    end = draw.choice(("", "."))
    return answered(instruction, said + end, ("one_of", {"strings": [answer]}))


def rewritten(_sources: Sources, draw: Draw) -> Composed:
    """Spelling, copying, capitals, another name."""
    kind = draw.randrange(4)
    if kind == 0:
        sentence, wrong, right = cells(draw.choice(DEMANDS["misspelt"]))
        instruction = f'{draw.choice(DEMANDS["correct"])} "{sentence}"'
        return answered(
            instruction, sentence.replace(wrong, right), ("includes", {"strings": [right]})
        )
    sentence = draw.choice(DEMANDS["to be copied"])
    if kind == 1:
        instruction = f"{draw.choice(DEMANDS['copy'])} {sentence}"
        return answered(instruction, sentence, ("one_of", {"strings": [sentence.rstrip(".")]}))
    if kind == 2:
        instruction = f"{draw.choice(DEMANDS['capitals'])} {sentence}"
        return answered(instruction, sentence.upper(), ("upper", {}))
    old, new = draw.sample(DEMANDS["names"], 2)
    doing = draw.choice(DEMANDS["doings of somebody"])
    return answered(
        f'Write {new} in place of {old}: "{doing.format(name=old)}"',
        doing.format(name=new),
        ("includes", {"strings": [new]}),
        ("excludes", {"strings": [old]}),
    )


# How often each is drawn. Some have no demand, so that demands and not habit decide.
MAKERS: dict[Maker, int] = {
    bullets: 14, numbered: 10, items: 10, free_list: 12, json_array: 3, json_object: 2,
    sentences: 8, one_paragraph: 5, paragraphs: 7, most_words: 7, least_words: 5, free_text: 14,
    sections: 4, includes: 6, occurs: 4, excludes: 5, without: 5, begins: 5, ends: 5,
    begins_and_ends: 2, cased: 5, quoted: 2, titled: 4, bold: 3, lines: 3, total: 7, fact: 3,
    one_word: 8, rewritten: 5,
}  # fmt: skip


def compose(
    sources: Sources, count: int, seed: int, count_tokens: Callable[[str], int]
) -> Iterator[Row]:
    """Yield so many rows, no instruction twice."""
    draw, seen = Draw(seed), set[str]()
    while len(seen) < count:
        (maker,) = draw.choices(list(MAKERS), list(MAKERS.values()))
        one = maker(sources, draw)
        checks = [make_check(kind, arguments) for kind, arguments in one.checks]
        if one.instruction in seen or not all(check.passes(strip(one.tree)) for check in checks):
            continue
        seen.add(one.instruction)
        asked = [{"kind": kind, "arguments": arguments} for kind, arguments in one.checks]
        response = show(with_lengths(one.tree, count_tokens))
        yield Row(
            f"demand-{len(seen):04}", SOURCE, one.instruction, response, extra={"checks": asked}
        )


def with_lengths(tree: Tree, count_tokens: Callable[[str], int]) -> Tree:
    """Return the same with promises of the chunks' lengths."""
    found = tuple(
        replace(node, tokens=valid_tokens(count_tokens(node.text)))
        if isinstance(node, Chunk)
        else node
        for node in tree
    )
    assert read(show(found)) == found
    return found


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    write_rows(options.out, compose(read_parts(), options.count, options.seed, token_counter()))


if __name__ == "__main__":
    main()
