"""What an answer must know of a tokenizer: token texts, and which tokens may stand where.

Shapes: V vocabulary.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.lang.tree import NOT_IN_TOPIC

IdArray = npt.NDArray[np.int64]
Decode = Callable[[Sequence[int]], str]

FRAGMENT = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of a character decode to while some are missing."""

_BETWEEN_WORDS = re.compile(rf"[^\w{FRAGMENT}]|_")
_JOINS_WORDS = frozenset("-'\N{RIGHT SINGLE QUOTATION MARK}&/,+.#")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """One tokenizer as the interpreter and the sampler see it.

    texts:  for every id, the text that it adds behind other text ("" for special tokens).
    decode: ids to text, behind other text; special tokens give nothing.
    eos_ids: ids that end an answer, of which
    end:     is the one behind an answer whose end nobody chose.
    """

    texts: tuple[str, ...]
    decode: Decode
    control: ControlTokens
    eos_ids: frozenset[int]
    end: int

    def ids_where(self, holds: Callable[[str], bool], *, also: Collection[int] = ()) -> IdArray:
        ids = {token for token, text in enumerate(self.texts) if holds(text)}
        return np.array(sorted(ids.union(also)), dtype=np.int64)

    def ids_of_words(self, folded: Sequence[str]) -> IdArray:
        """Return the ids whose text, as `fold_topic` has it, is one of `folded` and not empty."""
        ids = [token for words in folded for token in self._ids_by_words.get(words, ())]
        return np.array(ids, dtype=np.int64)

    @cached_property
    def _ids_by_words(self) -> dict[str, list[int]]:
        ids: dict[str, list[int]] = {}
        for token, text in enumerate(self.texts):
            if words := fold_topic(text):
                ids.setdefault(words, []).append(token)
        return ids

    def control_except(self, ids: Collection[int]) -> IdArray:
        """Return all control tokens but `ids`."""
        return np.array(sorted(self.control.ids - set(ids)), dtype=np.int64)

    @cached_property
    def promise_close_ids(self) -> IdArray:
        return np.array(sorted(self.control.promise_close.values()), dtype=np.int64)

    @cached_property
    def not_in_topic(self) -> IdArray:
        """The ids that may not stand in a topic, PROMISE_CLOSE aside: it ends the topic."""
        not_closing = self.control_except(self.promise_close_ids.tolist())
        unfit_ids = self.ids_where(_unfit_for_topic, also=self.eos_ids.union(not_closing.tolist()))
        return np.setdiff1d(unfit_ids, self.promise_close_ids)

    @cached_property
    def not_topic_end(self) -> IdArray:
        """Punctuation alone, which tells no two topics apart, and parts of a character."""
        return self.ids_where(
            lambda text: FRAGMENT in text or (text != "" and not any(map(str.isalnum, text)))
        )

    @cached_property
    def starts_word(self) -> IdArray:
        return self.ids_where(lambda text: text[:1].isspace())

    @cached_property
    def not_chunk_start(self) -> IdArray:
        """What a chunk may not begin with: white space, nothing visible, control tokens, an end."""
        also = self.control.ids | self.eos_ids
        return self.ids_where(lambda text: not text or text[0].isspace(), also=also)


def vocabulary_of(
    tokenizer: Any, control: ControlTokens, size: int, eos_ids: frozenset[int], end: int
) -> Vocabulary:
    """Read a Hugging Face tokenizer; `size` is the number of logits, which may exceed it."""
    # Decoding through transformers takes five times as long.
    plain = getattr(tokenizer, "backend_tokenizer", tokenizer).decode
    anchor = tokenizer.encode("a", add_special_tokens=False)
    lead = len(plain(anchor))

    # Some tokenizers drop a leading space from what they decode: decode behind an anchor.
    def following_text(ids: Sequence[int]) -> str:
        text: str = plain([*anchor, *ids], skip_special_tokens=True)
        return text[lead:]

    named_tokens = min(len(tokenizer), size)
    unnamed_tokens = size - named_tokens
    texts = (
        tuple(following_text((token,)) for token in range(named_tokens)) + ("",) * unnamed_tokens
    )

    def decode(ids: Sequence[int]) -> str:
        return texts[ids[0]] if len(ids) == 1 else following_text(ids)

    return Vocabulary(texts, decode, control, eos_ids, end)


def fold_topic(topic: str) -> str:
    """Return the form in which two topics are compared: words, without case and punctuation."""
    if (word := topic.strip()).isalnum():
        return word.casefold()
    return " ".join(_BETWEEN_WORDS.sub(" ", topic).split()).casefold()


def _unfit_for_topic(text: str) -> bool:
    inner = text[1:] if text[:1] == " " else text
    return (
        not inner.strip()
        or not inner.isprintable()
        or " " in inner
        or not NOT_IN_TOPIC.isdisjoint(inner)
        or (
            not any(map(str.isalnum, inner)) and FRAGMENT not in inner and inner not in _JOINS_WORDS
        )
    )
