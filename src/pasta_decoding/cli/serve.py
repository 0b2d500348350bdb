"""The command `serve`: an OpenAI-compatible server, and the page."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.api.checkpoints import baseline_of, find
from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import check_local, open_local
from pasta_decoding.cli.console import cache_folder, say
from pasta_decoding.cli.options import command
from pasta_decoding.cli.run import opened_decoder, with_default
from pasta_decoding.errors import PastaError, require
from pasta_decoding.models.load import NO_ADAPTER
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

    key, metrics, engine = checked_key(settings.api_key), Metrics(), with_default(engine)
    if load.target_ms_per_token and engine.is_remote:
        raise PastaError("--target-ms-per-token needs an engine of this process")
    with open_socket(settings.host, settings.port) as listener:
        own_names = (settings.host,) if key is None and is_loopback(listener) else None
        # A wrong baseline is refused before the model is loaded.
        rival = None if baseline is None else baseline_backend(engine, baseline, metrics)
        decoder = warmed_up(opened_decoder(engine))
        if name is None:
            own = engine.whole is None and engine.adapter_name != NO_ADAPTER
            place = engine.whole or Path(engine.short_name)
            name = ("pasta-" if own else "") + place.resolve().name.removesuffix(".gguf")
        backends = {name: Backend(lambda: decoder, metrics, load)}
        if rival is not None:
            backends[rival[0] if rival[0] != name else f"{name}-baseline"] = rival[1]
        if key is None and not is_loopback(listener):
            say("anybody who reaches this address may ask: --api-key keeps them out")
        say(f"{name} at {address(listener)}")
        logging.getLogger("pasta_decoding.server").setLevel(settings.log_level.upper())
        for handler in logging.getLogger("pasta_decoding").handlers:
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        app = create_app(backends, metrics, replace(settings, api_key=key, hosts=own_names))
        with suppress(KeyboardInterrupt):  # uvicorn has stopped in good order; that is all
            http_server(app, list(backends.values())).run(sockets=[listener])


def baseline_backend(engine: EngineConfig, baseline: str, metrics: Metrics) -> tuple[str, Backend]:
    """Return the baseline's name, and what loads it when it is first asked for."""
    from pasta_decoding.server.backend import Backend, warmed_up

    rival, _ = baseline_of(engine, baseline)
    check_local(rival)
    find(rival, cache_folder())  # what is not there is told now

    def load() -> Decoder:
        return warmed_up(replace(open_local(rival, cache_folder()), parallel=False))

    say(f"the baseline, {rival.short_name}, is loaded at the first race, with an engine of its own")
    return rival.short_name, Backend(load, metrics, LoadLimits(max_requests=4, max_queue=16))
