"""Chat messages to token ids, so that foreign text can never act.

Foreign text (of users, system prompts and history) is tokenised by itself, by a copy of the
tokenizer that has no added tokens. Only the chat template's own text may become special tokens.
So `<|im_end|>` in a user's message is ten ordinary characters.

For harmless text the ids equal those of `apply_chat_template`, except at the seams. A token never
spans a border between template and content, so content that begins with line breaks, right after
the template's own line break, may be cut differently.
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

    It copies parts of the tokenizer when it is made. Tokens that are added later do not reach it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, forbidden_ids: Collection[int] = ()
    ) -> None:
        """`forbidden_ids`: control tokens that are ordinary entries of the vocabulary."""
        self._tokenizer = tokenizer
        self._foreign, dropped_ids = _without_added_tokens(tokenizer)
        self._control = frozenset(forbidden_ids)
        self._forbidden = dropped_ids | self._control
        self._line = self._foreign.encode("\n", add_special_tokens=False).ids
        text_ids = self.encode_text("a")
        line_and_text_ids = self._foreign.encode("\na", add_special_tokens=False).ids
        self._puts_blanks = line_and_text_ids != [*self._line, *text_ids]
        # Leave out tokens that the tokenizer puts after a text: an answer continues the prompt.
        ids_with_ends = tokenizer.encode("a", add_special_tokens=True)
        opening_size = ids_with_ends.index(text_ids[0]) if text_ids else len(ids_with_ends)
        self._opening = ids_with_ends[:opening_size]
        self._template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)

    def encode(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of a conversation that the model is to answer.

        Raises PastaError for more than `max_tokens`, for a conversation that does not end with the
        user's words, and for a template or a text that cannot be encoded safely.
        """
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
        """Return the ids of a text to continue: no chat template, but the tokens that begin a text.

        Raises PastaError for more than `max_tokens`.
        """
        self._refuse_huge([text], max_tokens)
        ids = [*self._opening, *self.encode_text(text)]
        _refuse_longer(len(ids), "tokens", max_tokens)
        return ids

    def encode_text(self, text: str, *, continues: bool = False) -> list[int]:
        """Return the ids of foreign text, which are never special ones.

        continues: the text follows another one, so the tokenizer puts no blank before it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"the text is not valid UTF-8, at character {error.start + 1}"
            raise PastaError(message) from error
        # A line break in front keeps the blank away; its ids are skipped.
        lead = "\n" if continues and self._puts_blanks else ""
        lead_ids = self._line if lead else []
        encoding = self._foreign.encode(lead + text, add_special_tokens=False)
        if encoding.ids[: len(lead_ids)] != lead_ids:
            return self.encode_text(text)
        ids: list[int] = encoding.ids[len(lead_ids) :]
        if self._forbidden.isdisjoint(ids):
            return ids
        # The model's vocabulary itself spells a forbidden token (some tokenizers look whole
        # words up before they merge). Cut inside it and encode the parts on their own.
        cuts = {0, len(text)}
        for token, (start, end) in zip(ids, encoding.offsets[len(lead_ids) :], strict=True):
            if token in self._forbidden:
                cut = start + 1 - len(lead)
                cuts.add(cut)
                if end - start < 2:
                    token_text = self._tokenizer.convert_ids_to_tokens(token)
                    raise PastaError(
                        "the text holds a character that this tokenizer can only write as "
                        f"{token_text!r}, at character {cut}"
                    )
        safe_ids: list[int] = []
        for start, end in pairwise(sorted(cuts)):
            safe_ids += self.encode_text(text[start:end], continues=continues or start > 0)
        return safe_ids

    def _encode_by(self, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
        rendered = template.render(messages, [message.content for message in messages])
        pairs = template.cut(messages, rendered)
        if pairs is None:
            return self._encode_uncut(template, messages, rendered)
        ids: list[int] = []
        for template_text, content in pairs:
            continues = self._puts_blanks and bool(ids)
            ids += self._encode_pair(template_text, content, continues=continues)
        return ids

    def _encode_pair(self, template_text: str, content: str, *, continues: bool) -> list[int]:
        """Return the ids of a template's text and of the content after it.

        If the tokenizer puts a blank between the two, so does this.
        """
        sample = self.encode_text("a")
        with_sample = self._encode_template(f"{template_text}a", continues=continues)
        if content and self._puts_blanks and with_sample[-len(sample) :] == sample:
            return [*with_sample[: -len(sample)], *self.encode_text(content)]
        template_ids = self._encode_template(template_text, continues=continues)
        return [*template_ids, *self.encode_text(content, continues=True)]

    def _encode_template(self, text: str, *, continues: bool = False) -> list[int]:
        """Encode a template's text, which may have special tokens. `continues` as above."""
        settings = {"add_special_tokens": False, "split_special_tokens": False}
        if not continues:
            plain_ids: list[int] = self._tokenizer.encode(text, **settings)
            return plain_ids
        ids: list[int] = self._tokenizer.encode(f"\n{text}", **settings)
        lead_size = len(self._line)
        if ids[:lead_size] != self._line:
            return self._encode_template(text)
        return ids[lead_size:]

    def _encode_uncut(
        self, template: ChatTemplate, messages: Sequence[Message], rendered: str
    ) -> list[int]:
        """Encode a conversation whose template looks into contents.

        Raises PastaError if a content could become a special token, or a part of one.
        """
        added_texts = [text for text in self._tokenizer.get_added_vocab() if not text.isspace()]
        edges = {text[0] for text in added_texts} | {text[-1] for text in added_texts}
        # Marks around a content would break a special token that reaches into it.
        marked_contents = [f"\u200b{message.content}\u200b" for message in messages]
        marked_ids = self._encode_template(template.render(messages, marked_contents))
        ids = self._encode_template(rendered)
        has_seams = self._forbidden_in(ids) != self._forbidden_in(marked_ids)
        is_clear = all(edges.isdisjoint(message.content) for message in messages)
        if has_seams or not is_clear or not self._control.isdisjoint(ids):
            raise PastaError(f"{template.name} looks into messages, and one could be taken for it")
        return ids

    def _forbidden_in(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._forbidden]

    def _refuse_huge(self, texts: Sequence[str], max_tokens: int | None) -> None:
        """Refuse a huge text before time and memory go into tokenising it."""
        characters = sum(map(len, texts))
        if max_tokens is not None and characters > max_tokens:
            longest = max(map(len, self._foreign.get_vocab()), default=1)
            if characters > max_tokens * longest:
                _refuse_longer(characters, "characters", max_tokens)


def _without_added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[Tokenizer, frozenset[int]]:
    """Return a copy that has no added tokens, and the ids that it must never produce.

    `split_special_tokens=True` alone is not enough: it accepts added tokens that are not flagged
    special. Added runs of white space (Gemma has them) stay: they are formatting.
    """
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise PastaError(f"the tokenizer of {tokenizer.name_or_path} has no tokenizer.json")
    copy = Tokenizer(backend.model)  # which is shared: to build one takes seconds
    copy.normalizer = backend.normalizer
    copy.pre_tokenizer = backend.pre_tokenizer
    copy.post_processor = backend.post_processor
    added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
    model_size = backend.get_vocab_size(with_added_tokens=False)
    space_ids = []
    for token, added_token in sorted(added.items()):
        text = added_token.content.replace("\u2581", " ")  # sentencepiece's sign for a space
        if text.isspace() and not added_token.special and token < model_size:
            space_ids.append(token)
    copy.add_tokens([added[token] for token in space_ids])
    return copy, frozenset(added.keys() - set(space_ids))


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
