"""A tokenizer as decoding needs it: token texts, and the sets of tokens banned in some places."""

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
"""The decoded text of a character's bytes while some are missing."""

_BETWEEN_WORDS = re.compile(rf"[^\w{FRAGMENT}]|_")
_JOINS_WORDS = frozenset("-'\N{RIGHT SINGLE QUOTATION MARK}&/,+.#")


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """One tokenizer as the interpreter and the sampler see it.

    texts:   for every id, the text that it adds after other text ("" for special tokens).
    decode:  ids to the text that they add after other text, special tokens skipped.
    eos_ids: ids that end an answer.
    end:     the one of `eos_ids` to put after an answer that was cut off.
    """

    texts: tuple[str, ...]
    decode: Decode
    control: ControlTokens
    eos_ids: frozenset[int]
    end: int

    def ids_where(self, holds: Callable[[str], bool], *, also: Collection[int] = ()) -> IdArray:
        """Return the ids whose text satisfies `holds`, and those of `also`, ascending."""
        ids = {token for token, text in enumerate(self.texts) if holds(text)}
        return np.array(sorted(ids.union(also)), dtype=np.int64)

    def ids_of_words(self, folded: Sequence[str]) -> IdArray:
        """Return the ids whose text, folded by `fold_topic`, is one of `folded` and not empty."""
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
        """Tokens that may not stand in a topic. PROMISE_CLOSE, which ends it, is not among them."""
        unfit_ids = self.ids_where(_unfit_for_topic, also=self.control.ids | self.eos_ids)
        return np.setdiff1d(unfit_ids, self.promise_close_ids)

    @cached_property
    def not_topic_end(self) -> IdArray:
        """Punctuation, which `fold_topic` ignores, and parts of a character."""
        return self.ids_where(
            lambda text: FRAGMENT in text or (text != "" and not any(map(str.isalnum, text)))
        )

    @cached_property
    def starts_word(self) -> IdArray:
        return self.ids_where(lambda text: text[:1].isspace())

    @cached_property
    def not_chunk_start(self) -> IdArray:
        """Tokens that no chunk begins with: white space, empty texts, control tokens, an end."""
        special = self.control.ids | self.eos_ids
        return self.ids_where(lambda text: not text or text[0].isspace(), also=special)


def vocabulary_of(
    tokenizer: Any, control: ControlTokens, size: int, eos_ids: frozenset[int], end: int
) -> Vocabulary:
    """Read a Hugging Face tokenizer.

    size: the number of logits. Ids that the tokenizer does not have get the text "".
    """
    # Decoding through transformers takes five times as long.
    backend_decode = getattr(tokenizer, "backend_tokenizer", tokenizer).decode
    anchor = tokenizer.encode("a", add_special_tokens=False)
    anchor_chars = len(backend_decode(anchor))

    # Some tokenizers drop a leading space when they decode, so ids are decoded after an anchor.
    def following_text(ids: Sequence[int]) -> str:
        text: str = backend_decode([*anchor, *ids], skip_special_tokens=True)
        return text[anchor_chars:]

    named_tokens = min(len(tokenizer), size)
    named_texts = tuple(following_text((token,)) for token in range(named_tokens))
    texts = named_texts + ("",) * (size - named_tokens)

    def decode(ids: Sequence[int]) -> str:
        return texts[ids[0]] if len(ids) == 1 else following_text(ids)

    return Vocabulary(texts, decode, control, eos_ids, end)


def fold_topic(topic: str) -> str:
    """Return the words of a topic without case and punctuation, to compare it with others."""
    if (word := topic.strip()).isalnum():
        return word.casefold()
    return " ".join(_BETWEEN_WORDS.sub(" ", topic).split()).casefold()


def _unfit_for_topic(text: str) -> bool:
    word = text.removeprefix(" ")
    if not word.strip() or not word.isprintable() or " " in word:
        return True
    if not NOT_IN_TOPIC.isdisjoint(word):
        return True
    return not (any(map(str.isalnum, word)) or FRAGMENT in word or word in _JOINS_WORDS)
