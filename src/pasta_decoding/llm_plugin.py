"""A plugin for `llm` (https://llm.datasette.io): `llm -m pasta-balanced "..."` streams an answer.

llm finds it by the entry point group `llm`, and each adapter that ships is a model of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import llm
from pydantic import Field, create_model

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.api.opening import load
from pasta_decoding.errors import PastaError
from pasta_decoding.models.load import shipped_adapters

if TYPE_CHECKING:
    from pasta_decoding.api.model import Model
    from pasta_decoding.api.streams import Result


def _options() -> Any:
    """Return what `-o NAME VALUE` takes: the fields of `GenerationConfig` that have a help text.

    None has a default here: what is left out is the config's own.
    """
    hints = get_type_hints(GenerationConfig, include_extras=True)
    said = {name: get_args(hint) for name, hint in hints.items() if name != "logit_bias"}
    told: dict[str, Any] = {
        name: (kind | None, Field(None, description=about)) for name, (kind, about) in said.items()
    }
    return create_model("Options", __base__=llm.Options, **told)


@cache
def _loaded(adapter: str) -> Model:
    return load(adapter)


def _asked(prompt: Any) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Return the conversation as messages, with what llm kept of it, and the options given."""
    messages = [{"role": one.role, "content": _text(one.parts)} for one in prompt.messages]
    return messages, prompt.options.model_dump(exclude_none=True)


def _text(parts: Iterable[Any]) -> str:
    return "".join(part.text for part in parts)


def _report(response: Any, result: Result) -> None:
    usage = result.usage
    response.set_usage(input=usage.prompt_tokens, output=usage.plain_tokens)


def _told(error: PastaError) -> Exception:
    hint = f" {error.hint}" if error.hint else ""
    failure: Exception = llm.ModelError(f"{error}.{hint}")
    return failure


class _Named:
    """What both kinds of model say of themselves."""

    can_stream = True
    Options = _options()

    def __init__(self, adapter: str) -> None:
        self.adapter, self.model_id = adapter, f"pasta-{adapter}"


_Blocking: Any = llm.Model
_Async: Any = llm.AsyncModel


class PastaModel(_Named, _Blocking):  # type: ignore[misc]
    """An adapter on the best engine of this machine."""

    def execute(
        self,
        prompt: Any,
        stream: bool,
        response: Any,
        conversation: Any = None,  # noqa: ARG002
    ) -> Iterator[str]:
        """Yield the text in reading order. Raises llm.ModelError for what cannot be answered."""
        messages, options = _asked(prompt)
        try:
            with _loaded(self.adapter).stream(messages, **options) as answer:
                yield from answer if stream else ["".join(answer)]
            _report(response, answer.result)
        except PastaError as error:
            raise _told(error) from error


class AsyncPastaModel(_Named, _Async):  # type: ignore[misc]
    """The same for programs with an event loop."""

    async def execute(
        self,
        prompt: Any,
        stream: bool,
        response: Any,
        conversation: Any = None,  # noqa: ARG002
    ) -> AsyncIterator[str]:
        """As `PastaModel`'s."""
        messages, options = _asked(prompt)
        try:
            with _loaded(self.adapter).stream(messages, **options) as answer:
                if not stream:
                    yield "".join([piece async for piece in answer])
                async for piece in answer:
                    yield piece
            _report(response, answer.result)
        except PastaError as error:
            raise _told(error) from error


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[..., None]) -> None:
    """Tell llm of each adapter that ships."""
    for adapter in shipped_adapters():
        register(PastaModel(adapter), AsyncPastaModel(adapter))
