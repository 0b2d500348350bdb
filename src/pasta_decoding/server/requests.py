"""Request bodies, in OpenAI's shape.

Requests are strict: a wrong type or an unknown field is an error, not a guess. Fields of our own
begin with `pasta_`, except `eagerness`.
"""

import secrets
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.models.template import Message
from pasta_decoding.server.schema import Wire

MAX_CHOICES = 16
MAX_FIELDS = 300
"""Fields of one JSON object. Pydantic lists every unknown field, for which a body has room."""

Prompt = str | list[Message] | tuple[int, ...]
"""A text to continue, a conversation, or token ids."""


def _bounded(value: Any) -> Any:
    """Return a value. Raises ValueError if it is an object of too many fields."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"an object has more than {MAX_FIELDS} fields")
    return value


NonEmptyText = Annotated[str, Field(min_length=1)]
Stops = Annotated[
    list[NonEmptyText],
    Field(max_length=16),
    BeforeValidator(
        lambda stop: [stop] if isinstance(stop, str) else stop or [],
        json_schema_input_type=NonEmptyText | list[NonEmptyText] | None,
    ),
]
Limit = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Biases = Annotated[dict[TokenName, Bias], Field(max_length=MAX_FIELDS), BeforeValidator(_bounded)]
Alternatives = Annotated[int, Field(ge=0, le=20)]


class RequestPart(Wire, extra="forbid"):
    """A request or a part of one. An unknown field is an error unless it is null."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, part: Any) -> Any:
        if not isinstance(_bounded(part), dict):
            return part
        # Some clients send null for each field of OpenAI's API that they do not use.
        return {
            name: value
            for name, value in part.items()
            if value is not None or name in cls.model_fields
        }


class StreamOptions(RequestPart):
    """`include_usage`: a last piece with the usage; `pasta_events`: what each thread does."""

    include_usage: bool = False
    pasta_events: bool = False
    # Accepted, since they do not change the answer.
    include_obfuscation: Any = None
    continuous_usage_stats: Any = None


class TextFormat(RequestPart):
    """The only response format: free text."""

    type: Literal["text"]


class AnswerRequest(RequestPart):
    """The fields that both kinds of request have.

    max_tokens: counts all tokens of an answer, tags included.
    top_k:      0 and -1 keep all tokens.
    seed:       -1 draws a random seed, as does leaving it out.
    logit_bias: by token id, as text.
    eagerness:  added to the logit of a promise; the checkpoint's own if left out.
    pasta_parallel: false lets the baseline answer, sequentially.
    pasta_priority: a high answer gets all its threads under any load.
    """

    model: str
    max_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    eagerness: Bias | None = None
    stop: Stops = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    pasta_parallel: bool | None = None
    pasta_priority: Literal["low", "normal", "high"] | None = None

    # Accepted, since they do not change the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # Accepted with the value that means "off".
    best_of: Literal[1] | None = None
    ignore_eos: Literal[False] | None = None
    min_tokens: Literal[0] | None = None
    skip_special_tokens: Literal[True] | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    def config(self, max_tokens: int) -> GenerationConfig:
        """Return the settings of the answers. Fields that are left out have the API's defaults.

        A seed that is left out is random.
        """
        names = {setting.name for setting in fields(GenerationConfig)}
        settings = self.model_dump(include=names, exclude_none=True)
        settings |= {
            "max_tokens": max_tokens,
            "top_k": self.top_k if self.top_k and self.top_k > 0 else None,
            "seed": secrets.randbits(63) if self.seed in (None, -1) else self.seed,
            "parallel": self.pasta_parallel is not False,
        }
        return GenerationConfig(**settings)


class TextPart(RequestPart):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str

    # Accepted, since it does not change the answer.
    cache_control: Any = None


class ChatMessage(RequestPart):
    """One turn. Its content is plain text: a tag in it is a word like any other."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str | None, Tag("one text")]
        | Annotated[list[TextPart], Field(fail_fast=True), Tag("parts")],
        Discriminator(lambda content: "parts" if isinstance(content, list) else "one text"),
    ]

    # Accepted, since clients send an answer back as they received it.
    refusal: Any = None
    annotations: Any = None
    # Accepted with the value that means "none".
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content")
    @classmethod
    def _only_the_assistant_may_say_nothing(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("Input should be a valid string")
        return content

    @property
    def message(self) -> Message:
        """The turn as one text; `developer` is OpenAI's newer name for `system`."""
        if isinstance(self.content, list):
            text = "\n".join(part.text for part in self.content)
        else:
            text = self.content or ""
        return Message("system" if self.role == "developer" else self.role, text)


class ChatRequest(AnswerRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    # Accepted, since they do not change the answer.
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None
    # Accepted with the value that means "off".
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: Literal[True] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    tools: list[Any] | None = None

    @field_validator("tools")
    @classmethod
    def _tools_are_not_called(cls, tools: list[Any] | None, info: ValidationInfo) -> Any:
        if tools and info.data.get("tool_choice") != "none":
            raise ValueError("the models here call no tools; tool_choice 'none' ignores them")
        return tools

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to return for each token; None: no log probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompts(self) -> list[Prompt]:
        return [[message.message for message in self.messages]]


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
IdLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]


def _kind_of_prompt(prompt: object) -> str:
    """Return the tag of the type that checks a prompt, by its first entry."""
    if not isinstance(prompt, list):
        return "one text"
    first = prompt[0] if prompt else ""
    if isinstance(first, int):
        return "ids"
    return "id lists" if isinstance(first, list) else "texts"


class CompletionRequest(AnswerRequest):
    """The body of `/v1/completions`: one or several texts, or token ids, to continue."""

    prompt: Annotated[
        Annotated[str, Tag("one text")]
        | Annotated[TokenIds, Tag("ids")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[IdLists, Tag("id lists")],
        Discriminator(_kind_of_prompt),
    ]
    logprobs: Annotated[
        Alternatives | None, BeforeValidator(lambda value: None if value is False else value)
    ] = None

    # Accepted with the value that means "off".
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[Prompt]:
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if is_single else list(self.prompt)
        return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


Body = ChatRequest | CompletionRequest

_KINDS = (ChatRequest, CompletionRequest, ChatMessage, TextPart, TextFormat, StreamOptions)
FIELDS = frozenset(name for kind in _KINDS for name in kind.model_fields)
"""The names of all fields of requests."""
