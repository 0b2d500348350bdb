"""Compose answers that do exactly what is asked, out of parts that were written once.

data/written_parts.txt holds things to list and subjects, each with parts: a name of one to three
words and two sentences that need none of the others. Drawn against what can be asked of an answer
(so many bullets, one paragraph, a last word) they make rows in which the request alone decides
the form: one part is an item of three words, a sentence or two, in a chunk or not. Every row
passes its own checks.

    python scripts/compose_demands.py --count 1600 --seed 1 -o data/annotated_demands.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pasta_decoding.cli.files import token_counter
from pasta_decoding.data.checks import make_check
from pasta_decoding.data.lines import write_lines
from pasta_decoding.lang.tree import Chunk, Node, Span, read, show, strip, valid_tokens

PARTS = Path(__file__).parent.parent / "data/written_parts.txt"
SOURCE = "written/demands"
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FEWEST_CHUNK_WORDS = 6
"""What is shorter is written by the main thread: a promise would cost as much."""

Draw = random.Random


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
        if self.listed:
            return draw.choice(
                (f"What are good {self.what}?", f"Tell me some {self.what}.", f"List {self.what}.")
                if self.what.startswith(("ways", "tips", "reasons", "gifts", "questions"))
                else (f"What are {self.what}?", f"Tell me some {self.what}.", f"List {self.what}.")
            )
        return draw.choice(
            (
                f"Tell me about {self.what}.",
                f"What should I know about {self.what}?",
                f"Describe {self.what}.",
                f"Write about {self.what}.",
                f"Explain {self.what} to a beginner.",
            )
        )


@dataclass(frozen=True, slots=True)
class Composed:
    """An instruction, its answer as nodes of the language, and what a program verifies of it."""

    instruction: str
    nodes: tuple[Node, ...]
    checks: tuple[tuple[str, dict[str, Any]], ...] = ()
    plain: bool = False


Maker = Callable[["Sources", Draw], Composed]


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything that was written."""

    lists: tuple[Written, ...]
    subjects: tuple[Written, ...]

    def any(self, draw: Draw) -> Written:
        """Draw a list or a subject."""
        return draw.choice((draw.choice(self.lists), draw.choice(self.subjects)))


