"""A service of completions: where it is, what it serves, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError, install_command
from pasta_decoding.remote.completions import RemoteError, excerpt

if TYPE_CHECKING:
    from httpx2 import Client


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a server may take, and how often it is asked.

    connect_s:     to be reached.
    first_token_s: from a request to its first token: its queue and its prefill.
    token_s:       from one token to the next.
    retries:       of a request that has not brought a token, after the first try.
    pause_s:       before the first retry, twice as long before each further one.
    cooldown_s:    for how long a replica that has failed gets no new answers.
    """

    connect_s: float = 10.0
    first_token_s: float = 120.0
    token_s: float = 60.0
    retries: int = 4
    pause_s: float = 0.25
    cooldown_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Service:
    """What is served where: all that is needed to ask for completions.

    base_urls:   what stands before `/completions`, one a replica.
    model:       what the servers call it.
    max_positions: tokens of prompt and completion together.
    api_key:     never shown.
    connections: requests under way at a time, all replicas together; more wait for their turn.
    """

    base_urls: tuple[str, ...]
    model: str
    vocabulary_size: int
    max_positions: int
    api_key: str | None = field(default=None, repr=False)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    connections: int = 256


def http_library() -> Any:
    """Return httpx2. Raises PastaError if it is not installed."""
    try:
        import httpx2
    except ImportError as error:
        message = "the remote engine needs the package httpx2"
        raise PastaError(message, hint=install_command("remote")) from error
    return httpx2


def checked_url(url: str) -> str:
    """Return a base URL without a slash at its end; what names a server alone gets its `/v1`."""
    httpx = http_library()
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # what a connection would look up
    except (httpx.InvalidURL, TypeError, UnicodeError) as error:
        raise _bad_url(url) from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query:
        raise _bad_url(url)
    return f"{url.rstrip('/')}/v1" if parsed.path in ("", "/") else url.rstrip("/")


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
                found[base_url] = _model_of(client, base_url, names)
            except (httpx.TransportError, httpx.DecodingError, RemoteError) as error:
                absent.append(f"{base_url}: {excerpt(str(error) or type(error).__name__)}")
    if not found:
        message = f"no server is ready: {'; '.join(absent)}"
        raise PastaError(message, hint="Check --base-url and that the servers run.")
    if len({model for model, _ in found.values()}) > 1:
        served = ", ".join(f"{model!r} at {base_url}" for base_url, (model, _) in found.items())
        raise PastaError(
            f"the servers serve different models: {served}",
            hint="Give all replicas the same model, under the same name.",
        )
    model = next(model for model, _ in found.values())
    sizes = [size for _, size in found.values() if size is not None]
    return model, min(sizes, default=None)


def _model_of(client: Client, base_url: str, names: Sequence[str]) -> tuple[str, int | None]:
    response = client.get(f"{base_url}/models")
    hint = "Check that --base-url is that of an OpenAI-compatible server."
    if is_retryable(response.status_code):
        said = excerpt(response.text)
        raise RemoteError(f"it failed with status {response.status_code}: {said}", retryable=True)
    if response.status_code in (401, 403):
        message = f"{base_url} refuses the key ({response.status_code})"
        raise PastaError(message, hint="Give --remote-key.")
    try:
        listed = response.raise_for_status().json()["data"]
        models = {str(one["id"]): one.get("max_model_len") for one in listed}
    except (
        http_library().HTTPStatusError,
        ValueError,
        LookupError,
        TypeError,
        RecursionError,
    ) as error:
        message = f"{base_url}/models does not list models: {excerpt(response.text)}"
        raise PastaError(message, hint=hint) from error
    known = [name for name in names if name in models]
    if not known and len(models) != 1:
        raise PastaError(
            f"{base_url} serves {', '.join(map(repr, models)) or 'no model'}, none of them called "
            + " or ".join(map(repr, names)),
            hint="Serve it under one of these names (vLLM: --served-model-name).",
        )
    name = known[0] if known else next(iter(models))
    size = models[name]
    return name, size if type(size) is int and size > 0 else None


def _bad_url(url: str) -> PastaError:
    return PastaError(f"{url!r} is no base URL", hint="It looks like http://localhost:8000/v1.")


def checked_key(key: str | None) -> str | None:
    """Return an API key; PastaError, which does not show it, if no client could send it."""
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise PastaError(
            "the API key is empty or has characters that no header can hold",
            hint="Use letters, digits and dashes.",
        )
    return key


def headers(api_key: str | None) -> dict[str, str]:
    """Return what shows a key to a server; PastaError if it cannot be sent."""
    return {} if api_key is None else {"Authorization": f"Bearer {checked_key(api_key)}"}


def is_retryable(status: int) -> bool:
    """Tell whether a server that answers with `status` may do better in a while."""
    return status in (408, 409, 425, 429) or status >= 500
