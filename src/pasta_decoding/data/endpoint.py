"""Chat with any OpenAI-compatible endpoint: one question in, one `Reply` or one clear error out.

    async with connect(Endpoint("http://localhost:8000/v1", "some-model")) as chat:
        reply = await chat([{"role": "user", "content": "Hello"}], max_tokens=50)

The official client does the transport: what may pass by itself (time-outs, lost connections, 408,
409, 429, 5xx) is tried again with growing pauses, or after as long as `Retry-After` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from typer import Option

from pasta_decoding.errors import PastaError, install_command

if TYPE_CHECKING:
    from openai import APIError, APIStatusError, AsyncOpenAI

Message = Mapping[str, str]
"""A turn of a conversation: `role` and `content`."""

KEY_VARIABLES = ("PASTA_ENDPOINT_KEY", "OPENAI_API_KEY")
"""Where a user puts the key of an endpoint; the first one that is set counts."""

_EXCERPT_CHARS = 80


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask and how patiently.

    base_url:    what stands before `/chat/completions`, such as `http://localhost:8000/v1`.
    api_key:     never shown; empty for one that needs none.
    timeout_s:   of one try of one request.
    """

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    concurrency: Annotated[
        int, Option(min=1, help="With --base-url: requests at the same time.")
    ] = 8
    max_retries: Annotated[
        int,
        Option(
            "--retries",
            min=0,
            help="Send a request that failed so often again, with growing pauses.",
        ),
    ] = 5
    timeout_s: Annotated[
        float,
        Option("--timeout", min=0.01, help="With --base-url: how many seconds a request may take."),
    ] = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said and what it cost.

    finish_reason: `stop`, `length` and whatever else the endpoint calls it.
    top_logprobs:  log-probabilities (nats) of the likeliest first tokens of the answer; None if
                   they were not asked for or the endpoint does not give them.
    retries:       tries before this one that failed on the way.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = "stop"
    top_logprobs: dict[str, float] | None = None
    retries: int = 0


class EndpointError(PastaError):
    """A request failed for good.

    kind:  the reason in a word or two, for counting: `timeout`, `status 500`, ...
    fatal: every other request with these settings will fail, too.
    """

    def __init__(self, kind: str, message: str, *, hint: str = "", fatal: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.fatal = fatal


@asynccontextmanager
async def connect(endpoint: Endpoint) -> AsyncIterator[Chat]:
    """Open connections for as long as the block runs.

    Raises PastaError without the extra, or for a base URL that is none.
    """
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        message = "asking an endpoint needs the package openai"
        raise PastaError(message, hint=install_command("endpoint")) from error
    _check_url(endpoint.base_url)
    client = AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key=endpoint.api_key or "none",  # the client insists on one, local servers do not
        timeout=endpoint.timeout_s,
        max_retries=endpoint.max_retries,
    )
    async with client:
        yield Chat(endpoint, client)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        hint = "For example: --base-url http://localhost:8000/v1"
        raise PastaError(f"{url!r} is no base URL", hint=hint)


class Chat:
    """Open connections to an endpoint; call it with a conversation."""

    def __init__(self, endpoint: Endpoint, client: AsyncOpenAI) -> None:
        self._endpoint = endpoint
        self._client = client
        self._slots = asyncio.Semaphore(endpoint.concurrency)

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_logprobs: int | None = None,
    ) -> Reply:
        """Return the answer to a conversation. Raises EndpointError when no try brought one."""
        from openai import APIError

        options: dict[str, Any] = {
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        if top_logprobs is not None:
            options |= {"logprobs": True, "top_logprobs": top_logprobs}
        create = self._client.chat.completions.with_raw_response.create
        try:
            async with self._slots:
                raw = await create(model=self._endpoint.model, **options)
        except APIError as error:
            raise _explain(self._endpoint, error) from error
        try:
            return _reply(raw.parse(), raw.retries_taken)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            message = f"{self._endpoint.base_url} sent no chat completion: {_excerpt(raw.text)}"
            hint = "Check that the base URL is that of an OpenAI-compatible server."
            raise EndpointError("no completion", message, hint=hint) from error


def _reply(completion: Any, retries: int) -> Reply:
    """Read a completion. The client does not check it, so anything may be missing or of no use."""
    choice, usage = completion.choices[0], completion.usage
    content = choice.message.content or ""
    if not isinstance(content, str):
        raise TypeError("the answer is no text")
    return Reply(
        text=content,
        prompt_tokens=int(usage.prompt_tokens) if usage else 0,
        completion_tokens=int(usage.completion_tokens) if usage else 0,
        finish_reason=str(choice.finish_reason or "stop"),
        top_logprobs=_first_token(getattr(choice, "logprobs", None)),
        retries=retries,
    )


def _first_token(logprobs: Any) -> dict[str, float] | None:
    tokens = logprobs.content if logprobs else None
    if not tokens:
        return None
    return {one.token: float(one.logprob) for one in tokens[0].top_logprobs}


def _explain(endpoint: Endpoint, error: APIError) -> EndpointError:
    """Return what the user can understand: what failed, where, and what to do."""
    import openai

    where, tries = endpoint.base_url, f"(tries: {endpoint.max_retries + 1})"
    match error:
        case openai.APITimeoutError():
            message = f"{where} did not answer within {endpoint.timeout_s:g} s {tries}"
            hint = "Give it more time, or ask for less at the same time."
            return EndpointError("timeout", message, hint=hint)
        case openai.APIConnectionError():
            # A refused connection or a host that nobody knows, in whatever HTTP library.
            nobody = type(error.__cause__).__name__ == "ConnectError"
            verb = "cannot be reached" if nobody else "broke the connection"
            message = f"{where} {verb}: {error.__cause__} {tries}"
            hint = "Check the base URL and that the server runs."
            return EndpointError("connection", message, hint=hint, fatal=nobody)
        case openai.APIStatusError():
            return _explain_status(endpoint, error)
        case _:
            return EndpointError("failure", f"{where}: {_excerpt(error.message)}")


def _explain_status(endpoint: Endpoint, error: APIStatusError) -> EndpointError:
    where, status = endpoint.base_url, error.status_code
    said, kind = _excerpt(error.message), f"status {error.status_code}"
    if status in {401, 403}:
        hint = f"Put a key of this endpoint into {' or '.join(KEY_VARIABLES)}."
        return EndpointError(kind, f"{where} refuses the key ({status})", hint=hint, fatal=True)
    if status == 404:
        message = f"{where} knows no model {endpoint.model!r} (404: {said})"
        hint = "Check the model's name, and that the base URL ends before /chat/completions."
        return EndpointError(kind, message, hint=hint, fatal=True)
    message = f"{where} failed with status {status}: {said}"
    return EndpointError(kind, message, hint="The same command tries again.")


def _excerpt(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= _EXCERPT_CHARS else shown[:_EXCERPT_CHARS] + " ..."
