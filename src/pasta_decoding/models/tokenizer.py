"""A tokenizer read from its files with `tokenizers` and jinja2 alone.

It does what the runtime asks of a Hugging Face tokenizer, under the same names and with the same
outcome, for byte-level BPE, which is all that a GGUF file of ours holds. transformers, whose
import takes longer than a short answer, is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

SETTINGS, VOCABULARY, TEMPLATE = "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"
# What a chat template may call by name: the special tokens that have a name of their own.
_NAMED = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class FileTokenizer:
    """Implements, of a Hugging Face tokenizer, what `PromptEncoder` and `vocabulary_of` ask.

    files: name -> contents, as `save_pretrained` writes them.
    name:  for messages.

    Raises PastaError for files that are no tokenizer.
    """

    def __init__(self, files: Mapping[str, str], name: str) -> None:
        from tokenizers import Tokenizer

        self.name_or_path = name
        try:
            self.backend_tokenizer: Tokenizer = Tokenizer.from_str(files[VOCABULARY])
            settings = dict(json.loads(files.get(SETTINGS, "{}")))
        except Exception as error:  # `tokenizers` raises this very class
            raise PastaError(f"the tokenizer in {name} cannot be read: {error}") from error
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        self.chat_template = files.get(TEMPLATE) or _listed_template(settings)
        self._named_tokens = {
            key: text for key in _NAMED if (text := _token_text(settings.get(key))) is not None
        }

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that it calls its end; None if it names none."""
        text = self._named_tokens.get("eos_token")
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    def __len__(self) -> int:
        """Return the size of the vocabulary, added tokens included."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        """Return the ids of a text; the texts of special tokens become these tokens."""
        assert not split_special_tokens, "foreign text has an encoder of its own"
        found = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return list(found.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each row of ids."""
        return self.backend_tokenizer.decode_batch(rows, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Return the text of one token in the vocabulary; None if there is no such id."""
        return self.backend_tokenizer.id_to_token(token)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        """Return a conversation as its template writes it. Raises TemplateError if it refuses."""
        assert not tokenize, "the encoder cuts the text before it becomes ids"
        return self._template.render(
            messages=[dict(message) for message in conversation],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._named_tokens,
        )

    @cached_property
    def _template(self) -> Template:
        return compiled_template(self.chat_template or "")


def compiled_template(source: str) -> Template:
    """Return a chat template, as transformers compiles it: sandboxed, whatever it comes from."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 (so says jinja2)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(source)


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _token_text(found: object) -> str | None:
    """Return the text of a special token: settings hold it bare, or with its flags."""
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else None


def _listed_template(settings: Mapping[str, Any]) -> str | None:
    """Return the chat template of older settings: a text, or several with names."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None
