"""What a config names: the files of a checkpoint, fetched or found, and its baseline's.

The parallel model with promises banned is no baseline: it was trained to promise, and loops.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pasta_decoding.api.config import EngineConfig, beside_whole
from pasta_decoding.engines.support import free_bytes
from pasta_decoding.errors import PastaError
from pasta_decoding.models.bases import BASES, DEFAULT_MODEL, LARGE_MODEL
from pasta_decoding.models.load import (
    NO_ADAPTER,
    SEQUENTIAL,
    default_device,
    find_adapter,
    holds_weights,
    is_whole,
    known_base,
    shipped_adapters,
)
from pasta_decoding.models.pull import find_base

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files that a config names, to be opened.

    base:    folder of the weights, or a GGUF file.
    adapter: folder of the adapter; `base` itself for a whole model, None for a base model alone.
    cache:   folder for what is exported and built on the way.
    """

    config: EngineConfig
    base: Path
    adapter: Path | None
    cache: Path

    @property
    def is_gguf(self) -> bool:
        return self.base.suffix == ".gguf"

    @property
    def operators(self) -> Path:
        return self.cache / "operators"

    @property
    def device(self) -> str:
        return self.config.device or default_device()


def find(config: EngineConfig, cache: Path, *, fetch: bool = False) -> ModelFiles:
    """Return the files that a config names. Raises PastaError for what is not there.

    fetch: get a known model that is missing, and adapters that have a name on the hub.
    """
    if config.whole is not None:
        return ModelFiles(config, config.whole, config.whole, cache)
    name = config.adapter_name
    if fetch and len(Path(name).parts) == 2 and not Path(name).is_dir():
        folder = str(find_base(Path(name), cache))
        return find(replace(config, adapter=folder), cache, fetch=folder != name)
    adapter = None if name == NO_ADAPTER else find_adapter(name)
    if adapter is not None and holds_weights(adapter):  # without its `pasta.json`: loading says so
        return ModelFiles(config, adapter, adapter, cache)
    base = find_base(config.model, cache, adapter=name, fetch=fetch)
    if config.model is not None and is_whole(base) and base.suffix != ".gguf":
        if config.adapter is not None:
            raise beside_whole(config.model)
        adapter = base
    return ModelFiles(config, base, adapter, cache)


def default_adapter(cache: Path, environment: Mapping[str, str]) -> str:
    """Return the adapter that commands take where none is named: $PASTA_ADAPTER, else one of two.

    The large model's where this machine has room for it; a line says what it lacks.
    """
    from pasta_decoding.engines.native import find_compiler

    if named := environment.get("PASTA_ADAPTER"):
        return named
    base = BASES[LARGE_MODEL]
    place = next(one for one in (cache, *cache.absolute().parents) if one.exists())
    needed = {
        f"{2 * base.memory_gb} GB of free memory": free_bytes() >= 2e9 * base.memory_gb,
        "a C++ compiler (g++)": find_compiler() is not None,
        f"{base.disk_gb} GB of free disk at {cache}": (cache / base.name).exists()
        or shutil.disk_usage(place).free >= 1e9 * base.disk_gb,
    }
    missing = [what for what, there in needed.items() if not there]
    if missing:
        log.info("taking the small model: %s needs %s", base.name, " and ".join(missing))
    return BASES[DEFAULT_MODEL if missing else LARGE_MODEL].adapter


def baseline_of(config: EngineConfig, named: str | None) -> tuple[EngineConfig, str]:
    """Return the config of a checkpoint's baseline, and a description of it.

    named: an adapter or a whole model. None, or `sequential`: for adapters that ship, the one that
           was trained on the same base without tags. None: for others, the base model. Raises
           PastaError for whole models and servers, whose baseline is unknown.
    """
    alone = config.is_remote or config.whole is not None
    ships = not alone and config.adapter_name in shipped_adapters()
    if named is not None and not (ships and named == SEQUENTIAL):
        whole = is_whole(Path(named)) or config.whole is not None
        own = named in (config.adapter_name, str(config.whole))
        about = "the same weights with promises banned" if own else f"{named}, promises banned"
        return replace(config, adapter=named, model=None if whole else config.model), about
    if alone:
        raise PastaError(
            f"no baseline is known for {config.whole or 'a model on servers'}: name an adapter or "
            "a whole model with --baseline"
        )
    if ships:
        about = "trained on many of the same responses with the tags taken out"
        return replace(config, adapter=BASES[known_base(config.adapter_name)].baseline), about
    about = "the base model as it is, which was not trained on these responses"
    return replace(config, adapter=NO_ADAPTER), about
