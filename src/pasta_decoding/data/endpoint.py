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
    from openai import APIError, AsyncOpenAI

Message = Mapping[str, str]
"""A turn of a conversation: `role` and `content`."""

KEY_VARIABLES = ("PASTA_ENDPOINT_KEY", "OPENAI_API_KEY")
"""Where a user puts the key of an endpoint; the first one that is set counts."""

_KEYS = " or ".join(KEY_VARIABLES)

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

    retries: tries before this one that failed on the way.
    """

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0


class EndpointError(PastaError):
    """A request failed for good.

    kind:  the reason in a word or two, for counting: `timeout`, `status 500`, ...
    fatal: every other request with these settings will fail, too.
    """

    def __init__(self, kind: str, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
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
        raise PastaError(f"{url!r} is no base URL such as http://localhost:8000/v1")


class Chat:
    """Open connections to an endpoint; call it with a conversation."""

    def __init__(self, endpoint: Endpoint, client: AsyncOpenAI) -> None:
        self._endpoint = endpoint
        self._client = client
        self._slots = asyncio.Semaphore(endpoint.concurrency)

    async def __call__(self, messages: Sequence[Message], *, max_tokens: int) -> Reply:
        """Return the greedy answer to a conversation; EndpointError when no try brought one."""
        from openai import APIError

        create: Any = self._client.chat.completions.with_raw_response.create
        try:
            async with self._slots:
                raw = await create(
                    model=self._endpoint.model,
                    messages=list(messages),
                    temperature=0.0,
                    max_tokens=max_tokens,
                )
        except APIError as error:
            raise _explain(self._endpoint, error) from error
        try:
            return _reply(raw.parse(), raw.retries_taken)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            message = f"{self._endpoint.base_url} sent no chat completion: {_excerpt(raw.text)}"
            raise EndpointError("no completion", message) from error


def _reply(completion: Any, retries: int) -> Reply:
    """Read a completion. The client does not check it, so anything may be missing or of no use."""
    content, usage = completion.choices[0].message.content or "", completion.usage
    if not isinstance(content, str):
        raise TypeError("the answer is no text")
    tokens = (int(usage.prompt_tokens), int(usage.completion_tokens)) if usage else (0, 0)
    return Reply(content, *tokens, retries)


def _explain(endpoint: Endpoint, error: APIError) -> EndpointError:
    """Return what failed, where, and after how many tries."""
    import openai

    where, tries = endpoint.base_url, f"(tries: {endpoint.max_retries + 1})"
    match error:
        case openai.APITimeoutError():
            message = f"{where} did not answer within {endpoint.timeout_s:g} s {tries}"
            return EndpointError("timeout", message)
        case openai.APIConnectionError():
            # A refused connection or an unknown host, in any HTTP library.
            nobody = type(error.__cause__).__name__ == "ConnectError"
            verb = "cannot be reached" if nobody else "broke the connection"
            message = f"{where} {verb}: {error.__cause__} {tries}"
            return EndpointError("connection", message, fatal=nobody)
        case openai.APIStatusError(status_code=401 | 403 as status):
            message = f"{where} refuses the key ({status}); it is read from {_KEYS}"
            return EndpointError(f"status {status}", message, fatal=True)
        case openai.APIStatusError(status_code=404):
            message = f"{where} knows no model {endpoint.model!r} (404: {_excerpt(error.message)})"
            return EndpointError("status 404", message, fatal=True)
        case openai.APIStatusError(status_code=status):
            message = f"{where} failed with status {status}: {_excerpt(error.message)}"
            return EndpointError(f"status {status}", message)
        case _:
            return EndpointError("failure", f"{where}: {_excerpt(error.message)}")


def _excerpt(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= _EXCERPT_CHARS else shown[:_EXCERPT_CHARS] + " ..."
