"""The command `serve`: an OpenAI-compatible server, and the page."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.api.settings import LoadSettings
from pasta_decoding.cli.files import place, say
from pasta_decoding.cli.options import with_options
from pasta_decoding.errors import PastaError, install_command
from pasta_decoding.server.settings import Load, Settings

if TYPE_CHECKING:
    from socket import socket

    from pasta_decoding.server.app import Rival
    from pasta_decoding.server.backend import Backend
    from pasta_decoding.server.metrics import Metrics

RIVAL_REQUESTS, RIVAL_QUEUE = 4, 16
"""Races at a time, and those that wait."""


class LogLevel(StrEnum):
    """What is worth a line on standard error."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


_SETTINGS = Settings(model="")


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
    parallel_up_to: Annotated[
        int | None,
        typer.Option(min=0, help="Without effect: load changes no answer any more.", hidden=True),
    ] = None


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
            help="Load a sequential baseline, too, for the page to race against: `sequential` for "
            "adapters that ship, else an adapter or whole model. It takes as much memory again."
        ),
    ] = None,
    *,
    process: Process,
    settings: Settings = _SETTINGS,
    load: Load,
    loading: LoadSettings,
) -> None:
    """Answer OpenAI's clients, and show a page where one watches the threads write."""
    refuse_without_extra()
    from pasta_decoding.server.listen import open_socket, own_names

    key = key_of(settings.api_key, api_key_file)
    settings = replace(settings, model=name or model_name(loading), api_key=key)
    log_to_stderr(process.log_level)
    with open_socket(process.host, process.port) as listener:
        if key is None:
            settings = replace(settings, hosts=own_names(listener, process.host))
        listen(listener, process, settings, load, loading, baseline)


def listen(
    listener: socket,
    process: Process,
    settings: Settings,
    load: Load,
    loading: LoadSettings,
    baseline: str | None,
) -> None:
    """Load what answers, say where it is, and answer until told to stop."""
    from pasta_decoding.server.app import create_app
    from pasta_decoding.server.listen import address, http_server, is_loopback
    from pasta_decoding.server.metrics import Metrics

    metrics = Metrics()
    backend = load_backend(loading, metrics, load)
    rival = None if baseline is None else load_rival(loading, baseline, settings.model)
    if process.parallel_up_to is not None:
        say("--parallel-up-to does nothing any more: load delays threads, and bans no promise")
    if settings.api_key is None and not is_loopback(listener):
        say("anybody who reaches this address may ask: --api-key keeps them out")
    say(f"{settings.model} at {address(listener)}")
    with suppress(KeyboardInterrupt):  # uvicorn has stopped in good order; that is all
        app = create_app(backend, metrics, settings, rival)
        http_server(app, backend, last_words_s=process.drain_seconds).run(sockets=[listener])


def load_backend(loading: LoadSettings, metrics: Metrics, load: Load) -> Backend:
    """Load the checkpoint onto the engine, or find the servers that have it."""
    from pasta_decoding.api.opening import open_decoder
    from pasta_decoding.remote.decoder import RemoteDecoder
    from pasta_decoding.server.local_backend import LocalBackend
    from pasta_decoding.server.remote_backend import RemoteBackend

    decoder = open_decoder(loading, place())
    if isinstance(decoder, RemoteDecoder):
        return RemoteBackend(decoder, metrics, load.max_requests, load.max_queue)
    return LocalBackend(
        decoder, metrics, load.max_requests, load.max_queue, load.target_ms_per_token
    )


def load_rival(loading: LoadSettings, baseline: str, model: str) -> Rival:
    """Load the baseline onto an engine of its own. What it does is not in the metrics."""
    from pasta_decoding.api.baseline import baseline_of
    from pasta_decoding.api.opening import open_local
    from pasta_decoding.server.app import Rival
    from pasta_decoding.server.local_backend import LocalBackend
    from pasta_decoding.server.metrics import Metrics

    found = baseline_of(loading, baseline)
    decoder = replace(open_local(found.settings, place()), parallel=False)
    name = f"{found.name}-baseline" if found.name == model else found.name
    say(f"its baseline, {name}, has an engine and a cache of its own")
    return Rival(name, LocalBackend(decoder, Metrics(), RIVAL_REQUESTS, RIVAL_QUEUE))


def key_of(key: str | None, file: Path | None) -> str | None:
    """Return the key that clients need, from wherever it is; None if there is none."""
    from pasta_decoding.remote.service import checked_key

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


def log_to_stderr(level: LogLevel) -> None:
    """Write what the server tells about itself to standard error, a line each."""
    handler = _Teller()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("pasta_decoding")
    log.handlers[:] = [handler]
    log.setLevel(level.upper())


class _Teller(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def refuse_without_extra() -> None:
    """Raise PastaError where what the server needs is not installed."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if not find_spec(name)]
    if missing:
        raise PastaError(
            f"the server needs {', '.join(missing)}",
            hint=f"Install the extra: {install_command('serve')}",
        )


def model_name(loading: LoadSettings) -> str:
    """Return what clients call the model unless told otherwise."""
    whole = loading.whole
    if whole is not None:
        return whole.stem if whole.suffix == ".gguf" else whole.resolve().name
    return f"pasta-{loading.adapter_name.rstrip('/').rpartition('/')[2]}"
