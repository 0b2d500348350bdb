"""`load`: from a name to a model that answers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.model import Model
from pasta_decoding.api.opening import open_decoder
from pasta_decoding.models.bases import default_cache
from pasta_decoding.models.load import NO_ADAPTER, find_adapter, holds_weights, known_base
from pasta_decoding.models.pull import model_folder, pull


def load(
    adapter: str | Path | None = None, *, cache: str | Path | None = None, **settings: Any
) -> Model:
    """Load a checkpoint onto the best engine of this machine, or find the servers that have it.

    adapter:  a shipped adapter ("balanced", "sequential"), the folder of an adapter or of a whole
              model, the name of a whole model on the hub, a GGUF file, or "none" for the base
              model alone. None: "balanced".
    cache:    folder of downloads and exports; PASTA_CACHE or the user's cache if left out.
    settings: the other fields of `EngineConfig`: model, engine, join, dtype, max_model_len,
              cache_tokens, threads, device, base_url, api_key.

    The logger "pasta_decoding" reports what takes time. Raises PastaError for an unknown adapter
    (with those that ship), a model of another base, an engine that is not installed (with the
    command that installs it), and broken files.
    """
    folder = default_cache(os.environ) if cache is None else Path(cache)
    config = EngineConfig.named(adapter=adapter, **settings)
    return Model(open_decoder(_fetched(config, folder), folder))


def _fetched(config: EngineConfig, cache: Path) -> EngineConfig:
    """Fetch what is missing; return the config with a folder in the place of a hub's name."""
    if config.whole is not None:
        return config
    named = Path(config.adapter_name)
    if len(named.parts) == 2 and not named.is_dir():
        config = replace(config, adapter=str(model_folder(named, cache)))
    name = config.adapter_name
    adapter = None if name == NO_ADAPTER else find_adapter(name)
    if config.model is None and not (adapter and holds_weights(adapter)):
        base = known_base(name)
        if not (cache / base).exists():
            pull(cache, base)
    return config
