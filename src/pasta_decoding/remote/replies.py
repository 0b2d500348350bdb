"""The beginning of a server's reply, and the time that it may take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pasta_decoding.remote.completions import RemoteError, excerpt
from pasta_decoding.remote.service import RetryPolicy, Service, is_retryable

if TYPE_CHECKING:
    from httpx2 import Response

_HEALTHY = frozenset({400, 413, 422, 429})
"""These say nothing against a server: the request does not fit, or there are too many."""
_MAX_ERROR_BYTES = 2**16


class TokenLimit:
    """When the next token of a completion has to be there, whatever else keeps its stream alive."""

    def __init__(self, retry_policy: RetryPolicy) -> None:
        self._token_s = retry_policy.token_s
        self._set(retry_policy.first_token_s)

    def extend(self) -> None:
        """Wait for one more."""
        self._set(self._token_s)

    def _set(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline_s = asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Run the block until then; RemoteError if that is not enough."""
        try:
            async with asyncio.timeout_at(self._deadline_s):
                yield
        except TimeoutError as late:
            message = f"it sent no token for {self._seconds:g} s"
            raise RemoteError(message, retryable=True) from late


async def check_status(response: Response, service: Service) -> None:
    """Raise RemoteError unless a completion follows."""
    status = response.status_code
    if status == 200:
        return
    try:
        async with asyncio.timeout(service.retry_policy.token_s):
            said = await _beginning(response)
    except TimeoutError:
        said = "no reason came"
    if status in (401, 403):
        raise RemoteError(f"it refuses the key ({status})", hint="Give --remote-key.")
    if status == 404:
        message = f"it knows no model {service.model!r}, or no completions (404: {said})"
        raise RemoteError(message, hint="Check the base URL and what is served there.")
    raise RemoteError(
        f"it failed with status {status}: {said}",
        retryable=is_retryable(status),
        healthy=status in _HEALTHY,
        retry_after_s=_seconds(response.headers.get("Retry-After")),
    )


async def _beginning(response: Response) -> str:
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


def _seconds(header: str | None) -> float | None:
    """Read Retry-After; its other form, a date, is not worth a parser."""
    return float(header) if header is not None and header.isdecimal() else None
