"""`load`: from a name to a model that answers."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.model import Model
from pasta_decoding.api.opening import open_decoder
from pasta_decoding.api.place import Place, Tell
from pasta_decoding.models.bases import DEFAULT_MODEL, default_cache
from pasta_decoding.models.load import NO_ADAPTER, find_adapter, holds_weights
from pasta_decoding.models.pull import model_folder, pull


def load(
    adapter: str | Path | None = None,
    *,
    cache: str | Path | None = None,
    tell: Tell | None = None,
    **settings: Any,
) -> Model:
    """Load a checkpoint onto the best engine of this machine, or find the servers that have it.

    adapter:  a shipped adapter ("balanced", "sequential"), the folder of an adapter or of a whole
              model, the name of a whole model on the hub, a GGUF file, or "none" for the base
              model alone. None: "balanced".
    cache:    folder of downloads and exports; PASTA_CACHE or the user's cache if left out.
    tell:     called with a line on what takes time; else the logger "pasta_decoding" is.
    settings: the other fields of `EngineConfig`: model, engine, join, dtype, max_model_len,
              cache_tokens, threads, device, base_url, api_key.

    Raises PastaError for an unknown adapter (with those that ship), a model of another base, an
    engine that is not installed (with the command that installs it), and broken files.
    """
    folder = default_cache(os.environ) if cache is None else Path(cache)
    place = Place(folder, tell or logging.getLogger("pasta_decoding").info)
    config = EngineConfig.named(adapter=adapter, **settings)
    return Model(open_decoder(_located(config, place), place))


def _located(settings: EngineConfig, place: Place) -> EngineConfig:
    """Return the settings with files and folders in the place of names; fetch what is missing."""
    if settings.whole is not None:
        return settings
    named = Path(settings.adapter_name)
    if len(named.parts) == 2 and not named.is_dir():
        settings = replace(settings, adapter=str(model_folder(named, place.cache, place.tell)))
    name = settings.adapter_name
    needs_base = name == NO_ADAPTER or not holds_weights(find_adapter(name))
    if needs_base and settings.model is None and not (place.cache / DEFAULT_MODEL).exists():
        pull(place.cache, tell=place.tell)
    return settings
