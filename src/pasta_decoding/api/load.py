"""`load`: from a name to a model that answers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pasta_decoding.api.model import Model
from pasta_decoding.api.opening import open_decoder
from pasta_decoding.api.place import Place, Tell
from pasta_decoding.api.settings import Dtype, EngineName, FileType, LoadSettings
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.bases import DEFAULT_MODEL, default_cache
from pasta_decoding.models.download import model_folder
from pasta_decoding.models.loading import NO_ADAPTER, find_adapter, holds_weights
from pasta_decoding.models.pull import pull

_DEFAULT = LoadSettings()
_KINDS: Mapping[str, type[StrEnum]] = {
    "engine": EngineName,
    "join": Joining,
    "dtype": Dtype,
    "quant": FileType,
}


def load(
    name: str | Path | None = None,
    *,
    model: str | Path | None = None,
    engine: str = _DEFAULT.engine,
    base_url: str | Sequence[str] = (),
    api_key: str | None = None,
    join: str | None = None,
    dtype: str = _DEFAULT.dtype,
    quant: str = _DEFAULT.quant,
    context: int = _DEFAULT.context,
    threads: int | None = None,
    device: str | None = None,
    cache: str | Path | None = None,
    tell: Tell | None = None,
) -> Model:
    """Load a checkpoint onto the best engine of this machine, or find the servers that have it.

    name:     a shipped adapter ("balanced", "sequential"), the folder of
              an adapter or of a whole model, the name of a whole model on the hub, a GGUF file, or
              "none" for the base model alone. None: "balanced".
    model:    the base model of an adapter: a folder or a name on the hub; the default one if left
              out, which is downloaded once (98 MB).
    engine:   "auto", "compiled", "torch", "llama" or "remote".
    base_url: servers of OpenAI-style completions that hold the merged checkpoint, such as
              "http://localhost:8000/v1"; several are replicas. `api_key` is what they ask for.
    join, dtype, quant, context, threads, device: see `pasta run --help`.
    cache:    folder of downloads and exports; PASTA_CACHE or the user's cache if left out.
    tell:     called with a line on what takes time; else the logger "pasta_decoding" is.

    Raises PastaError for an unknown adapter (with those that ship), a model of another base, an
    engine that is not installed (with the command that installs it), and broken files.
    """
    for what, number in (("threads", threads), ("context", context)):
        if number is not None and number < 1:
            raise PastaError(f"{what} is {number}", hint="It is at least 1.")
    settings = _named(name, model, base_url, context=context, threads=threads, device=device)
    choices = _known(engine=engine, join=join, dtype=dtype, quant=quant)
    settings = replace(settings, remote_key=api_key, **choices)
    place = _place(cache, tell)
    return Model(open_decoder(_located(settings, place), place))


def _named(
    name: str | Path | None, model: str | Path | None, urls: str | Sequence[str], **others: Any
) -> LoadSettings:
    return LoadSettings(
        adapter=None if name is None else str(name),
        model=None if model is None else Path(model),
        base_url=(urls,) if isinstance(urls, str) else tuple(urls),
        **others,
    )


def _known(**named: str | None) -> dict[str, Any]:
    """Return what is chosen by a name. Raises PastaError for a name that none has."""
    return {
        what: None if value is None else _one_of(_KINDS[what], value, what)
        for what, value in named.items()
    }


def _place(cache: str | Path | None, tell: Tell | None) -> Place:
    folder = default_cache(os.environ) if cache is None else Path(cache)
    return Place(folder, tell or logging.getLogger("pasta_decoding").info)


def _one_of(kind: type[StrEnum], value: str, what: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise PastaError(f"no {what} {value!r}", hint=f"Known are: {known}.") from None


def _located(settings: LoadSettings, place: Place) -> LoadSettings:
    """Return the settings with files and folders in the place of names; fetch what is missing."""
    if settings.whole is not None:
        return settings
    named = Path(settings.adapter_name)
    if len(named.parts) == 2 and not named.is_dir():
        settings = replace(settings, adapter=str(model_folder(named, tell=place.tell)))
    name = settings.adapter_name
    needs_base = name == NO_ADAPTER or not holds_weights(find_adapter(name))
    if needs_base and settings.model is None and not (place.cache / DEFAULT_MODEL).exists():
        pull(place.cache, progress=place.tell)
    return settings
