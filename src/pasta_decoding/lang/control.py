"""Control tokens: the parts of tags as single tokens of a vocabulary.

A promise is PROMISE_OPEN, topic tokens and PROMISE_CLOSE. Each length bucket has a PROMISE_CLOSE of
its own, so the closing token carries the length. Control tokens are spare tokens of the vocabulary
or added to it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

PARTS = 4  # control tokens besides those of PROMISE_CLOSE
BUCKETS = (20, 30, 40, 50, 60, 80, 100, 150, 200, 300)  # tokens

SPARE_NAME = re.compile(
    r"<unused\d+>|<\|reserved_special_token_\d+\|>"  # Gemma, Llama 3
    r"|<(?:repo_?name|file_sep|filename|gh_stars|issue_(?:start|comment|closed)"  # SmolLM2
    r"|jupyter_(?:start|text|code|output|script)|empty_output)>"
)
ADDED_PREFIX = "<|pasta_"


@dataclass(frozen=True)
class ControlTokens:
    """The token id of each part of a tag.

    promise_close: length bucket in tokens -> id, ascending.
    """

    promise_open: int
    promise_close: Mapping[int, int]
    async_open: int
    async_close: int
    sync: int

    @cached_property
    def ids(self) -> frozenset[int]:
        """All control-token ids. Cached because every decoded token needs them."""
        single = (self.promise_open, self.async_open, self.async_close, self.sync)
        return frozenset((*single, *self.promise_close.values()))

    @property
    def distinct(self) -> bool:
        """Does no id play two parts?"""
        return len(self.ids) == PARTS + len(self.promise_close)

    def bucket(self, tokens: int) -> int:
        """Return the next larger length bucket; beyond the largest, the largest."""
        sizes = self.promise_close
        return next((size for size in sizes if size >= tokens), max(sizes))

    def promised(self, close: int) -> int:
        """Return the length that a PROMISE_CLOSE id carries."""
        return next(size for size, token in self.promise_close.items() if token == close)


def is_reserved(text: str) -> bool:
    """Could a token of this name be a control token of some checkpoint?"""
    return SPARE_NAME.fullmatch(text) is not None or text.startswith(ADDED_PREFIX)
