"""A vocabulary with one token a byte, so that most characters are cut over tokens."""

from __future__ import annotations

from collections.abc import Sequence

from pasta_decoding.runtime.vocabulary import Vocabulary
from tests.law.world import CONTROL, END

# One token a byte: the id of a byte is the byte plus this.
FIRST_BYTE = 10


def decode(ids: Sequence[int]) -> str:
    kept = bytes(token - FIRST_BYTE for token in ids if token >= FIRST_BYTE)
    return kept.decode("utf-8", errors="replace")


def ids(text: str) -> list[int]:
    return [byte + FIRST_BYTE for byte in text.encode()]


SIZE = FIRST_BYTE + 256
TEXTS = tuple(decode([token]) for token in range(SIZE))
VOCABULARY = Vocabulary(TEXTS, decode, CONTROL, frozenset({END}), END)
