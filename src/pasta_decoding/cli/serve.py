"""The command `serve`: an OpenAI-compatible server, and the page."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.console import cache_folder, say
from pasta_decoding.cli.options import command
from pasta_decoding.errors import PastaError, install_command
from pasta_decoding.server.settings import Load, Settings

if TYPE_CHECKING:
    from socket import socket

    from pasta_decoding.runtime.local import LocalDecoder
    from pasta_decoding.server.backend import Backend
    from pasta_decoding.server.metrics import Metrics

BASELINE_LOAD = Load(max_requests=4, max_queue=16)
"""Races at a time, and those that wait."""


@command("pasta serve", "pasta serve --baseline sequential --host 0.0.0.0 --port 8080")
def serve(
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; pasta-ADAPTER if left out.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Sequential baseline for the page to race against, loaded at the first race: "
            "`sequential` for adapters that ship, else an adapter or a whole model."
        ),
    ] = None,
    *,
    settings: Settings,
    load: Load,
    loading: EngineConfig,
) -> None:
    """Answer OpenAI's clients, and show a page where one watches the threads write."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if not find_spec(name)]
    if missing:
        hint = f"Install the extra: {install_command('serve')}"
        raise PastaError(f"the server needs {', '.join(missing)}", hint=hint)

    from pasta_decoding.api.opening import open_decoder
    from pasta_decoding.remote.client import checked_key
    from pasta_decoding.server.backend import Backend
    from pasta_decoding.server.listen import is_loopback, open_socket
    from pasta_decoding.server.metrics import Metrics

    key, metrics = checked_key(settings.api_key), Metrics()
    with open_socket(settings.host, settings.port) as listener:
        own_names = (settings.host,) if key is None and is_loopback(listener) else None
        decoder = open_decoder(loading, cache_folder())
        backends = {name or model_name(loading): Backend(lambda: decoder, metrics, load)}
        if baseline is not None:
            backends |= baseline_backend(loading, baseline, metrics, beside=backends)
        listen(listener, replace(settings, api_key=key, hosts=own_names), metrics, backends)


def listen(
    listener: socket, settings: Settings, metrics: Metrics, backends: Mapping[str, Backend]
) -> None:
    """Say where the server is, and answer until told to stop."""
    from pasta_decoding.server.app import create_app
    from pasta_decoding.server.listen import address, http_server, is_loopback

    if settings.api_key is None and not is_loopback(listener):
        say("anybody who reaches this address may ask: --api-key keeps them out")
    say(f"{next(iter(backends))} at {address(listener)}")
    logging.getLogger("pasta_decoding.server").setLevel(settings.log_level.upper())
    for handler in logging.getLogger("pasta_decoding").handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    with suppress(KeyboardInterrupt):  # uvicorn has stopped in good order; that is all
        app = create_app(backends, metrics, settings)
        http_server(app, list(backends.values()), settings.drain_seconds).run(sockets=[listener])


def baseline_backend(
    loading: EngineConfig, baseline: str, metrics: Metrics, *, beside: Collection[str]
) -> dict[str, Backend]:
    """Return the baseline by name. It gets an engine of its own when it is first asked for."""
    from pasta_decoding.api.baseline import baseline_of
    from pasta_decoding.api.opening import check_local, find, open_local
    from pasta_decoding.server.backend import Backend

    found = baseline_of(loading, baseline)
    check_local(found.config)
    find(found.config, cache_folder())  # what is not there is told now

    def load() -> LocalDecoder:
        return replace(open_local(found.config, cache_folder()), parallel=False)

    name = f"{found.name}-baseline" if found.name in beside else found.name
    say(f"the baseline, {name}, is loaded at the first race, with an engine of its own")
    return {name: Backend(load, metrics, BASELINE_LOAD)}


def model_name(loading: EngineConfig) -> str:
    """Return what clients call the model unless told otherwise."""
    whole = loading.whole
    if whole is not None:
        return whole.stem if whole.suffix == ".gguf" else whole.resolve().name
    if loading.adapter is None and loading.model is not None:
        return loading.model.name
    return f"pasta-{loading.adapter_name.rstrip('/').rpartition('/')[2]}"
