"""The command `serve`: an OpenAI-compatible server, and the page."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import check_local, open_local
from pasta_decoding.cli.console import cache_folder, say
from pasta_decoding.cli.opening import decoder_for, with_default
from pasta_decoding.cli.options import command
from pasta_decoding.errors import PastaError, require
from pasta_decoding.models.catalog import (
    NO_ADAPTER,
    adapter_name,
    baseline_of,
    resolve,
    short_name,
    whole_model,
)
from pasta_decoding.remote.stream import checked_key
from pasta_decoding.scheduling.decoder import Decoder
from pasta_decoding.server.settings import LoadLimits, Settings

if TYPE_CHECKING:
    from pasta_decoding.server.backend import Backend
    from pasta_decoding.server.metrics import Metrics


@command("pasta serve", "pasta serve --baseline sequential --host 0.0.0.0 --port 8080")
def serve(
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; pasta-ADAPTER if left out.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="`sequential`, an adapter or a merged model: the page can race it."),
    ] = None,
    *,
    settings: Settings,
    load: LoadLimits,
    engine: EngineConfig,
) -> None:
    """Serve OpenAI's API, and a page that shows the threads while they write."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require(package, extra="serve", doing="serving")
    from pasta_decoding.server.app import create_app
    from pasta_decoding.server.backend import Backend, warmed_up
    from pasta_decoding.server.listen import address, http_server, is_loopback, open_socket
    from pasta_decoding.server.metrics import Metrics

    key = checked_key(settings.api_key)
    metrics = Metrics()
    engine = with_default(engine)
    if load.target_ms_per_token and engine.is_remote:
        raise PastaError("--target-ms-per-token needs an engine of this process")
    with open_socket(settings.host, settings.port) as listener:
        hosts = (settings.host,) if key is None and is_loopback(listener) else None
        # A wrong baseline is refused before the model is loaded.
        rival = None if baseline is None else baseline_backend(engine, baseline, metrics)
        decoder = warmed_up(decoder_for(engine))
        if name is None:
            name = served_name(engine)
        backends = {name: Backend(lambda: decoder, metrics, load)}
        if rival is not None:
            rival_name, rival_backend = rival
            if rival_name == name:
                rival_name = f"{name}-baseline"
            backends[rival_name] = rival_backend
        if key is None and not is_loopback(listener):
            say("anybody who reaches this address may ask: --api-key keeps them out")
        say(f"{name} at {address(listener)}")
        log_with_time(settings.log_level)
        app = create_app(backends, metrics, replace(settings, api_key=key, hosts=hosts))
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after a clean stop
            http_server(app, list(backends.values())).run(sockets=[listener])


def log_with_time(server_level: str) -> None:
    """Set the log level of the server, and give all lines from now on a time and a level."""
    logging.getLogger("pasta_decoding.server").setLevel(server_level.upper())
    for handler in logging.getLogger("pasta_decoding").handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))


def served_name(engine: EngineConfig) -> str:
    """Return what clients call a checkpoint: `pasta-` and its adapter, or the model's own name."""
    whole_path = whole_model(engine.adapter, engine.model)
    path = whole_path or Path(short_name(engine.adapter, engine.model))
    name = path.resolve().name.removesuffix(".gguf")
    has_adapter = whole_path is None and adapter_name(engine.adapter, engine.model) != NO_ADAPTER
    return f"pasta-{name}" if has_adapter else name


def baseline_backend(engine: EngineConfig, baseline: str, metrics: Metrics) -> tuple[str, Backend]:
    """Return the baseline's name, and a backend that loads it for the first request."""
    from pasta_decoding.server.backend import Backend, warmed_up

    baseline_model = baseline_of(engine.adapter, engine.model, baseline, is_remote=engine.is_remote)
    rival = replace(engine, adapter=baseline_model.adapter, model=baseline_model.model)
    check_local(rival)
    resolve(rival.adapter, rival.model, cache_folder())  # a missing file is reported now
    name = short_name(rival.adapter, rival.model)

    def load() -> Decoder:
        return warmed_up(replace(open_local(rival, cache_folder()), parallel=False))

    say(f"the baseline, {name}, is loaded at the first race, with an engine of its own")
    return name, Backend(load, metrics, LoadLimits(max_requests=4, max_queue=16))
