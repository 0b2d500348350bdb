"""What clients ask, in OpenAI's shape.

Requests are strict: a wrong type is an error, not a guess. What would change the answer and is not
obeyed is refused (`refused`); other fields are passed over, since clients send more than they need.
What is ours begins with `pasta_`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from pasta_decoding.server.refused import refusal, refuse_unsupported
from pasta_decoding.server.schema import Wire

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_BIASES = 300
MAX_ALTERNATIVES = 20


def _as_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else [] if stop is None else stop


def _false_as_none(value: object) -> object:
    return None if value is False else value


def _kind_of_content(content: object) -> str:
    return "parts" if isinstance(content, list) else "one text"


Text = Annotated[str, Field(min_length=1)]
Stops = Annotated[
    list[Text],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list, json_schema_input_type=Text | list[Text] | None),
]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Limit = Annotated[int, Field(ge=1, lt=2**31)]
Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Repetition = Annotated[float, Field(gt=0, le=2, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Biases = Annotated[dict[TokenName, Bias], Field(max_length=MAX_BIASES)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class StreamOptions(Wire):
    """`include_usage`: a last piece with the figures; `pasta_events`: what each thread does."""

    include_usage: bool = False
    pasta_events: bool = False


class AnswerRequest(Wire):
    """What both kinds of request have in common.

    max_tokens counts all tokens of an answer, tags included.
    top_k is vLLM's: how many tokens are kept; 0 and -1 keep all. So are min_p, the share of the
        likeliest token's probability that others need, and repetition_penalty.
    logit_bias is by token ids, as text.
    pasta_parallel: false has the same weights answer sequentially.
    pasta_priority: high answers get all their threads under any load, low ones are in no hurry.
    """

    model: str
    max_tokens: Limit | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    seed: Seed | None = None
    stop: Stops = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    pasta_parallel: bool | None = None
    pasta_priority: Literal["low", "normal", "high"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_cannot_be_honoured(cls, value: Any) -> Any:
        if isinstance(value, dict):
            refuse_unsupported(value)
        return value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def options(self) -> StreamOptions:
        """The stream's options, the defaults if there are none."""
        return self.stream_options or StreamOptions()


class TextPart(Wire):
    """A piece of a message. Text is all that there is."""

    type: Literal["text"]
    text: str


class ChatMessage(Wire):
    """One turn. Its content is plain text: a tag in it is as good as any other word."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("one text")] | Annotated[list[TextPart], Tag("parts")],
        Discriminator(_kind_of_content),
    ]

    @property
    def text(self) -> str:
        """The content in one piece."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(AnswerRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    @property
    def alternatives(self) -> int | None:
        """How many to tell beside each token; None: nothing about tokens."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; OpenAI's newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
IdLists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_CHOICES)]


def _kind_of_prompt(prompt: object) -> str:
    if not isinstance(prompt, list):
        return "one text"
    first = prompt[0] if prompt else ""
    return "ids" if isinstance(first, int) else "id lists" if isinstance(first, list) else "texts"


class CompletionRequest(AnswerRequest):
    """The body of `/v1/completions`: text or token ids to go on from, one or several."""

    prompt: Annotated[
        Annotated[str, Tag("one text")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[IdLists, Tag("id lists")],
        Discriminator(_kind_of_prompt),
    ]

    logprobs: Annotated[Alternatives | None, BeforeValidator(_false_as_none)] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_the_other_form(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("top_logprobs"):
            raise refusal("top_logprobs", "here logprobs says how many")
        return value

    @property
    def alternatives(self) -> int | None:
        """How many to tell beside each token; None: nothing about tokens."""
        return self.logprobs

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one a list entry."""
        match self.prompt:
            case str() as text:
                return [text]
            case [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case several:
                return list(several)  # type: ignore[arg-type]


Body = ChatRequest | CompletionRequest

FIELDS = frozenset[str]().union(
    *(
        kind.model_fields
        for kind in (ChatRequest, CompletionRequest, ChatMessage, TextPart, StreamOptions)
    )
)
"""The names of all fields of requests."""
