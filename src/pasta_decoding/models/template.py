"""A chat template, which is somebody else's program: what it makes of a conversation."""

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

# Letters and digits only: nothing that a template would escape, trim or split at.
_PLACEHOLDER = re.compile(r"PastaContent(\d{6})Here")
_limit = Lock()


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
        turns = zip(messages, contents, strict=True)
        talk = [{"role": message.role, "content": content} for message, content in turns]
        with errors_as(f"{self.name} refuses this conversation", Exception):
            rendered: str = self._tokenizer.apply_chat_template(
                talk, tokenize=False, add_generation_prompt=True
            )
        return rendered

    def cut(self, messages: Sequence[Message], rendered: str) -> list[tuple[str, str]] | None:
        """Return texts of the template, each with the content behind it as it shows that.

        None: a content changes the text around it.
        """
        contents = [message.content for message in messages]
        # What is empty stays so: a template may skip it.
        names = [
            f"PastaContent{index:06}Here" if content.strip() else content
            for index, content in enumerate(contents)
        ]
        template = self.render(messages, names)
        parts = _PLACEHOLDER.split(template)
        order = [int(index) for index in parts[1::2]]
        if sorted(order) != [index for index, name in enumerate(names) if name.strip()]:
            raise PastaError(f"{self.name} does not show every message exactly once")
        shown = [*zip(parts[::2], [*(contents[index] for index in order), ""], strict=True)]
        if "".join(map("".join, shown)) == rendered:
            return shown
        for place, index in enumerate(order):
            before, _, behind = template.partition(names[index])
            alone = self.render(messages, [*names[:index], contents[index], *names[index + 1 :]])
            shown[place] = parts[2 * place], alone.removeprefix(before).removesuffix(behind)
        return shown if "".join(map("".join, shown)) == rendered else None


def template_end(tokenizer: Any) -> int | None:
    """Return the added token that the chat template writes behind an answer, if there is one."""
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "PastaAnswer"}]
    try:
        with bounded_memory():
            rendered = str(tokenizer.apply_chat_template(talk, tokenize=False))
    except MemoryError as error:
        raise PastaError(f"{ChatTemplate(tokenizer).name} takes gigabytes") from error
    except Exception:  # noqa: BLE001  somebody else's template, or none
        return None  # encoding a prompt reports why
    behind = rendered.partition("PastaAnswer")[2].lstrip()
    ids = tokenizer.encode(behind, add_special_tokens=False)[:1]
    return next((one for one in ids if one in tokenizer.get_added_vocab().values()), None)


@contextmanager
def bounded_memory(extra_bytes: int = 2 << 30) -> Iterator[None]:
    """Let Python raise MemoryError where the block takes more: a limit of the whole process."""
    with _limit:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = psutil.Process().memory_info().vms + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (hard if 0 <= hard < most else most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
