"""Replies, pieces of a stream and errors, in OpenAI's shape."""

from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from pasta_decoding.answer import events as live


def _is_none(value: object) -> bool:
    return value is None


class Wire(BaseModel):
    """Anything that is sent or received."""

    model_config = ConfigDict(strict=True, frozen=True)


class PromptTokensDetails(Wire):
    """`cached_tokens`: prompt tokens that the cache held, so that no choice computed them."""

    cached_tokens: int


class Usage(Wire):
    """The cost of a request, all its choices together.

    completion_tokens: of the answers, tags included.
    trimmed_tokens:    written by threads beyond a limit or a stop string, and left out.
    plain_tokens:      of the text without tags, tokenised alone.
    critical_path:     forward steps after the prefill at unlimited width, of the longest choice.
    threads:           of the choice with the most.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    plain_tokens: int
    critical_path: int
    threads: int
    trimmed_tokens: int


FinishReason = Literal["stop", "length"]


def _wire_event(kind: type) -> type[Wire]:
    """Return the model of a live event: its fields without log probabilities, name and step."""
    hints = get_type_hints(kind)
    model_fields: dict[str, Any] = {
        field.name: (hints[field.name], ...) for field in fields(kind) if field.name != "logprobs"
    }
    name = kind.__name__.lower()
    model_fields["type"] = (Literal[name], name)
    model_fields["step"] = (int, ...)
    return create_model(kind.__name__, __base__=Wire, __doc__=kind.__doc__, **model_fields)


LiveEvent: Any = Annotated[
    Union[tuple(map(_wire_event, get_args(live.Event)))],  # noqa: UP007
    Field(discriminator="type"),
]


class TopLogprob(Wire):
    """A token that might have been chosen. `bytes`: null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the text. Tags are left out of `top_logprobs`, so they may be fewer than asked."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Wire):
    """The tokens of the text, in reading order."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Wire):
    """The tokens of the text, in reading order, as `/v1/completions` has them."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatDelta(Wire):
    """A piece's addition to the message; a field without one is left out."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)


class ChatChunkChoice(Wire):
    """One choice's share of a piece. `pasta_events` are live, `delta` is in reading order."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    pasta_events: list[LiveEvent] | None = Field(default=None, exclude_if=_is_none)


class AssistantMessage(Wire):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Wire):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class TextChoice(Wire):
    """One continuation, or a piece of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    pasta_events: list[LiveEvent] | None = Field(default=None, exclude_if=_is_none)


class Envelope(Wire):
    """The beginning of every reply and of every piece of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatChunk(Envelope):
    """A piece of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(default=None, exclude_if=_is_none)


class ChatCompletion(Envelope):
    """A whole chat completion."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class TextCompletion(Envelope):
    """A completion, or a piece of a streamed one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = Field(default=None, exclude_if=_is_none)


class Model(Wire):
    """A model. `max_model_len`: tokens of prompt and answer; left out until it is loaded."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None = Field(default=None, exclude_if=_is_none)


class ModelList(Wire):
    """All models: one, and its baseline if that is served as well."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(Wire):
    """Whether the engine lives, how many answers are being written, and how many wait."""

    status: Literal["ok", "failed"]
    running: int
    waiting: int


class ErrorDetail(Wire):
    """The reason; `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Wire):
    """Every error."""

    error: ErrorDetail
