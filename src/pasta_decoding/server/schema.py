"""What goes over the wire to clients, in OpenAI's shape: replies, pieces of a stream, errors.

What is ours begins with `pasta_`, but for figures in `usage`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


def _is_none(value: object) -> bool:
    return value is None


class Wire(BaseModel):
    """Anything that is sent or received."""

    model_config = ConfigDict(strict=True, frozen=True)


class PromptTokensDetails(Wire):
    """Of the prompts' tokens, those that the cache held already: no choice computed them."""

    cached_tokens: int


class Usage(Wire):
    """What a request cost, all its choices together, and what parallel decoding made of it.

    completion_tokens: of the answers, tags included.
    trimmed_tokens:    tokens that threads had written beyond a limit or a stop string, in vain.
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


class Opened(Wire):
    """A thread started; what it writes stands here in reading order."""

    type: Literal["opened"] = "opened"
    step: int
    thread: int
    topic: str
    tokens: int


class Delta(Wire):
    """More text of a thread, as it is written."""

    type: Literal["delta"] = "delta"
    step: int
    thread: int
    text: str


class Closed(Wire):
    """A chunk is complete, or was cut off."""

    type: Literal["closed"] = "closed"
    step: int
    thread: int
    truncated: bool


class Synced(Wire):
    """The main thread has seen the chunks of these threads and goes on."""

    type: Literal["synced"] = "synced"
    step: int
    threads: tuple[int, ...]


class Trimmed(Wire):
    """The text ends after so many characters, in reading order. What stands behind is trimmed.

    A limit or a stop string ends it there, and other threads had written beyond.
    """

    type: Literal["trimmed"] = "trimmed"
    step: int
    characters: int


class Finished(Wire):
    """The answer is complete, or was cut off."""

    type: Literal["finished"] = "finished"
    step: int
    truncated: bool


Event = Annotated[
    Opened | Delta | Closed | Synced | Trimmed | Finished, Field(discriminator="type")
]


class TopLogprob(Wire):
    """A token that might have stood there. `bytes`: none where it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the text; `top_logprobs` may be fewer than were asked for: tags are no text."""

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
    """What a piece adds to the message. Left out where it adds nothing."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)


class ChatChunkChoice(Wire):
    """One choice's share of a piece. `pasta_events` are live, `delta` is in reading order."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    pasta_events: list[Event] | None = Field(default=None, exclude_if=_is_none)


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
    pasta_events: list[Event] | None = Field(default=None, exclude_if=_is_none)


class Envelope(Wire):
    """What every reply and every piece of a stream begins with."""

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


class TextChunk(Envelope):
    """A piece of a streamed completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = Field(default=None, exclude_if=_is_none)


class TextCompletion(Envelope):
    """A whole completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage


class Model(Wire):
    """A model that can be asked for.

    max_model_len: tokens of prompt and answer together; left out until it is loaded.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None = Field(default=None, exclude_if=_is_none)


class ModelList(Wire):
    """All models that can be asked for: one, and its baseline where that is served, too."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(Wire):
    """Whether the engine lives, how many answers are being written, and how many wait."""

    status: Literal["ok", "failed"]
    running: int
    waiting: int


class ErrorDetail(Wire):
    """What is wrong, in words, and by kind; `param` names the field if one is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Wire):
    """Every error there is."""

    error: ErrorDetail
