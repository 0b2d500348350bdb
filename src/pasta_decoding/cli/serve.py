"""The command `serve`: an OpenAI-compatible server, and the page."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.files import cache_folder, say
from pasta_decoding.cli.options import with_options
from pasta_decoding.errors import PastaError, install_command
from pasta_decoding.server.settings import Load, Settings

if TYPE_CHECKING:
    from socket import socket

    from pasta_decoding.runtime.local import LocalDecoder
    from pasta_decoding.server.backend import Backend
    from pasta_decoding.server.metrics import Metrics

RIVAL_LOAD = Load(max_requests=4, max_queue=16)
"""Races at a time, and those that wait."""


class LogLevel(StrEnum):
    """What is worth a line on standard error."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@dataclass(frozen=True, slots=True)
class Process:
    """Where the server listens, what it tells on standard error, and how it ends."""

    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; only this machine's own is safe without --api-key."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000
    log_level: Annotated[
        LogLevel, typer.Option(help="`info` writes a line for each request, to standard error.")
    ] = LogLevel.warning
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long answers may go on once the server is to stop.")
    ] = 5.0


@with_options
def serve(
    api_key_file: Annotated[
        Path | None, typer.Option(help="Read the key from this file's first line instead.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; pasta-ADAPTER if left out.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="A sequential baseline for the page to race against: `sequential` for adapters "
            "that ship, else an adapter or whole model. Loaded at the first race, it takes as much "
            "memory again."
        ),
    ] = None,
    *,
    process: Process,
    settings: Settings,
    load: Load,
    loading: EngineConfig,
) -> None:
    """Answer OpenAI's clients, and show a page where one watches the threads write."""
    refuse_without_extra()
    from pasta_decoding.api.opening import open_decoder
    from pasta_decoding.server.backend import Backend
    from pasta_decoding.server.listen import is_loopback, open_socket
    from pasta_decoding.server.metrics import Metrics

    key = key_of(settings.api_key, api_key_file)
    settings = replace(settings, api_key=key)
    logging.getLogger("pasta_decoding.server").setLevel(process.log_level.upper())
    with ExitStack() as stack:
        listener = stack.enter_context(open_socket(process.host, process.port))
        if key is None and is_loopback(listener):
            settings = replace(settings, hosts=(process.host,))
        metrics = Metrics()
        decoder = open_decoder(loading, cache_folder())
        backends = {name or model_name(loading): Backend(lambda: decoder, metrics, load)}
        if baseline is not None:
            backends |= rival_of(loading, baseline, metrics, beside=backends)
        listen(listener, process, settings, metrics, backends)


def listen(
    listener: socket,
    process: Process,
    settings: Settings,
    metrics: Metrics,
    backends: Mapping[str, Backend],
) -> None:
    """Say where the server is, and answer until told to stop."""
    from pasta_decoding.server.app import create_app
    from pasta_decoding.server.listen import address, http_server, is_loopback

    if settings.api_key is None and not is_loopback(listener):
        say("anybody who reaches this address may ask: --api-key keeps them out")
    say(f"{next(iter(backends))} at {address(listener)}")
    _add_times()
    with suppress(KeyboardInterrupt):  # uvicorn has stopped in good order; that is all
        app = create_app(backends, metrics, settings)
        server = http_server(app, list(backends.values()), drain_seconds=process.drain_seconds)
        server.run(sockets=[listener])


def rival_of(
    loading: EngineConfig, baseline: str, metrics: Metrics, *, beside: Collection[str]
) -> dict[str, Backend]:
    """Return the baseline by name. It gets an engine of its own when it is first asked for."""
    from pasta_decoding.api.baseline import baseline_of
    from pasta_decoding.api.opening import check_local, find, open_local
    from pasta_decoding.server.backend import Backend

    found = baseline_of(loading, baseline)
    check_local(found.settings)
    find(found.settings, cache_folder())  # what is not there is told now

    def load() -> LocalDecoder:
        return replace(open_local(found.settings, cache_folder()), parallel=False)

    name = f"{found.name}-baseline" if found.name in beside else found.name
    say(f"its baseline, {name}, is loaded at the first race, with an engine and a cache of its own")
    return {name: Backend(load, metrics, RIVAL_LOAD)}


def _add_times() -> None:
    for handler in logging.getLogger("pasta_decoding").handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))


def key_of(key: str | None, file: Path | None) -> str | None:
    """Return the key that clients need, from wherever it is; None if there is none."""
    from pasta_decoding.remote.client import checked_key

    if file is None:
        return checked_key(key)
    if key is not None:
        raise PastaError(
            "two API keys are given", hint="Leave out --api-key and PASTA_API_KEY, or the file."
        )
    try:
        return checked_key(file.read_text(encoding="utf-8").partition("\n")[0].strip())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise PastaError(
            f"cannot read the API key from {file}: {reason}",
            hint="Write the key into the file's first line.",
        ) from error


def refuse_without_extra() -> None:
    """Raise PastaError where what the server needs is not installed."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if not find_spec(name)]
    if missing:
        raise PastaError(
            f"the server needs {', '.join(missing)}",
            hint=f"Install the extra: {install_command('serve')}",
        )


def model_name(loading: EngineConfig) -> str:
    """Return what clients call the model unless told otherwise."""
    whole = loading.whole
    if whole is not None:
        return whole.stem if whole.suffix == ".gguf" else whole.resolve().name
    return f"pasta-{loading.adapter_name.rstrip('/').rpartition('/')[2]}"
