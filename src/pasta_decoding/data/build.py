"""Building a training set: what is left out of the rows at hand, and why.

Responses may be plain or in the text form; lengths count the plain text.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from typer import Option

from pasta_decoding.data.contamination import Contamination, normalised
from pasta_decoding.data.dataset import Row, is_held_out
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Span, Tree, has_chunk, read, show, strip, valid_tokens

Split = Literal["all", "train", "held-out"]

NAMED_WITHIN_CHARS = 40

_FENCE = re.compile(r"^\s*(?:```|~~~)", re.M)
_CODE_LINE = re.compile(
    r"^(?:\s{4,}\S.*|.*[;{}]\s*|\s*(?:def|class|import|from|return|#include)\b.*)$"
)
CODE_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a row must be to stay. Lengths are in tokens of the model that will be trained.

    named_topics: at the beginning of the chunk, or right before it.
    language:     of prompt and response together; None: any.
    """

    split: Annotated[
        Split, Option(help="train leaves out the quarter of ids that is for judging.")
    ] = "all"
    question: Annotated[
        str | None,
        Option(help="Pattern whose group becomes the instruction, wherever it is found."),
    ] = None
    min_tokens: Annotated[
        int, Option(min=0, help="Leave out shorter responses, counted without tags.")
    ] = 1
    max_tokens: Annotated[
        int | None, Option(min=1, help="Leave out longer responses, counted without tags.")
    ] = None
    max_prompt_tokens: Annotated[int | None, Option(min=1, help="Leave out longer prompts.")] = None
    max_total_tokens: Annotated[
        int | None,
        Option(min=1, help="Leave out prompts that are longer together with their response."),
    ] = None
    min_chunks: Annotated[int, Option(min=0, help="Leave out responses with fewer chunks.")] = 0
    min_chunk_tokens: Annotated[int, Option(min=0, help="Do not count shorter chunks.")] = 0
    named_topics: Annotated[
        float,
        Option(min=0, max=1, help="Let at least this share of chunks begin with their topic."),
    ] = 0.0
    language: Annotated[
        str | None, Option(help="Keep one language only, by its ISO 639-1 code such as en.")
    ] = None
    code: Annotated[bool, Option(help="Keep responses with code in them.")] = True
    per_prompt: Annotated[
        int | None, Option(min=1, help="Keep so many responses of one prompt.")
    ] = None
    limit: Annotated[int | None, Option(min=1, help="Keep so many rows in all.")] = None
    seed: Annotated[
        int, Option(min=0, help="Shuffles the rows, and so decides what a limit keeps.")
    ] = 0


@dataclass(slots=True)
class Builder:
    """Chooses rows and counts, by reason, those that it leaves out.

    count_tokens:    tokens of a text.
    detect_language: ISO 639-1 code of a text.
    """

    wanted: Wanted
    count_tokens: Callable[[str], int]
    detect_language: Callable[[str], str]
    excluded: Contamination = field(default_factory=lambda: Contamination(()))
    dropped: Counter[str] = field(default_factory=Counter)

    def build(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows that stay, in an order that depends on the seed alone."""
        shuffled = [self._unwrapped(row) for row in rows]
        random.Random(self.wanted.seed).shuffle(shuffled)
        seen: set[tuple[str, str]] = set()
        of_prompt: Counter[str] = Counter()
        kept = 0
        for row in shuffled:
            if kept == self.wanted.limit:
                self.dropped["over the limit"] += 1
                continue
            tree = read(row.response)
            prompt = normalised(row.asked)
            key = (prompt, normalised(strip(tree)))
            reason = self._against(row, tree) or self._repeats(key, seen, of_prompt)
            if reason:
                self.dropped[reason] += 1
                continue
            seen.add(key)
            of_prompt[prompt] += 1
            kept += 1
            yield replace(row, response=show(tree))

    def _unwrapped(self, row: Row) -> Row:
        found = self.wanted.question and re.search(self.wanted.question, row.instruction, re.S)
        return replace(row, instruction=found[1].strip()) if found else row

    def _repeats(
        self, key: tuple[str, str], seen: set[tuple[str, str]], of_prompt: Counter[str]
    ) -> str | None:
        if key in seen:
            return "duplicate"
        return "prompt often enough" if of_prompt[key[0]] == self.wanted.per_prompt else None

    def _against(self, row: Row, tree: Tree) -> str | None:
        """Return the first reason against a row; the cheap ones come first."""
        wanted = self.wanted
        plain = strip(tree)
        held_out = is_held_out(row.id)
        reasons: Sequence[tuple[str, Callable[[], bool]]] = (
            ("of the other split", lambda: wanted.split == ("train" if held_out else "held-out")),
            ("empty", lambda: not row.instruction.strip() or not plain.strip()),
            ("malformed", lambda: any(check(row.response, topic_required=False))),
            ("annotated twice", lambda: has_chunk(read(plain))),
            ("code", lambda: not wanted.code and holds_code(plain)),
            ("in an evaluation set", lambda: row.instruction in self.excluded),
            ("few chunks", lambda: not self._has_chunks(tree)),
            ("topics not named", lambda: named_topics(tree) < wanted.named_topics),
            ("length", lambda: not self._fits(row.asked, plain)),
            ("language", lambda: not self._speaks(f"{row.instruction}\n{plain}")),
        )
        return next((reason for reason, holds in reasons if holds()), None)

    def _has_chunks(self, tree: Tree) -> bool:
        least = self.wanted.min_chunk_tokens
        chunks = [node for node in tree if isinstance(node, Chunk)]
        # Counted here: the number in the text form may be that of another model's tokens.
        enough = [one for one in chunks if valid_tokens(self.count_tokens(one.text)) >= least]
        return len(enough) >= self.wanted.min_chunks

    def _fits(self, prompt: str, plain: str) -> bool:
        wanted = self.wanted
        asked, said = self.count_tokens(prompt), self.count_tokens(plain)
        return (
            wanted.min_tokens <= said
            and _within(said, wanted.max_tokens)
            and _within(asked, wanted.max_prompt_tokens)
            and _within(asked + said, wanted.max_total_tokens)
        )

    def _speaks(self, text: str) -> bool:
        return self.wanted.language is None or self.detect_language(text) == self.wanted.language


def holds_code(plain: str) -> bool:
    """Does a response hold a fenced block, or look like code in three of ten lines?"""
    lines = [line for line in plain.splitlines() if line.strip()]
    coded = sum(bool(_CODE_LINE.match(line)) for line in lines)
    return bool(_FENCE.search(plain)) or coded > CODE_SHARE * len(lines)


def named_topics(tree: Tree) -> float:
    """Return the share of chunks whose topic's words stand at their beginning or right before.

    1 for a response without chunks. Topics made by rule are good where this is high.
    """
    places = [place for place, node in enumerate(tree) if isinstance(node, Chunk)]
    named = [_is_named(tree, place) for place in places]
    return sum(named) / len(named) if named else 1.0


def _is_named(tree: Tree, place: int) -> bool:
    chunk = tree[place]
    assert isinstance(chunk, Chunk), "called with the place of a chunk"
    before = tree[place - 1] if place else None
    lead = before.text[-NAMED_WITHIN_CHARS:] if isinstance(before, Span) else ""
    near = (lead + chunk.text[:NAMED_WITHIN_CHARS]).lower()
    words = [word for word in (chunk.topic or "").lower().split() if len(word) > 2]
    return bool(words) and all(word in near for word in words)


def _within(size: int, limit: int | None) -> bool:
    return limit is None or size <= limit
