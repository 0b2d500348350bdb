"""Sends conversations to an OpenAI-compatible endpoint; returns a reply or raises one clear error.

The official client does the transport. It retries time-outs, lost connections, 408, 409, 429 and
5xx, with growing pauses, or after the pause that `Retry-After` gives.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from pasta_decoding.errors import PastaError, checked_url, excerpt, require

if TYPE_CHECKING:
    from openai import APIError, AsyncOpenAI

EndpointMessage = Mapping[str, str]
"""A turn of a conversation: `role` and `content`."""

KEY_VARIABLES = ("PASTA_ENDPOINT_KEY", "OPENAI_API_KEY")
"""Environment variables for the key of an endpoint; the first one that is set counts."""

LOGPROB_ARGUMENTS = ("logprobs", "top_logprobs")
"""The arguments that ask for log-probabilities. A caller adds them to `Endpoint.arguments`."""
_TOP_LOGPROBS = 5  # some endpoints return fewer
_ARGUMENT_STATUSES = (400, 403, 422)
"""Statuses of a refused argument: 400 at most endpoints, 422 at Mistral, 403 for `logprobs`."""

_UNANSWERED_JOBS = 10  # in a row: then the endpoint is down, and it is not one hard job

# The first tag may be missing: some chat templates write it into the prompt.
_THOUGHTS = re.compile(r"\A(\s*<think>)?((?!<think>).)*?</think>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint, and how long to wait for it.

    base_url:  the URL before `/chat/completions`, such as `http://localhost:8000/v1`.
    api_key:   never printed; empty for an endpoint that needs none.
    timeout_s: of one try of one request.
    arguments: sampling arguments to send. An argument that the model refuses is removed.
    """

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    concurrency: int = 8
    max_retries: int = 5
    timeout_s: float = 300.0
    arguments: list[str] = field(default_factory=lambda: ["temperature", "max_tokens"])


@dataclass(frozen=True, slots=True)
class EndpointReply:
    """The reply to a conversation.

    text:     the answer without the thoughts in `<think>` tags.
    cost:     `requests` (failed tries included), `prompt_tokens` and `completion_tokens`.
    logprobs: one dictionary a token, from texts to log-probabilities: first the token that was
              written, then the likeliest ones in its place. Empty if the endpoint returns none.
    """

    text: str
    cost: dict[str, int]
    logprobs: list[dict[str, float]]


class EndpointError(PastaError):
    """A request that failed after all its tries.

    kind:  the reason in one or two words, for counting: `timeout`, `status 500` and others.
    fatal: whether every request with these settings will fail.
    """

    def __init__(self, kind: str, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.fatal = fatal


def endpoint_key(environment: Mapping[str, str]) -> str:
    """Return the key in the environment; empty without one."""
    keys = (environment.get(name) for name in KEY_VARIABLES)
    return next((key for key in keys if key), "")


def open_client(endpoint: Endpoint) -> AsyncOpenAI:
    """Return a client for `async with`. Raises PastaError for a malformed base URL."""
    require("openai", extra="endpoint", doing="asking an endpoint")
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=checked_url(endpoint.base_url),
        api_key=endpoint.api_key or "none",  # the client needs one, local servers do not
        timeout=endpoint.timeout_s,
        max_retries=endpoint.max_retries,
    )


Job = TypeVar("Job")
Result = TypeVar("Result")
AskEndpoint = Callable[..., Awaitable[EndpointReply]]
"""`chat` without its first two arguments: takes messages, max_tokens and temperature."""
Work = Callable[[AskEndpoint, Job], Awaitable[tuple[Result, EndpointError | None]]]
"""Does one job. Returns the result, and the error if the endpoint did not answer."""


def ask_concurrently(
    endpoint: Endpoint, jobs: Iterable[Job], work: Work[Job, Result]
) -> Iterator[Result]:
    """Do jobs, `endpoint.concurrency` at a time; yield results in the order in which jobs end.

    Raises EndpointError after a fatal error, or after many jobs in a row without an answer. The
    results of these jobs are not yielded.
    """
    unanswered: list[Result] = []
    limit = max(_UNANSWERED_JOBS, 2 * endpoint.concurrency)
    with asyncio.Runner() as runner:
        outcomes = _outcomes(endpoint, jobs, work)
        while (outcome := runner.run(_next(outcomes))) is not None:
            result, failure = outcome
            if failure is None:
                yield from (result, *unanswered)
                unanswered = []
                continue
            unanswered.append(result)
            if failure.fatal or len(unanswered) == limit:
                raise failure
    yield from unanswered


