"""A service of completions: where it is, what it serves, how long it may take, when it refuses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pasta_decoding.errors import PastaError, require
from pasta_decoding.remote.stream import RemoteError, excerpt

if TYPE_CHECKING:
    from httpx2 import Client, Response

_HEALTHY = frozenset({400, 413, 422, 429})
"""These say nothing against a server: the request does not fit, or there are too many."""
_MAX_ERROR_BYTES = 2**16
_MAX_MODELS_BYTES = 2**20

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Service:
    """All that is needed to ask for completions.

    base_urls:     what stands before `/completions`, one a replica.
    model:         its name at the servers.
    max_positions: tokens of prompt and completion together.
    api_key:       never shown.
    connect_s:     limit on being reached,
    first_token_s: on the time from a request to its first token: its queue and its prefill,
    token_s:       and on that from one token to the next.
    retries:       of a request that has not brought a token, after the first try.
    pause_s:       before the first retry, twice as long before each further one.
    cooldown_s:    for how long a replica that has failed gets no new answers.
    """

    base_urls: tuple[str, ...]
    model: str
    vocabulary_size: int
    max_positions: int
    api_key: str | None = field(default=None, repr=False)
    connect_s: float = 10.0
    first_token_s: float = 120.0
    token_s: float = 60.0
    retries: int = 4
    pause_s: float = 0.25
    cooldown_s: float = 10.0


def http_library() -> Any:
    """Return httpx2. Raises PastaError if it is not installed."""
    require("httpx2", extra="remote", doing="the remote engine")
    import httpx2

    return httpx2


def checked_url(url: str) -> str:
    """Return a base URL without a slash at its end; a server alone gets its `/v1`."""
    httpx = http_library()
    bad = PastaError(f"{url!r} is no base URL such as http://localhost:8000/v1")
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # what a connection would look up
    except (httpx.InvalidURL, TypeError, UnicodeError) as error:
        raise bad from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query:
        raise bad
    return f"{url.rstrip('/')}/v1" if parsed.path in ("", "/") else url.rstrip("/")


def checked_key(key: str | None) -> str | None:
    """Return an API key; PastaError, which does not show it, if no client could send it."""
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise PastaError("the API key is empty or has characters that no header can hold")
    return key


def headers(api_key: str | None) -> dict[str, str]:
    """Return what shows a key to a server; PastaError if it cannot be sent."""
    return {} if api_key is None else {"Authorization": f"Bearer {checked_key(api_key)}"}


def find_model(
    base_urls: Sequence[str], names: Sequence[str], *, api_key: str | None, connect_s: float = 10.0
) -> tuple[str, int | None]:
    """Ask what is served; return the model's name and how many tokens it holds, if that is said.

    Of several models it is the one that is called as one of `names`. A replica that cannot be
    reached now, or fails with what may pass, may come later, as long as one answers. Raises
    PastaError if none does, or if they do not serve the same.
    """
    httpx = http_library()
    found: dict[str, tuple[str, int | None]] = {}
    absent: list[str] = []
    with httpx.Client(headers=headers(api_key), timeout=connect_s) as client:
        for base_url in base_urls:
            try:
                found[base_url] = _model_of(client, base_url, names, connect_s)
            except (httpx.TransportError, httpx.DecodingError, RemoteError) as error:
                absent.append(f"{base_url}: {excerpt(str(error) or type(error).__name__)}")
    if not found:
        raise PastaError(f"no server is ready: {'; '.join(absent)}")
    if len({model for model, _ in found.values()}) > 1:
        served = ", ".join(f"{model!r} at {base_url}" for base_url, (model, _) in found.items())
        raise PastaError(f"the servers serve different models: {served}")
    model = next(model for model, _ in found.values())
    return model, min((size for _, size in found.values() if size is not None), default=None)


def _model_of(
    client: Client, base_url: str, names: Sequence[str], limit_s: float
) -> tuple[str, int | None]:
    status, body = _fetched(client, f"{base_url}/models", limit_s)
    said = excerpt(body.decode("utf-8", "replace"))
    if _is_retryable(status):
        raise RemoteError(f"it failed with status {status}: {said}")
    if status in (401, 403):
        raise PastaError(f"{base_url} refuses the key ({status}); set PASTA_REMOTE_KEY")
    try:
        models = {str(one["id"]): one.get("max_model_len") for one in json.loads(body)["data"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PastaError(f"{base_url}/models does not list models: {said}") from error
    known = [name for name in names if name in models]
    if not known and len(models) != 1:
        raise PastaError(
            f"{base_url} serves {', '.join(map(repr, models)) or 'no model'}, none of them called "
            f"{' or '.join(map(repr, names))} (vLLM: --served-model-name)"
        )
    name = known[0] if known else next(iter(models))
    size = models[name]
    return name, size if type(size) is int and size > 0 else None


def _fetched(client: Client, url: str, limit_s: float) -> tuple[int, bytes]:
    """Return status and body, bounded in bytes and in seconds however slowly it drips."""
    end_s, body = time.monotonic() + limit_s, b""
    with client.stream("GET", url) as response:
        for piece in response.iter_bytes():
            body += piece
            if len(body) > _MAX_MODELS_BYTES or time.monotonic() > end_s:
                raise RemoteError(f"its list of models has no end ({len(body)} bytes came)")
        return response.status_code, body


async def in_time(coming: Awaitable[_T], began_s: float, limit_s: float) -> _T:
    """Wait until `limit_s` behind `began_s`, whatever else keeps a stream alive, or RemoteError."""
    try:
        async with asyncio.timeout_at(began_s + limit_s):
            return await coming
    except TimeoutError as late:
        raise RemoteError(f"it sent no token for {limit_s:g} s", retryable=True) from late


async def check_status(response: Response, service: Service) -> None:
    """Raise RemoteError unless a completion follows."""
    status = response.status_code
    if status == 200:
        return
    try:
        async with asyncio.timeout(service.token_s):
            said = await _reason_in(response)
    except TimeoutError:
        said = "no reason came"
    if status in (401, 403):
        raise RemoteError(f"it refuses the key ({status}); set PASTA_REMOTE_KEY")
    if status == 404:
        raise RemoteError(f"it knows no model {service.model!r}, or no completions (404: {said})")
    after = response.headers.get("Retry-After") or ""
    raise RemoteError(
        f"it failed with status {status}: {said}",
        retryable=_is_retryable(status),
        healthy=status in _HEALTHY,
        # The header's other form, a date, is not worth a parser.
        retry_after_s=float(after) if after.isdecimal() else None,
    )


def _is_retryable(status: int) -> bool:
    return status in (408, 409, 425, 429) or status >= 500


async def _reason_in(response: Response) -> str:
    """Return what a reply that is no stream has to say, as far as one cares to read."""
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > _MAX_ERROR_BYTES:
            break
    text = body[:_MAX_ERROR_BYTES].decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return excerpt(text)
    return excerpt(found.get("error", found) if isinstance(found, dict) else found)
