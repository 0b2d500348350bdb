"""Chat templates, which are programs of other people: conversations rendered by them, in bounds."""

import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import psutil

from pasta_decoding.errors import PastaError, errors_as

ROLES = ("system", "user", "assistant")

# Letters and digits only: a template may escape, trim or split at other characters.
_PLACEHOLDER = re.compile(r"PastaContent(\d{6})Here")
_memory_limit_lock = Lock()


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `role` is one of `ROLES`; `content` is foreign text."""

    role: str
    content: str


class ChatTemplate:
    """The template of a tokenizer that has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name = f"the chat template of {tokenizer.name_or_path or 'this tokenizer'}"

    def render(self, messages: Sequence[Message], contents: Sequence[str]) -> str:
        """Return the prompt's text with these contents in the place of the messages' own."""
        conversation = [
            {"role": message.role, "content": content}
            for message, content in zip(messages, contents, strict=True)
        ]
        with errors_as(f"{self.name} refuses this conversation", Exception):
            rendered: str = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        return rendered

    def cut(self, messages: Sequence[Message], rendered: str) -> list[tuple[str, str]] | None:
        """Cut the rendered conversation into pairs of a template's text and the content after it.

        The content is as the template shows it: it may be trimmed or escaped. The last pair has an
        empty content. Returns None if a content changes the template's text around it. Raises
        PastaError for a template that does not show every message exactly once.
        """
        contents = [message.content for message in messages]
        # An empty content stays empty: a template may skip it.
        placeholders = [
            f"PastaContent{index:06}Here" if content.strip() else content
            for index, content in enumerate(contents)
        ]
        skeleton = self.render(messages, placeholders)
        parts = _PLACEHOLDER.split(skeleton)
        template_texts = parts[::2]
        order = [int(index) for index in parts[1::2]]
        if sorted(order) != [index for index, text in enumerate(placeholders) if text.strip()]:
            raise PastaError(f"{self.name} does not show every message exactly once")
        shown_contents = [contents[index] for index in order]
        pairs = list(zip(template_texts, [*shown_contents, ""], strict=True))
        if _joined(pairs) == rendered:
            return pairs
        for pair_index, index in enumerate(order):
            before, _, after = skeleton.partition(placeholders[index])
            texts = [*placeholders[:index], contents[index], *placeholders[index + 1 :]]
            content = self.render(messages, texts).removeprefix(before).removesuffix(after)
            pairs[pair_index] = (template_texts[pair_index], content)
        return pairs if _joined(pairs) == rendered else None


def _joined(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(text + content for text, content in pairs)


def template_end(tokenizer: Any) -> int | None:
    """Return the added token that the chat template writes after an answer, if there is one."""
    conversation = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "PastaAnswer"},
    ]
    try:
        with bounded_memory():
            rendered = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except MemoryError as error:
        raise PastaError(f"{ChatTemplate(tokenizer).name} takes gigabytes") from error
    except Exception:  # noqa: BLE001  somebody else's template, or none
        return None  # encoding a prompt reports why
    text_after = rendered.partition("PastaAnswer")[2].lstrip()
    ids = tokenizer.encode(text_after, add_special_tokens=False)
    if ids and ids[0] in tokenizer.get_added_vocab().values():
        return int(ids[0])
    return None


@contextmanager
def bounded_memory(extra_bytes: int = 2 << 30) -> Iterator[None]:
    """Raise MemoryError if the block takes more memory than this. It limits the whole process."""
    with _memory_limit_lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit_bytes = psutil.Process().memory_info().vms + extra_bytes
        if hard != resource.RLIM_INFINITY:
            limit_bytes = min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