def read_parts(path: Path) -> Sources:
    """Read the file of parts."""
    found: list[Written] = []
    for block in re.split(r"^# ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        head, *lines = block.strip().split("\n")
        kind, _, what = head.partition(": ")
        parts = tuple(Part(*(one.strip() for one in line.split("|"))) for line in lines)
        found.append(Written(what, kind == "list", parts))
    return Sources(
        tuple(one for one in found if one.listed), tuple(one for one in found if not one.listed)
    )


# Pieces


def exactly(n: int) -> dict[str, Any]:
    """Return the bounds of a count."""
    return {"at_least": n, "at_most": n}


def number(n: int, draw: Draw) -> str:
    """Write a number as people do."""
    return NUMBERS[n] if draw.random() < 0.5 else str(n)


def capital(text: str) -> str:
    """Return a text with a capital letter in front."""
    return text[:1].upper() + text[1:]


def chunks(parts: Sequence[Part], texts: Sequence[str]) -> list[Node]:
    """Return a chunk a text if they are long enough for it, else main text."""
    words = sum(len(text.split()) for text in texts)
    if words < FEWEST_CHUNK_WORDS * len(texts):
        return [Span(text) for text in texts]
    return [Chunk(part.name, 10, text) for part, text in zip(parts, texts, strict=True)]


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


def joined(texts: Sequence[Node], between: str, before: str = "", behind: str = "") -> list[Node]:
    """Return nodes with main text before, between and behind them."""
    nodes: list[Node] = [Span(before)]
    for place, text in enumerate(texts):
        nodes += [Span(between if place else ""), text]
    return [*nodes, Span(behind)]


def marked(texts: Sequence[Node], markers: Sequence[str]) -> list[Node]:
    """Return a list, an item a line."""
    nodes: list[Node] = []
    for place, (marker, text) in enumerate(zip(markers, texts, strict=True)):
        nodes += [Span(f"{chr(10) * bool(place)}{marker} "), text]
    return nodes


def merged(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return the nodes with neighbouring main text in one, and none that is empty."""
    found: list[Node] = []
    for node in nodes:
        if isinstance(node, Span) and found and isinstance(found[-1], Span):
            found[-1] = Span(found[-1].text + node.text)
        elif not isinstance(node, Span) or node.text:
            found.append(node)
    return tuple(found)


def prose(parts: Sequence[Part], draw: Draw) -> str:
    """Return one paragraph."""
    return " ".join(draw.choice((part.first, part.both)) for part in parts)


def paragraphs_of(parts: Sequence[Part]) -> list[Node]:
    """Return a paragraph a part."""
    return chunks(parts, [part.both for part in parts])


# Lists


def bullets(sources: Sources, draw: Draw) -> Composed:
    """So many bullets."""
    written = draw.choice(sources.lists)
    n = draw.randint(2, len(written.parts))
    said, what = number(n, draw), written.what
    wording = draw.choice(
        (
            f"List {said} {what} as bullet points.",
            f"{capital(said)} {what}, in bullets.",
            f"Write down {what}: {said} bullet points, no more.",
            f"{written.question(draw)} Use {said} bullet points.",
            f"I want a bulleted list of {what} that has {said} points.",
            f"Make a list of {said} {what}. Begin each line with a dash.",
            f"{written.question(draw)} Answer with exactly {said} bullets.",
            f"Use bullets, not numbers: {said} {what}.",
        )
    )
    nodes = marked(item_texts(written.some(n, draw), draw), ["-"] * n)
    return Composed(wording, merged(nodes), (("bullets", exactly(n)), ("numbered", exactly(0))))


def numbered(sources: Sources, draw: Draw) -> Composed:
    """So many numbered items."""
    written = draw.choice(sources.lists)
    n = draw.randint(2, len(written.parts))
    said, what = number(n, draw), written.what
    wording = draw.choice(
        (
            f"Number them: {said} {what}.",
            f"Write a numbered list of {said} {what}.",
            f"{capital(said)} {what}, numbered from 1 to {n}.",
            f"{written.question(draw)} Give {said} numbered points.",
            f"{written.question(draw)} Answer with exactly {said} numbered steps.",
            f"I want a numbered list of {what} that has {said} entries.",
            f"Use numbers, not bullets: {said} {what}.",
            f"Give {said} {what} and put a number before each.",
        )
    )
    markers = [f"{place}." for place in range(1, n + 1)]
    nodes = marked(item_texts(written.some(n, draw), draw), markers)
    return Composed(wording, merged(nodes), (("numbered", exactly(n)), ("bullets", exactly(0))))


def items(sources: Sources, draw: Draw) -> Composed:
    """A list of so many items at a length that is asked for."""
    written = draw.choice(sources.lists)
    n = draw.randint(2, len(written.parts))
    said, what = number(n, draw), written.what
    style, how = draw.choice(
        (
            ("name", "Only the names, please."),
            ("name", "Key words will do."),
            ("first", "One sentence each."),
            ("bold first", "A short sentence for each."),
            ("both", "Two sentences each."),
            ("bold both", "Explain each in two sentences."),
            ("colon both", "Say a little about each."),
        )
    )
    markers = draw.choice((["-"] * n, [f"{place}." for place in range(1, n + 1)]))
    nodes = marked(item_texts(written.some(n, draw), draw, style), markers)
    return Composed(f"List {said} {what}. {how}", merged(nodes), (("items", exactly(n)),))


def free_list(sources: Sources, draw: Draw) -> Composed:
    """A list of which nothing is asked."""
    written = draw.choice(sources.lists)
    n = draw.randint(3, len(written.parts))
    style = draw.choice(("both", "bold both", "colon both"))
    texts = item_texts(written.some(n, draw), draw, style)
    if draw.random() < 0.4:
        return Composed(written.question(draw), merged(joined(texts, "\n\n")))
    markers = draw.choice((["-"] * n, [f"{place}." for place in range(1, n + 1)]))
    return Composed(written.question(draw), merged(marked(texts, markers)))


def as_json_array(sources: Sources, draw: Draw) -> Composed:
    """An array of names."""
    written = draw.choice(sources.lists)
    n = draw.randint(2, len(written.parts))
    wording = draw.choice(
        (
            f"Answer with a JSON array only: {number(n, draw)} {written.what}.",
            f"Give me {number(n, draw)} {written.what} as a JSON array of strings, no other text.",
            f"Only JSON, an array: {number(n, draw)} {written.what}.",
        )
    )
    text = json.dumps([part.name for part in written.some(n, draw)])
    checks = (("json", {"array": True, "length": n}),)
    return Composed(wording, (Span(text),), checks, plain=True)


def as_json_object(sources: Sources, draw: Draw) -> Composed:
    """An object with keys."""
    written = sources.any(draw)
    part = draw.choice(written.parts)
    name, fact = draw.choice((("name", "fact"), ("topic", "text"), ("title", "note")))
    about = f"one of these: {written.what}" if written.listed else f"one fact about {written.what}"
    wording = draw.choice(
        (
            f'Write {about}, as JSON with "{name}" and "{fact}" for keys. JSON only.',
            f'Only JSON with "{name}" and "{fact}": {about}.',
            f'Give me {about}, in JSON ("{name}", "{fact}"), without any other text.',
        )
    )
    text = json.dumps({name: part.name, fact: part.first})
    return Composed(wording, (Span(text),), (("json", {"keys": [name, fact]}),), plain=True)


# Prose


def sentences(sources: Sources, draw: Draw) -> Composed:
    """So many sentences, in one thread."""
    written, n = sources.any(draw), draw.randint(1, 5)
    said, s = number(n, draw), "s" * (n > 1)
    wording = draw.choice(
        (
            f"Answer in {said} sentence{s}.",
            f"Exactly {said} sentence{s}, please.",
            f"Write {said} sentence{s}.",
            f"No more than {said} sentence{s}.",
            f"Do it in {said} sentence{s}.",
        )
    )
    text = " ".join(part.first for part in written.some(n, draw))
    checks = (("sentences", exactly(n)),)
    return Composed(f"{written.question(draw)} {wording}", (Span(text),), checks, plain=True)


def one_paragraph(sources: Sources, draw: Draw) -> Composed:
    """One paragraph, in one thread."""
    written = sources.any(draw)
    wording = draw.choice(
        ("Write one paragraph.", "Only one paragraph.", "In a single paragraph, please.")
    )
    text = prose(written.some(draw.randint(2, 4), draw), draw)
    checks = (("paragraphs", exactly(1)),)
    return Composed(f"{written.question(draw)} {wording}", (Span(text),), checks, plain=True)


def paragraphs(sources: Sources, draw: Draw) -> Composed:
    """So many paragraphs, a chunk each."""
    written, n = sources.any(draw), draw.randint(2, 4)
    said = number(n, draw)
    wording = draw.choice(
        (
            f"Write {said} paragraphs.",
            f"Answer in {said} paragraphs with an empty line between them.",
            f"Use exactly {said} paragraphs.",
            f"Make it {said} short paragraphs.",
        )
    )
    nodes = joined(paragraphs_of(written.some(n, draw)), "\n\n")
    checks = (("paragraphs", exactly(n)),)
    return Composed(f"{written.question(draw)} {wording}", merged(nodes), checks)


def most_words(sources: Sources, draw: Draw) -> Composed:
    """At most so many words, in one thread."""
    written = sources.any(draw)
    text = prose(written.some(draw.randint(1, 3), draw), draw)
    words = len(text.split())
    n = next(n for n in (15, 20, 25, 30, 40, 50, 60, 80, 100, 150) if n >= words)
    wording = draw.choice(
        (
            f"Use at most {n} words.",
            f"Stay below {n + 1} words.",
            f"Not more than {n} words.",
            f"In {n} words or fewer.",
            f"Keep it to {n} words at most.",
        )
    )
    checks = (("words", {"at_most": n}),)
    return Composed(f"{written.question(draw)} {wording}", (Span(text),), checks, plain=True)


def least_words(sources: Sources, draw: Draw) -> Composed:
    """At least so many words, a paragraph a chunk."""
    written = sources.any(draw)
    parts = written.some(draw.randint(3, len(written.parts)), draw)
    words = sum(len(part.both.split()) for part in parts)
    n = words // 10 * 10
    wording = draw.choice(
        (
            f"Use at least {n} words.",
            f"Make it {n} words or more.",
            f"Write between {n} and {2 * n} words.",
        )
    )
    nodes = joined(paragraphs_of(parts), "\n\n")
    checks = (("words", {"at_least": n, "at_most": 2 * n}),)
    return Composed(f"{written.question(draw)} {wording}", merged(nodes), checks)


def free_text(sources: Sources, draw: Draw) -> Composed:
    """A text of which nothing is asked: paragraphs of two sentences or of four."""
    written = draw.choice(sources.subjects)
    size = draw.choice(("both", "pairs", "pairs"))
    if size == "pairs":
        a, b, c, d = written.some(4, draw)
        texts: list[Node] = [
            Chunk(one.name, 10, f"{one.both} {other.both}") for one, other in ((a, b), (c, d))
        ]
    else:
        parts = written.some(draw.randint(3, len(written.parts)), draw)
        texts = item_texts(parts, draw, size)
    between = draw.choice(("\n\n", "\n\n", " "))
    return Composed(written.question(draw), merged(joined(texts, between)))


def sections(sources: Sources, draw: Draw) -> Composed:
    """Headings, a chunk under each."""
    written, n = draw.choice(sources.subjects), draw.randint(2, 4)
    said = number(n, draw)
    wording = draw.choice(
        (
            f"Use {said} Markdown headings.",
            f"Divide it by {said} headings, each with a #.",
            f'It should have {said} sections under headings like "## Name".',
        )
    )
    nodes: list[Node] = []
    parts = written.some(n, draw)
    for place, (part, text) in enumerate(zip(parts, paragraphs_of(parts), strict=True)):
        nodes += [Span(f"{chr(10) * 2 * bool(place)}## {capital(part.name)}\n\n"), text]
    checks = (("headings", exactly(n)),)
    return Composed(f"{written.question(draw)} {wording}", merged(nodes), checks)


# Words, marks and forms, asked of a text


def body(written: Written, draw: Draw) -> list[Node]:
    """Return a text of one thread, or of a few."""
    if draw.random() < 0.5:
        return [Span(prose(written.some(draw.randint(2, 3), draw), draw))]
    return joined(paragraphs_of(written.some(draw.randint(2, 4), draw)), "\n\n")


def includes(sources: Sources, draw: Draw) -> Composed:
    """Words that are in it."""
    written = sources.any(draw)
    nodes = merged(body(written, draw))
    known = set(re.findall(r"[a-z]{4,}", written.question(draw).casefold()))
    there = sorted(set(re.findall(r"\b[a-z]{5,}\b", strip(nodes))) - known)
    words = draw.sample(there, draw.choice((1, 1, 2)))
    said, s = " and ".join(f'"{one}"' for one in words), "s" * (len(words) > 1)
    wording = draw.choice(
        (
            f"Use the word{s} {said}.",
            f"The word{s} {said} should appear.",
            f"Bring in {said}.",
            f"Mention {' and '.join(words)}.",
        )
    )
    checks = (("includes", {"strings": words}),)
    return Composed(f"{written.question(draw)} {wording}", nodes, checks)


def occurs(sources: Sources, draw: Draw) -> Composed:
    """A word that is in it so often."""
    written = draw.choice(sources.subjects)
    nodes = merged(body(written, draw))
    text = strip(nodes).casefold()
    counts = {one: len(re.findall(rf"\b{one}\b", text)) for one in re.findall(r"[a-z]{4,}", text)}
    word = draw.choice(sorted(counts, key=lambda one: (-counts[one], one))[:4])
    n = counts[word]
    wording = f'Use the word "{word}" at least {number(n, draw)} time{"s" * (n > 1)}.'
    check = {"word": word, "at_least": n}
    if n == 1 and draw.random() < 0.6:
        wording = draw.choice((f'Say "{word}" once only.', f'Write the word "{word}" one time.'))
        check["at_most"] = 1
    return Composed(f"{written.question(draw)} {wording}", nodes, (("occurs", check),))


def excludes(sources: Sources, draw: Draw) -> Composed:
    """Words that one would expect and that are not in it."""
    written = sources.any(draw)
    nodes = merged(body(written, draw))
    common = "very good important because also can you people time make help many more most often"
    text = strip(nodes).casefold()
    absent = [one for one in common.split() if not re.search(rf"\b{one}\b", text)]
    words = draw.sample(absent, draw.choice((1, 1, 2)))
    said, s = " and ".join(f'"{one}"' for one in words), "s" * (len(words) > 1)
    wording = draw.choice(
        (
            f"Avoid the word{s} {said}.",
            f"Do not use the word{s} {said}.",
            f"Leave out the word{s} {said}.",
            f"Without the word{s} {said}, please.",
        )
    )
    checks = (("excludes", {"strings": words}),)
    return Composed(f"{written.question(draw)} {wording}", nodes, checks)


def without(sources: Sources, draw: Draw) -> Composed:
    """Characters that are not in it."""
    written = sources.any(draw)
    parts = [part for part in written.parts if "," not in part.both]
    if len(parts) < 2:
        return without(sources, draw)
    texts = paragraphs_of(draw.sample(parts, draw.randint(2, len(parts))))
    nodes = merged(joined(texts, draw.choice((" ", "\n\n"))))
    text = strip(nodes)
    names = {",": "commas", "!": "exclamation marks", "?": "question marks", ":": "colons",
             "*": "asterisks", "0123456789": "digits"}  # fmt: skip
    absent = [one for one in names if not set(one) & set(text)]
    character = draw.choice([one for one in (",", *absent) if one in absent])
    said = names[character]
    wording = draw.choice((f"Use no {said}.", f"Avoid {said}.", f"It must not have any {said}."))
    checks = (("without", {"characters": character}),)
    return Composed(f"{written.question(draw)} {wording}", nodes, checks)


def begins(sources: Sources, draw: Draw) -> Composed:
    """First words."""
    written = sources.any(draw)
    string, mark = draw.choice(
        (("In short", ":"), ("Sure", "."), ("Listen", "."), ("Well", "."), ("Good question", "."),
         ("Let me explain", "."), ("First of all", ":"), ("Here we go", "."), ("Hello", "."),
         ("Dear reader", ","), ("Here is what I know", ":"), ("Of course", "."))
    )  # fmt: skip
    wording = draw.choice(
        (
            f'Begin with "{string}".',
            f'Start your answer with "{string}".',
            f'Your first words must be "{string}".',
        )
    )
    gap = draw.choice((" ", "\n\n"))
    nodes = merged([Span(f"{string}{mark}{gap}"), *body(written, draw)])
    return Composed(f"{written.question(draw)} {wording}", nodes, (("begins", {"string": string}),))


def ends(sources: Sources, draw: Draw) -> Composed:
    """Last words, or a question at the end."""
    written = sources.any(draw)
    if draw.random() < 0.3:
        string, behind = (
            "?",
            draw.choice(
                ("What do you think?", "Would you like to know more?", "Which of it is new to you?")
            ),
        )
        wording = draw.choice(("Finish with a question.", "The last sentence must be a question."))
    else:
        string = draw.choice(
            ("Good luck", "That is all", "Thank you", "The end", "Try it", "See you soon",
             "Goodbye", "Best wishes", "Any questions?", "Enjoy", "Now you know", "Well done")
        )  # fmt: skip
        behind = string if string.endswith("?") else f"{string}."
        wording = draw.choice(
            (
                f'End with "{string}".',
                f'The last words must be "{string}".',
                f'Finish with "{string}".',
            )
        )
    nodes = merged([*body(written, draw), Span(f"{draw.choice((' ', chr(10) * 2))}{behind}")])
    return Composed(f"{written.question(draw)} {wording}", nodes, (("ends", {"string": string}),))


def begins_and_ends(sources: Sources, draw: Draw) -> Composed:
    """Both."""
    first, last = begins(sources, draw), ends(sources, draw)
    opening = strip(first.nodes[:1]).split("\n\n")[0].partition(". ")[0].partition(": ")[0]
    string = first.checks[0][1]["string"]
    nodes = merged([Span(f"{opening.rstrip('.:')}.\n\n"), *last.nodes])
    wording = f'{last.instruction} Begin with "{string}".'
    return Composed(wording, nodes, (*last.checks, *first.checks))


def cased(sources: Sources, draw: Draw) -> Composed:
    """Capitals or small letters only, in one thread."""
    written = sources.any(draw)
    text = prose(written.some(draw.randint(1, 2), draw), draw)
    if draw.random() < 0.5:
        wording = draw.choice(
            (
                "Use capital letters only.",
                "ALL OF IT IN CAPITALS.",
                "Write it all in capital letters.",
            )
        )
        nodes, kind = (Span(text.upper()),), "upper"
    else:
        wording = draw.choice(
            (
                "Use small letters only.",
                "Everything in lowercase, please.",
                "No capital letter at all.",
            )
        )
        nodes, kind = (Span(text.lower()),), "lower"
    return Composed(f"{written.question(draw)} {wording}", nodes, ((kind, {}),), plain=True)


def quoted(sources: Sources, draw: Draw) -> Composed:
    """Quotation marks around it, in one thread."""
    written = sources.any(draw)
    text = prose(written.some(draw.randint(1, 3), draw), draw)
    wording = draw.choice(
        ("Put all of it in double quotation marks.", "Wrap your whole answer in double quotes.")
    )
    nodes = (Span(f'"{text}"'),)
    return Composed(f"{written.question(draw)} {wording}", nodes, (("quoted", {}),), plain=True)


def titled(sources: Sources, draw: Draw) -> Composed:
    """A title."""
    written = sources.any(draw)
    wording = draw.choice(
        ("Give it a title.", "Begin with a title in a line of its own.", "Put a title above it.")
    )
    title = capital(written.what.removeprefix("a ").removeprefix("the "))
    head = draw.choice((f"# {title}", f"**{title}**", title))
    nodes = merged([Span(f"{head}\n\n"), *body(written, draw)])
    return Composed(f"{written.question(draw)} {wording}", nodes, (("titled", {}),))


def bold(sources: Sources, draw: Draw) -> Composed:
    """Bold words."""
    written, n = sources.any(draw), draw.randint(2, 4)
    wording = draw.choice(
        (
            "Set at least one word in **bold**.",
            "Make the key words **bold**, Markdown style.",
            "Highlight what matters with two stars, **like this**.",
        )
    )
    texts = item_texts(written.some(n, draw), draw, draw.choice(("bold first", "bold both")))
    nodes = merged(joined(texts, draw.choice(("\n", "\n\n"))))
    checks = (("bold", {"at_least": 1}),)
    return Composed(f"{written.question(draw)} {wording}", nodes, checks)


def lines(sources: Sources, draw: Draw) -> Composed:
    """So many lines, in one thread."""
    written, n = sources.any(draw), draw.randint(2, 5)
    said = number(n, draw)
    wording = draw.choice(
        (f"Write {said} lines, one thought a line.", f"Exactly {said} lines and nothing else.")
    )
    text = "\n".join(part.first for part in written.some(n, draw))
    checks = (("lines", exactly(n)),)
    return Composed(f"{written.question(draw)} {wording}", (Span(text),), checks, plain=True)


# Short answers that are known


def total(_sources: Sources, draw: Draw) -> Composed:
    """Sums, products and differences."""
    a, b, c = (draw.randint(2, 30) for _ in range(3))
    n, price = draw.randint(2, 9), draw.choice((2, 3, 4, 5, 10, 20))
    wording, sum_, value = draw.choice(
        (
            (f"A jacket costs {a} euros, a hat {b} and a scarf {c}. What do they cost together?",
             f"{a} + {b} + {c}", a + b + c),
            (f"Tom has {a} red and {b} blue balls. How many is that?", f"{a} + {b}", a + b),
            (f"A ticket is {price} pounds. How much are {n} tickets?", f"{n} x {price}", n * price),
            (f"A walk takes {a} minutes, lunch {b} and the way back {c}. How long is it in all?",
             f"{a} + {b} + {c}", a + b + c),
            (f"{n} boxes hold {price} pens each. How many pens are there?", f"{n} x {price}",
             n * price),
            (f"Of {a + b} apples {b} are eaten. How many are left?", f"{a + b} - {b}", a),
            (f"What is {a} plus {b}?", f"{a} + {b}", a + b),
            (f"What is {n} times {price}?", f"{n} x {price}", n * price),
        )
    )  # fmt: skip
    how = draw.choice(
        (
            "",
            "The number alone, please.",
            'Finish with "Total: N".',
            'In the last line: "Total: N".',
        )
    )
    if "alone" in how:
        text = str(value)
    else:
        text = f"{sum_} = {value}" + (f"\n\nTotal: {value}" if how else "")
    checks = (("total", {"value": value}),)
    return Composed(f"{wording} {how}".strip(), (Span(text),), checks, plain=True)


FACTS = """What is the capital of Italy?|Rome|The capital of Italy is Rome.
What is the capital of Egypt?|Cairo|The capital of Egypt is Cairo.
What is the capital of Norway?|Oslo|The capital of Norway is Oslo.
How many legs does an insect have?|six|An insect has six legs.
How many months are there in a year?|12|There are 12 months in a year.
How many corners does a pentagon have?|five|A pentagon has five corners.
How many minutes are in an hour?|60|An hour has 60 minutes.
What colour do you get from blue and yellow?|green|Blue and yellow make green.
What is the largest ocean?|Pacific|The largest ocean is the Pacific.
What is the opposite of cold?|hot|The opposite of cold is hot.
What is the plural of mouse?|mice|The plural of mouse is mice.
What is the past tense of write?|wrote|The past tense of write is wrote.
Who wrote Romeo and Juliet?|Shakespeare|William Shakespeare wrote it.
At how many degrees Celsius does water boil?|100|Water boils at 100 degrees Celsius.
Which month comes after March?|April|April comes after March.
What is a baby sheep called?|lamb|A baby sheep is called a lamb.
Which organ pumps blood?|heart|The heart pumps blood.
What is the main language of Brazil?|Portuguese|The main language of Brazil is Portuguese.
Which metal has the sign Fe?|iron|Fe stands for iron.
In which country is the Eiffel Tower?|France|The Eiffel Tower is in France."""
CHOICES = """Is a tomato an animal?|no
Is the sun a star?|yes
Is ice colder than steam?|yes
Are whales fish?|no
Is seven an even number?|no
Can penguins fly?|no
Do frogs lay eggs?|yes
Is gold a gas?|no
Is a mile longer than a metre?|yes
Is February the longest month?|no
Is Rome in Italy?|yes
Does a triangle have four sides?|no
Is a violin an instrument?|yes
Do fish live in water?|yes
Is the moon larger than the earth?|no
Is lead heavier than paper?|yes"""
TRUTHS = """A day has 24 hours.|true
Cows lay eggs.|false
Snow is warm.|false
Bees make honey.|true
The heart pumps blood.|true
An hour has 100 minutes.|false
Oslo is in Norway.|true
Owls sleep at night and hunt by day.|false
Bread is made from flour.|true
Elephants are smaller than mice.|false"""
LETTERS = """Which one is a fruit?|hammer|apple|sofa|b
Which one can fly?|eagle|horse|snail|a
Which one is a colour?|table|river|green|c
Which one is a number?|seven|cloud|bread|a
Which one is cold?|fire|ice|soup|b
Which one is a country?|violin|pencil|Spain|c
Which one is a tool?|milk|saw|song|b
Which one is a season?|winter|spoon|glass|a"""
LABELS = """Is this message spam or normal?|spam|Claim your free prize before midnight!
Is this message spam or normal?|normal|The meeting starts at ten in room four.
Is this a question or a statement?|question|Where did you put the keys?
Is this a question or a statement?|statement|The keys are on the shelf.
Is this about sport or cooking?|sport|The team scored twice in the last minute.
Is this about sport or cooking?|cooking|Stir the sauce until it is thick.
Is the writer happy or angry?|happy|What a lovely surprise, thank you so much!
Is the writer happy or angry?|angry|This is the third time you have forgotten me."""
REVIEWS = """The pizza was burnt and the waiter rude.|negative
We had a wonderful evening and will come back.|positive
The battery died after two days.|negative
My daughter loves this book.|positive
Fast delivery and a great price.|positive
The film was a waste of time.|negative
The zip broke on the first day.|negative
Friendly people and a clean beach.|positive
The bed was hard and the street loud.|negative
The guide was funny and knew everything.|positive"""
SPELLINGS = """I definately want to come.|definately|definitely
She is realy tired today.|realy|really
They beleive every word.|beleive|believe
He lives in a beatiful house.|beatiful|beautiful
The libary opens at nine.|libary|library
My freind is on holiday.|freind|friend
It is neccessary to wait.|neccessary|necessary
I recomend the red one.|recomend|recommend"""
SENTENCES = """The old clock in the hall has stopped.
Nobody knows who left the door open.
We need more chairs for the meeting.
A cold wind came from the north.
She found a letter under the mat.
The bus to the village leaves at eight."""
NAMES = (
    "Anna", "Ben", "Clara", "David", "Ella", "Frank", "Greta", "Hugo",
    "Ida", "Jonas", "Kim", "Lena", "Max", "Nora", "Omar", "Paula",
)  # fmt: skip
DOINGS = """{} lost a glove and went home.|{} likes tea but drinks coffee.
{} met the baker and bought a cake.|{} sings while the others sleep."""


def fact(_sources: Sources, draw: Draw) -> Composed:
    """A short fact."""
    question, word, sentence = draw.choice(FACTS.split("\n")).split("|")
    how, text = draw.choice(
        (("", sentence), (" Answer briefly.", sentence), (" A short answer, please.", f"{word}."))
    )
    checks = (("includes_any", {"strings": [word]}),)
    return Composed(question + how, (Span(capital(text)),), checks, plain=True)


def one_word(_sources: Sources, draw: Draw) -> Composed:
    """Yes or no, true or false, a letter, a label."""
    only = draw.choice(("One word only.", "Reply with one word.", "Nothing but that word, please."))
    kind = draw.randrange(5)
    if kind == 0:
        question, answer = draw.choice(CHOICES.split("\n")).split("|")
        how = draw.choice(("Yes or no?", "Say yes or no.", "Just yes or no.", "Yes or no only."))
        instruction = f"{question} {how}"
    elif kind == 1:
        statement, answer = draw.choice(TRUTHS.split("\n")).split("|")
        instruction = draw.choice(
            (f"True or false? {statement} {only}", f'"{statement}" Is that true or false? {only}')
        )
    elif kind == 2:
        question, a, b, c, answer = draw.choice(LETTERS.split("\n")).split("|")
        instruction = f"{question} a) {a} b) {b} c) {c}. The letter is enough."
    elif kind == 3:
        question, answer, text = draw.choice(LABELS.split("\n")).split("|")
        instruction = f'{question} "{text}" {only}'
    else:
        review, answer = draw.choice(REVIEWS.split("\n")).split("|")
        instruction = draw.choice(
            (f'Positive or negative? {only} "{review}"', f'"{review}" Positive or negative? {only}')
        )
    checks = (("one_of", {"strings": [answer]}),)
    text = answer if kind == 2 else capital(answer)
    return Composed(instruction, (Span(text + draw.choice(("", "."))),), checks, plain=True)


def rewritten(_sources: Sources, draw: Draw) -> Composed:
    """Spelling, copying, capitals, another name."""
    kind = draw.randrange(4)
    if kind == 0:
        sentence, wrong, right = draw.choice(SPELLINGS.split("\n")).split("|")
        how = draw.choice(("Correct the mistake:", "Repair the spelling:", "Write this correctly:"))
        text = sentence.replace(wrong, right)
        return Composed(f'{how} "{sentence}"', (Span(text),), (("includes", {"strings": [right]}),),
                        plain=True)  # fmt: skip
    sentence = draw.choice(SENTENCES.split("\n"))
    if kind == 1:
        how = draw.choice(("Repeat this sentence word for word:", "Write this down as it is:"))
        checks = (("one_of", {"strings": [sentence.rstrip(".")]}),)
        return Composed(f"{how} {sentence}", (Span(sentence),), checks, plain=True)
    if kind == 2:
        how = draw.choice(("Put this into capital letters:", "Write this in uppercase only:"))
        checks = (("upper", {}),)
        return Composed(f"{how} {sentence}", (Span(sentence.upper()),), checks, plain=True)
    old, new = draw.sample(NAMES, 2)
    what = draw.choice(re.split(r"[|\n]", DOINGS))
    both = (("includes", {"strings": [new]}), ("excludes", {"strings": [old]}))
    return Composed(f'Write {new} in place of {old}: "{what.format(old)}"',
                    (Span(what.format(new)),), both, plain=True)  # fmt: skip


# How often each is drawn. Some have no demand, so that demands and not habit decide.
MAKERS: dict[Maker, int] = {
    bullets: 14, numbered: 10, items: 10, free_list: 12, as_json_array: 3, as_json_object: 2,
    sentences: 8, one_paragraph: 5, paragraphs: 7, most_words: 7, least_words: 5, free_text: 14,
    sections: 4, includes: 6, occurs: 4, excludes: 5, without: 5, begins: 5, ends: 5,
    begins_and_ends: 2, cased: 5, quoted: 2, titled: 4, bold: 3, lines: 3, total: 7, fact: 3,
    one_word: 8, rewritten: 5,
}  # fmt: skip


def compose(
    sources: Sources, count: int, seed: int, count_tokens: Callable[[str], int]
) -> Iterator[dict[str, Any]]:
    """Yield so many rows, no instruction twice."""
    draw, seen = Draw(seed), set[str]()
    while len(seen) < count:
        (maker,) = draw.choices(list(MAKERS), list(MAKERS.values()))
        one = maker(sources, draw)
        checks = [make_check(kind, arguments) for kind, arguments in one.checks]
        if one.instruction in seen or not all(check.passes(strip(one.nodes)) for check in checks):
            continue
        seen.add(one.instruction)
        yield {
            "id": f"demand-{len(seen):04}",
            "source": SOURCE,
            "instruction": one.instruction,
            "response": show(with_lengths(one.nodes, count_tokens)),
            "checks": [{"kind": kind, "arguments": arguments} for kind, arguments in one.checks],
        }


def with_lengths(nodes: Sequence[Node], count_tokens: Callable[[str], int]) -> tuple[Node, ...]:
    """Return the nodes with promises of the chunks' lengths, and the same text as read back."""
    counted = tuple(
        Chunk(node.topic, valid_tokens(count_tokens(node.text)), node.text)
        if isinstance(node, Chunk)
        else node
        for node in nodes
    )
    assert read(show(counted)) == counted
    return counted


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    rows = compose(read_parts(PARTS), options.count, options.seed, token_counter())
    write_lines(options.out, rows)


if __name__ == "__main__":
    main()