async def _next(outcomes: AsyncIterator[Result]) -> Result | None:
    return await anext(outcomes, None)


async def _outcomes(
    endpoint: Endpoint, jobs: Iterable[Job], work: Work[Job, Result]
) -> AsyncIterator[tuple[Result, EndpointError | None]]:
    waiting = iter(jobs)
    running: set[asyncio.Future[tuple[Result, EndpointError | None]]] = set()
    async with open_client(endpoint) as client:
        ask = partial(chat, client, endpoint)
        while running := running | {
            asyncio.ensure_future(work(ask, job))
            for job in islice(waiting, endpoint.concurrency - len(running))
        }:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            # Answers come first: they are paid for, and an error may end the run.
            outcomes = [task.result() for task in done]
            outcomes.sort(key=lambda outcome: outcome[1] is not None)
            for outcome in outcomes:
                yield outcome


async def chat(
    client: AsyncOpenAI,
    endpoint: Endpoint,
    messages: Sequence[EndpointMessage],
    max_tokens: int,
    temperature: float = 0.0,
) -> EndpointReply:
    """Return the reply to a conversation. Raises EndpointError if all tries failed."""
    from openai import APIError

    settings = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "max_completion_tokens": max_tokens,
        "logprobs": True,
        "top_logprobs": _TOP_LOGPROBS,
    }
    try:
        raw, tries = await _completion(client, endpoint, messages, settings)
    except APIError as error:
        raise _explained(endpoint, error) from error
    try:  # the client does not check replies: fields may be missing or have other types
        completion = raw.parse()
        choice = completion.choices[0]
        content = choice.message.content or ""
        if isinstance(content, list):  # from Mistral's reasoning models, with thoughts
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
    cost = {"requests": tries + raw.retries_taken, **counted}
    return EndpointReply(text, cost, _logprobs(choice))


def _logprobs(choice: Any) -> list[dict[str, float]]:
    """Return the log-probabilities of a choice; an empty list if they are missing or malformed."""
    try:
        return [
            {
                str(token.token): min(0.0, float(token.logprob))
                for token in (written, *(written.top_logprobs or ()))
            }
            for written in choice.logprobs.content
        ]
    except (ValueError, TypeError, AttributeError):
        return []


async def _completion(
    client: AsyncOpenAI,
    endpoint: Endpoint,
    messages: Sequence[EndpointMessage],
    settings: Mapping[str, Any],
) -> tuple[Any, int]:
    """Return the raw reply, and how many requests were needed.

    If the model refuses an argument, the argument is removed from `endpoint.arguments`, for later
    requests as well, and the request is sent again.

    settings: the value of each argument that `endpoint.arguments` may name.
    """
    from openai import APIStatusError

    create: Any = client.chat.completions.with_raw_response.create
    request = {"model": endpoint.model, "messages": list(messages)}
    tries = 0
    while True:
        names = list(endpoint.arguments)
        tries += 1
        try:
            return await create(**request, **{name: settings[name] for name in names}), tries
        except APIStatusError as error:
            if error.status_code not in _ARGUMENT_STATUSES:
                raise
            if "max_completion_tokens" in error.message and "max_tokens" in names:
                names[names.index("max_tokens")] = "max_completion_tokens"
            elif "temperature" in error.message and "temperature" in names:
                names.remove("temperature")
            elif "logprobs" in error.message and "logprobs" in names:
                names = [name for name in names if name not in LOGPROB_ARGUMENTS]
            else:
                raise
            endpoint.arguments[:] = names


def _explained(endpoint: Endpoint, error: APIError) -> EndpointError:
    """Return our error for an error of the client."""
    import openai

    status = getattr(error, "status_code", None)
    kind = f"status {status}"
    tries = f"(tries: {endpoint.max_retries + 1})"
    # A refused connection or an unknown host, in any HTTP library.
    is_unreachable = type(error.__cause__).__name__ == "ConnectError"
    if status in (401, 403):
        problem = f"refuses the key ({status}); it is read from {' or '.join(KEY_VARIABLES)}"
    elif isinstance(error, openai.APITimeoutError):
        kind = "timeout"
        problem = f"did not answer within {endpoint.timeout_s:g} s {tries}"
    elif isinstance(error, openai.APIConnectionError):
        kind = "connection"
        verb = "cannot be reached" if is_unreachable else "broke the connection"
        problem = f"{verb}: {error.__cause__} {tries}"
    else:
        problem = f"failed with status {status}: {excerpt(error.message)}"
    fatal = is_unreachable or status in (401, 403, 404)
    return EndpointError(kind, f"{endpoint.base_url} {problem}", fatal=fatal)
