"""A plugin for `llm` (https://llm.datasette.io): `llm -m pasta-balanced "..."` streams an answer.

llm finds it by the entry point group `llm`, and each adapter that ships is a model of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import llm
from pydantic import Field, create_model

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.api.opening import load
from pasta_decoding.errors import PastaError
from pasta_decoding.models.catalog import shipped_adapters

if TYPE_CHECKING:
    from pasta_decoding.api.model import Model

_Model: Any = llm.Model
_OPTIONS: dict[str, Any] = {
    name: (get_args(hint)[0] | None, Field(None, description=get_args(hint)[1]))
    for name, hint in get_type_hints(GenerationConfig, include_extras=True).items()
    if name != "logit_bias"
}
"""The options of `-o NAME VALUE`: fields of `GenerationConfig` that have a help text."""


@cache
def _loaded(adapter: str) -> Model:
    return load(adapter)


class PastaModel(_Model):  # type: ignore[misc]
    """An adapter on the best engine of this machine."""

    can_stream = True
    Options = create_model("Options", __base__=llm.Options, **_OPTIONS)

    def __init__(self, adapter: str) -> None:
        self.adapter = adapter
        self.model_id = f"pasta-{adapter}"

    def execute(
        self,
        prompt: Any,
        stream: bool,
        response: Any,
        conversation: Any = None,  # noqa: ARG002
    ) -> Iterator[str]:
        """Answer a conversation, whose earlier turns llm has; report its usage at the end.

        Raises llm.ModelError for a prompt that cannot be answered.
        """
        messages = [
            {"role": message.role, "content": "".join(part.text for part in message.parts)}
            for message in prompt.messages
        ]
        options = prompt.options.model_dump(exclude_none=True)
        try:
            with _loaded(self.adapter).stream(messages, **options) as answer:
                if stream:
                    yield from answer
                else:
                    yield "".join(answer)
            usage = answer.result.usage
        except PastaError as error:
            raise llm.ModelError(f"{error}. {error.hint}".rstrip()) from error
        response.set_usage(input=usage.prompt_tokens, output=usage.plain_tokens)


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[..., None]) -> None:
    for adapter in shipped_adapters():
        register(PastaModel(adapter))
