"""Chat with any OpenAI-compatible endpoint: a conversation in, a text or one clear error out.

The official client does the transport. It retries time-outs, lost connections, 408, 409, 429 and
5xx, with growing pauses, or after the pause that `Retry-After` gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError, checked_url, excerpt, require

if TYPE_CHECKING:
    from openai import APIError, AsyncOpenAI

EndpointMessage = Mapping[str, str]
"""A turn of a conversation: `role` and `content`."""

KEY_VARIABLES = ("PASTA_ENDPOINT_KEY", "OPENAI_API_KEY")
"""Where a user puts the key of an endpoint; the first one that is set counts."""

# Some chat templates write the first tag themselves.
_THOUGHTS = re.compile(r"\A(\s*<think>)?((?!<think>).)*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask and how patiently.

    base_url:    what stands before `/chat/completions`, such as `http://localhost:8000/v1`.
    api_key:     never shown; empty for one that needs none.
    timeout_s:   of one try of one request.
    arguments:   those of sampling that the model takes, as far as is known.
    """

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    concurrency: int = 8
    max_retries: int = 5
    timeout_s: float = 300.0
    arguments: list[str] = field(default_factory=lambda: ["temperature", "max_tokens"])


class EndpointError(PastaError):
    """A request failed for good.

    kind:  the reason in a word or two, for counting: `timeout`, `status 500`, ...
    fatal: every other request with these settings will fail as well.
    """

    def __init__(self, kind: str, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.fatal = fatal


def open_client(endpoint: Endpoint) -> AsyncOpenAI:
    """Open connections, for `async with`. Raises PastaError for a base URL that is none."""
    require("openai", extra="endpoint", doing="asking an endpoint")
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=checked_url(endpoint.base_url),
        api_key=endpoint.api_key or "none",  # the client insists on one, local servers do not
        timeout=endpoint.timeout_s,
        max_retries=endpoint.max_retries,
    )


async def chat(
    client: AsyncOpenAI, endpoint: Endpoint, messages: Sequence[EndpointMessage], max_tokens: int
) -> tuple[str, dict[str, int]]:
    """Return the greedy answer to a conversation, without what a model thinks in `<think>` tags.

    With it comes what it cost: `requests`, tries that failed included, and tokens.
    Raises EndpointError when no try brought one.
    """
    from openai import APIError

    try:
        raw, tries = await _asked(client, endpoint, messages, max_tokens)
    except APIError as error:
        raise _explained(endpoint, error) from error
    try:  # the client does not check what comes: anything may be missing or of no use
        completion = raw.parse()
        choice = completion.choices[0]
        content = choice.message.content or ""
        if isinstance(content, list):  # Mistral's reasoning models send thoughts apart
            content = "".join(part["text"] for part in content if part["type"] == "text")
        text = _THOUGHTS.sub("", content)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        message = f"{endpoint.base_url} sent no chat completion: {excerpt(raw.text)}"
        raise EndpointError("no completion", message) from error
    is_cut = getattr(choice, "finish_reason", None) == "length"
    if is_cut and (not text or text.lstrip().startswith("<think>")):
        message = f"{endpoint.base_url} thought for {max_tokens} tokens and did not answer"
        raise EndpointError("no answer", message)
    kinds = ("prompt_tokens", "completion_tokens")
    counted = {kind: getattr(completion.usage, kind, None) or 0 for kind in kinds}
    return text, {"requests": tries + raw.retries_taken, **counted}


async def _asked(
    client: AsyncOpenAI, endpoint: Endpoint, messages: Sequence[EndpointMessage], max_tokens: int
) -> tuple[Any, int]:
    """Return the reply, and how many requests it took: reasoning models refuse some arguments."""
    from openai import BadRequestError

    create: Any = client.chat.completions.with_raw_response.create
    asked = {"model": endpoint.model, "messages": list(messages)}
    wanted = {"temperature": 0.0, "max_tokens": max_tokens, "max_completion_tokens": max_tokens}
    tries = 0
    while True:
        sent, tries = list(endpoint.arguments), tries + 1
        try:
            return await create(**asked, **{one: wanted[one] for one in sent}), tries
        except BadRequestError as error:
            if "max_completion_tokens" in error.message and "max_tokens" in sent:
                sent[sent.index("max_tokens")] = "max_completion_tokens"
            elif "temperature" in error.message and "temperature" in sent:
                sent.remove("temperature")
            else:
                raise
            endpoint.arguments[:] = sent


def _explained(endpoint: Endpoint, error: APIError) -> EndpointError:
    import openai

    status, tries = getattr(error, "status_code", None), f"(tries: {endpoint.max_retries + 1})"
    # A refused connection or an unknown host, in any HTTP library.
    nobody = type(error.__cause__).__name__ == "ConnectError"
    if status in (401, 403):
        said = f"refuses the key ({status}); it is read from {' or '.join(KEY_VARIABLES)}"
    elif isinstance(error, openai.APITimeoutError):
        status, said = "timeout", f"did not answer within {endpoint.timeout_s:g} s {tries}"
    elif isinstance(error, openai.APIConnectionError):
        verb = "cannot be reached" if nobody else "broke the connection"
        status, said = "connection", f"{verb}: {error.__cause__} {tries}"
    else:
        said = f"failed with status {status}: {excerpt(error.message)}"
    kind = status if isinstance(status, str) else f"status {status}"
    fatal = nobody or status in (401, 403, 404)
    return EndpointError(kind, f"{endpoint.base_url} {said}", fatal=fatal)
