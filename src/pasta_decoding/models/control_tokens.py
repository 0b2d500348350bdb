"""Control tokens: which ids of a vocabulary play the parts of the tags.

A promise is PROMISE_OPEN, topic tokens, and one PROMISE_CLOSE per length bucket, so the closing
token carries the length. The tokens are taken from those a vocabulary has to spare, or added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

BUCKETS = (20, 30, 40, 50, 60, 80, 100, 150, 200, 300)

_SPARE = re.compile(
    r"<unused\d+>|<\|reserved_special_token_\d+\|>"  # Gemma, Llama 3
    r"|<(?:repo_?name|file_sep|filename|gh_stars|issue_(?:start|comment|closed)"  # SmolLM2
    r"|jupyter_(?:start|text|code|output|script)|empty_output)>"
)
_ADDED_PREFIX = "<|pasta_"


@dataclass(frozen=True)
class ControlTokens:
    """Which token id plays which part of a tag; every id once.

    promise_close: length bucket in tokens -> id, ascending.
    """

    promise_open: int
    promise_close: Mapping[int, int]
    async_open: int
    async_close: int
    sync: int

    @cached_property
    def ids(self) -> frozenset[int]:
        """All control-token ids. Asked for at every token."""
        single = (self.promise_open, self.async_open, self.async_close, self.sync)
        return frozenset((*single, *self.promise_close.values()))

    def bucket(self, tokens: int) -> int:
        """Return the next larger length bucket; beyond the largest, the largest."""
        sizes = self.promise_close
        return next((size for size in sizes if size >= tokens), max(sizes))

    def is_near(self, promised: int, tokens: int) -> bool:
        """Does a chunk of `tokens` fall into the bucket `promised`, or into one next to it?"""
        sizes = sorted(self.promise_close)
        return abs(sizes.index(self.bucket(tokens)) - sizes.index(promised)) <= 1

    def promised(self, close: int) -> int:
        """Return the length that the closing token `close` carries."""
        return next(size for size, token in self.promise_close.items() if token == close)


def choose_tokens(tokenizer: Any) -> ControlTokens:
    """Choose control tokens: spare ones of the vocabulary, else tokens added to `tokenizer`."""
    wanted = len(BUCKETS) + 4
    spare = sorted(one for text, one in tokenizer.get_vocab().items() if _SPARE.fullmatch(text))
    if len(spare) < wanted:
        names = [f"{_ADDED_PREFIX}{n}|>" for n in range(wanted)]
        _add_tokens(tokenizer, names)
        spare = tokenizer.convert_tokens_to_ids(names)
    promise_open, async_open, async_close, sync, *closes = spare[:wanted]
    buckets = dict(zip(BUCKETS, closes, strict=True))
    return ControlTokens(promise_open, buckets, async_open, async_close, sync)


def is_reserved(text: str) -> bool:
    """Could `choose_tokens` have taken the token of this name, or added it?"""
    return _SPARE.fullmatch(text) is not None or text.startswith(_ADDED_PREFIX)


def add_missing_tokens(tokenizer: Any, token_texts: Mapping[int, str]) -> None:
    """Give `tokenizer` the control tokens that `choose_tokens` added for the adapter."""
    known = tokenizer.get_vocab()
    missing = [text for _, text in sorted(token_texts.items()) if text not in known]
    if missing and all(text.startswith(_ADDED_PREFIX) for text in missing):
        _add_tokens(tokenizer, missing)


def grow_vocabulary(model: Any, control: ControlTokens) -> None:
    """Make room for added control tokens in the embeddings, if they have none to spare."""
    wanted = max(control.ids) + 1
    if wanted > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(wanted)


def _add_tokens(tokenizer: Any, texts: list[str]) -> None:
    added = {"additional_special_tokens": texts}
    tokenizer.add_special_tokens(added, replace_extra_special_tokens=False)
