"""Chat messages to token ids, so that foreign text can never act.

Foreign text (what users, system prompts and history say) is tokenised by itself, by a copy of
the tokenizer that knows no added token; only the chat template's own text may become special
tokens. `<|im_end|>` in a user's message is therefore ten ordinary characters.

For harmless text the ids equal those of `apply_chat_template`, except at the seams: a token
never spans a border between template and content, so content that begins with line breaks
right behind the template's own line break may be cut differently, and sentencepiece
tokenizers that put a space in front of every text do so for every content.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pasta_decoding.errors import TOO_LONG, PastaError, errors_as

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant")

# Letters and digits only: nothing that a template would escape, trim or split at.
_PLACEHOLDER = re.compile(r"PastaContent(\d{6})Here")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `role` is one of `ROLES`; `content` is foreign text."""

    role: str
    content: str


class PromptEncoder:
    """Turns conversations and foreign text into ids for one tokenizer.

    It copies what it needs from the tokenizer when it is made, so tokens that are added later are
    unknown to it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, forbidden_ids: Collection[int] = ()
    ) -> None:
        """`forbidden_ids`: control tokens that are ordinary entries of the vocabulary."""
        self._tokenizer = tokenizer
        self._foreign, dropped_ids = _without_added_tokens(tokenizer)
        self._forbidden = dropped_ids | frozenset(forbidden_ids)

    def encode(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> list[int]:
        _check_conversation(messages)
        _refuse_longer(len(messages), "messages", max_tokens)
        contents = [message.content for message in messages]
        if self._tokenizer.chat_template is None:
            return self.encode_plain("\n\n".join(contents), max_tokens=max_tokens)
        self._refuse_huge(contents, max_tokens)
        ids = self._encode_by_template(messages)
        _refuse_longer(len(ids), "tokens", max_tokens)
        return ids

    def encode_plain(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text to go on from: no chat template, but what begins a text."""
        self._refuse_huge([text], max_tokens)
        opening = self._tokenizer.encode("", add_special_tokens=True)
        ids = [*opening, *self.encode_text(text)]
        _refuse_longer(len(ids), "tokens", max_tokens)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of foreign text by itself; never a special or control token."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"the text is not valid UTF-8, at character {error.start + 1}"
            raise PastaError(message) from error
        encoding = self._foreign.encode(text, add_special_tokens=False)
        if self._forbidden.isdisjoint(encoding.ids):
            return list(encoding.ids)
        # The model's vocabulary itself spells a forbidden token (some tokenizers look whole
        # words up before they merge). Cut inside it and encode the parts on their own.
        cuts = {0, len(text)}
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._forbidden:
                cuts.add(start + 1)
                if end - start < 2:
                    only = self._tokenizer.convert_ids_to_tokens(token)
                    raise PastaError(
                        "the text holds a character that this tokenizer can only write as "
                        f"{only!r}, at character {start + 1}"
                    )
        parts = (text[start:end] for start, end in pairwise(sorted(cuts)))
        return [token for part in parts for token in self.encode_text(part)]

    def _encode_by_template(self, messages: Sequence[Message]) -> list[int]:
        names = [f"PastaContent{index:06}Here" for index in range(len(messages))]
        rendered = self._render(messages, names)
        # A template that trims contents renders padded placeholders as it does bare ones.
        trims = self._render(messages, [f" {name} " for name in names]) == rendered
        ids: list[int] = []
        for piece, index in self._pieces(rendered, len(messages)):
            ids += self._tokenizer.encode(
                piece, add_special_tokens=False, split_special_tokens=False
            )
            if index is not None:
                content = messages[index].content
                ids += self.encode_text(content.strip() if trims else content)
        return ids

    def _render(self, messages: Sequence[Message], contents: Sequence[str]) -> str:
        turns = zip(messages, contents, strict=True)
        talk = [{"role": message.role, "content": content} for message, content in turns]
        refused = f"the chat template of {self._name()} refuses this conversation"
        with errors_as(refused, Exception):
            rendered = self._tokenizer.apply_chat_template(
                talk, tokenize=False, add_generation_prompt=True
            )
        assert isinstance(rendered, str), "one conversation renders to one text"
        return rendered

    def _pieces(self, rendered: str, contents: int) -> Iterator[tuple[str, int | None]]:
        """Cut at the placeholders: (template text, which content follows it)."""
        parts = _PLACEHOLDER.split(rendered)
        indices = [int(index) for index in parts[1::2]]
        if sorted(indices) != list(range(contents)):
            raise PastaError(
                f"the chat template of {self._name()} does not show every message exactly once"
            )
        return zip(parts[::2], [*indices, None], strict=True)

    def _refuse_huge(self, texts: Sequence[str], max_tokens: int | None) -> None:
        """Refuse a huge text before time and memory go into tokenising it."""
        characters = sum(map(len, texts))
        if max_tokens is not None and characters > max_tokens:
            longest = max(map(len, self._foreign.get_vocab()), default=1)
            if characters > max_tokens * longest:
                _refuse_longer(characters, "characters", max_tokens)

    def _name(self) -> str:
        return self._tokenizer.name_or_path or "this tokenizer"


def _without_added_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Tokenizer, frozenset[int]]:
    """Return a copy that knows no added token, and the ids that it must never produce.

    `split_special_tokens=True` alone would not do: it lets added tokens through that are not
    flagged special. Added runs of white space (Gemma has them) stay: they are formatting.
    """
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise PastaError(f"the tokenizer of {tokenizer.name_or_path} has no tokenizer.json")
    copy = Tokenizer(backend.model)  # which is shared: to build one takes seconds
    copy.normalizer, copy.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    copy.post_processor = backend.post_processor
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    of_model = backend.get_vocab_size(with_added_tokens=False)
    kept = {id_: one for id_, one in added.items() if _is_white_space(one) and id_ < of_model}
    copy.add_tokens(list(kept.values()))
    return copy, frozenset(added.keys() - kept.keys())


def _is_white_space(token: AddedToken) -> bool:
    # U+2581 is how sentencepiece vocabularies write a space.
    return not token.special and token.content.replace("\u2581", " ").isspace()


def _check_conversation(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.role not in ROLES:
            raise PastaError(f"unknown role {message.role!r}; roles are {', '.join(ROLES)}")
    if not messages or (messages[-1].role == "user" and not messages[-1].content.strip()):
        raise PastaError("the prompt is empty")
    if messages[-1].role != "user":
        raise PastaError(f"the conversation ends with the {messages[-1].role}'s words")


def _refuse_longer(size: int, unit: str, max_tokens: int | None) -> None:
    if max_tokens is not None and size > max_tokens:
        message = f"the prompt is too long: {size} {unit}, at most {max_tokens} tokens fit"
        raise PastaError(message, code=TOO_LONG)
