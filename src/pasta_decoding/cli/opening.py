"""How commands open a model: the user's cache, this machine's default adapter, the servers' key."""

import os
from dataclasses import replace

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.defaults import default_adapter
from pasta_decoding.api.opening import open_decoder
from pasta_decoding.cli.console import cache_folder
from pasta_decoding.scheduling.decoder import Decoder


def with_default(engine: EngineConfig) -> EngineConfig:
    """Name this machine's default adapter if `engine` names neither adapter nor model."""
    if engine.adapter is not None or engine.model is not None:
        return engine
    return replace(engine, adapter=default_adapter(cache_folder(), os.environ, engine))


def decoder_for(engine: EngineConfig) -> Decoder:
    """Open the engine with the user's cache, and with $PASTA_REMOTE_KEY as the servers' key."""
    key = os.environ.get("PASTA_REMOTE_KEY")
    return open_decoder(replace(engine, api_key=key), cache_folder())
