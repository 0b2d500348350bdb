"""Chat messages to token ids, so that foreign text can never act.

Foreign text (what users, system prompts and history say) is tokenised by itself, by a copy of
the tokenizer that knows no added token; only the chat template's own text may become special
tokens. `<|im_end|>` in a user's message is therefore ten ordinary characters.

For harmless text the ids equal those of `apply_chat_template`, except at the seams: a token
never spans a border between template and content, so content that begins with line breaks
right behind the template's own line break may be cut differently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.models.template import ROLES, ChatTemplate, Message

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerBase


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
        self._control = frozenset(forbidden_ids)
        self._forbidden = dropped_ids | self._control
        self._line, behind_line = (
            self._foreign.encode(text, add_special_tokens=False).ids for text in ("\n", "\na")
        )
        self._puts_blanks = behind_line != [*self._line, *self.encode_text("a")]
        # The tokenizer may also put a token behind a text, which a prompt goes on from.
        own, with_ends = self.encode_text("a"), tokenizer.encode("a", add_special_tokens=True)
        self._opening = with_ends[: with_ends.index(own[0])] if own else with_ends
        self._template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)

    def encode(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> list[int]:
        _check_conversation(messages)
        _refuse_longer(len(messages), "messages", max_tokens)
        contents = [message.content for message in messages]
        if self._template is None:
            return self.encode_plain("\n\n".join(contents), max_tokens=max_tokens)
        self._refuse_huge(contents, max_tokens)
        ids = self._encode_by(self._template, messages)
        _refuse_longer(len(ids), "tokens", max_tokens)
        return ids

    def encode_plain(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a text to go on from: no chat template, but what begins a text."""
        self._refuse_huge([text], max_tokens)
        ids = [*self._opening, *self.encode_text(text)]
        _refuse_longer(len(ids), "tokens", max_tokens)
        return ids

    def encode_text(self, text: str, *, behind: bool = False) -> list[int]:
        """Return the ids of foreign text, never special ones; no blank comes before it `behind`."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"the text is not valid UTF-8, at character {error.start + 1}"
            raise PastaError(message) from error
        lead, skipped = ("\n", len(self._line)) if behind and self._puts_blanks else ("", 0)
        encoding = self._foreign.encode(lead + text, add_special_tokens=False)
        if encoding.ids[:skipped] != self._line[:skipped]:
            return self.encode_text(text)
        ids: list[int] = encoding.ids[skipped:]
        if self._forbidden.isdisjoint(ids):
            return ids
        # The model's vocabulary itself spells a forbidden token (some tokenizers look whole
        # words up before they merge). Cut inside it and encode the parts on their own.
        cuts = {0, len(text)}
        for token, (start, end) in zip(ids, encoding.offsets[skipped:], strict=True):
            if token in self._forbidden:
                cuts.add(start + 1 - len(lead))
                if end - start < 2:
                    only = self._tokenizer.convert_ids_to_tokens(token)
                    raise PastaError(
                        "the text holds a character that this tokenizer can only write as "
                        f"{only!r}, at character {start + 1 - len(lead)}"
                    )
        parts = [text[start:end] for start, end in pairwise(sorted(cuts))]
        found = self.encode_text(parts[0], behind=behind)
        return found + [one for part in parts[1:] for one in self.encode_text(part, behind=True)]

    def _encode_by(self, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
        rendered = template.render(messages, [message.content for message in messages])
        shown = template.cut(messages, rendered)
        if shown is None:
            return self._encode_whole(template, messages, rendered)
        ids: list[int] = []
        for piece, content in shown:
            ids += self._encode_shown(piece, content, behind=self._puts_blanks and bool(ids))
        return ids

    def _encode_shown(self, piece: str, content: str, *, behind: bool) -> list[int]:
        """Return the ids of template text and of the content behind it, which may bring a blank."""
        own, whole = (self._encode_acting(text, behind=behind) for text in (piece, f"{piece}a"))
        brought = self.encode_text("a")
        if content and self._puts_blanks and whole[-len(brought) :] == brought:
            return [*whole[: -len(brought)], *self.encode_text(content)]
        return [*own, *self.encode_text(content, behind=True)]

    def _encode_acting(self, text: str, *, behind: bool = False) -> list[int]:
        """Encode a template's text, in which special tokens act."""
        settings = {"add_special_tokens": False, "split_special_tokens": False}
        ids: list[int] = self._tokenizer.encode(f"\n{text}" if behind else text, **settings)
        skipped = len(self._line) if behind else 0
        is_apart = ids[:skipped] == self._line[:skipped]
        return ids[skipped:] if is_apart else self._encode_acting(text)

    def _encode_whole(
        self, template: ChatTemplate, messages: Sequence[Message], rendered: str
    ) -> list[int]:
        """Encode contents with a template that looks into them; refuse any that could act."""
        added = [text for text in self._tokenizer.get_added_vocab() if not text.isspace()]
        edges = {character for text in added for character in (text[0], text[-1])}
        marked = template.render(messages, [f"\u200b{one.content}\u200b" for one in messages])
        ids = self._encode_acting(rendered)
        acts = [one for one in ids if one in self._forbidden]
        # A token that covers a content would be broken by marks around it.
        seams = acts != [one for one in self._encode_acting(marked) if one in self._forbidden]
        clear = all(edges.isdisjoint(message.content) for message in messages)
        if seams or not clear or not self._control.isdisjoint(ids):
            raise PastaError(f"{template.name} looks into messages, and one could be taken for it")
        return ids

    def _refuse_huge(self, texts: Sequence[str], max_tokens: int | None) -> None:
        """Refuse a huge text before time and memory go into tokenising it."""
        characters = sum(map(len, texts))
        if max_tokens is not None and characters > max_tokens:
            longest = max(map(len, self._foreign.get_vocab()), default=1)
            if characters > max_tokens * longest:
                _refuse_longer(characters, "characters", max_tokens)


def _without_added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[Tokenizer, frozenset[int]]:
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
    # U+2581 is how sentencepiece vocabularies write a space.
    texts = {id_: one.content.replace("\u2581", " ") for id_, one in added.items()}
    kept = {
        n for n, one in added.items() if not one.special and texts[n].isspace() and n < of_model
    }
    copy.add_tokens([added[one] for one in sorted(kept)])
    return copy, frozenset(added.keys() - kept)


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
