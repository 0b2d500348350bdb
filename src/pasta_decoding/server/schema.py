"""What goes over the wire, in OpenAI's shape: requests, replies, pieces of a stream, errors.

Requests are strict: a wrong type is an error, not a guess. Fields of OpenAI's and vLLM's that would
change the answer and that Pasta does not honour are refused; others that it does not know are
passed over, since clients send more than they need. What is ours begins with `pasta_`, but for
figures in `usage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

MAX_CHOICES = 16
MAX_STOPS = 16

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": (),
    "best_of": (1,),
    "continue_final_message": (),
    "echo": (),
    "frequency_penalty": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (),
    "include_stop_str_in_output": (),
    "length_penalty": (1,),
    "logit_bias": (),
    "logprobs": (),
    "min_p": (),
    "min_tokens": (),
    "modalities": (["text"],),
    "presence_penalty": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": (),
    "structured_outputs": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
}
"""Fields of OpenAI's and vLLM's that are refused, unless they say what is done without them.

An empty value (null, 0, false, "", [], {}) is fine for each, beside what is listed.
"""


def _as_list(stop: object) -> object:
    return [stop] if isinstance(stop, str) else [] if stop is None else stop


def _kind_of_content(content: object) -> str:
    return "parts" if isinstance(content, list) else "one text"


def _is_none(value: object) -> bool:
    return value is None


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
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Wire(BaseModel):
    """Anything that is sent or received."""

    model_config = ConfigDict(strict=True, frozen=True)


class StreamOptions(Wire):
    """`include_usage`: a last piece with the figures; `pasta_events`: what each thread does."""

    include_usage: bool = False
    pasta_events: bool = False


class AnswerRequest(Wire):
    """What both kinds of request have in common.

    max_tokens counts all tokens of an answer, tags included.
    top_k is vLLM's: how many tokens are kept; 0 and -1 keep all.
    pasta_parallel: false has the same weights answer sequentially, true insists on threads;
        left out, an answer that begins under load is sequential.
    """

    model: str
    max_tokens: Limit | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    seed: Seed | None = None
    stop: Stops = []
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    pasta_parallel: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_cannot_be_honoured(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in NEUTRAL.keys() & value.keys():
                if value[name] and value[name] not in NEUTRAL[name]:
                    raise ValueError(f"{name} is not supported")
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

    @model_validator(mode="before")
    @classmethod
    def _refuse_log_probabilities(cls, value: Any) -> Any:
        # Here 0 asks for them, too: those of the tokens that were chosen.
        wanted = value.get("logprobs") if isinstance(value, dict) else None
        if wanted is not None and wanted is not False:
            raise ValueError("logprobs is not supported")
        return value

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


FIELDS = frozenset[str]().union(
    *(
        kind.model_fields
        for kind in (ChatRequest, CompletionRequest, ChatMessage, TextPart, StreamOptions)
    )
)
"""The names of all fields of requests."""


class Usage(Wire):
    """What a request cost, all its choices together, and what parallel decoding made of it.

    completion_tokens: all that was fed, tags included.
    plain_tokens:      of the text without tags, tokenised alone.
    critical_path:     forward steps after the prefill at unlimited width, of the longest choice.
    threads:           of the choice with the most.
    sequential_choices: choices whose promises were banned, by the request or because of the load.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    plain_tokens: int
    critical_path: int
    threads: int
    sequential_choices: int


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


class Finished(Wire):
    """The answer is complete, or was cut off."""

    type: Literal["finished"] = "finished"
    step: int
    truncated: bool


Event = Annotated[Opened | Delta | Closed | Synced | Finished, Field(discriminator="type")]


class ChatDelta(Wire):
    """What a piece adds to the message. Left out where it adds nothing."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)


class ChatChunkChoice(Wire):
    """One choice's share of a piece. `pasta_events` are live, `delta` is in reading order."""

    index: int
    delta: ChatDelta
    logprobs: None = None
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
    logprobs: None = None
    finish_reason: FinishReason


class TextChoice(Wire):
    """One continuation, or a piece of one."""

    index: int
    text: str
    logprobs: None = None
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
    """A model that can be asked for. `max_model_len`: tokens of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Wire):
    """All models that can be asked for: one."""

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
