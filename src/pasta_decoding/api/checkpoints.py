"""What a config names: the files of a checkpoint, fetched or found, and its baseline's."""

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


def find(config: EngineConfig, cache: Path) -> ModelFiles:
    """Return the files that a config names, fetched if need be. Raises PastaError if that fails."""
    if config.whole is not None:
        return ModelFiles(config, config.whole, config.whole, cache)
    name = config.adapter_name
    if len(Path(name).parts) == 2 and (folder := find_base(Path(name), cache)) != Path(name):
        return find(replace(config, adapter=str(folder)), cache)
    adapter = None if name == NO_ADAPTER else find_adapter(name)
    if adapter is not None and holds_weights(adapter):  # without its `pasta.json`: loading says so
        return ModelFiles(config, adapter, adapter, cache)
    base = find_base(config.model, cache, adapter=name)
    if config.model is not None and is_whole(base) and base.suffix != ".gguf":
        if config.adapter is not None:
            raise beside_whole(config.model)
        adapter = base
    return ModelFiles(config, base, adapter, cache)


def default_adapter(
    cache: Path, environment: Mapping[str, str], config: EngineConfig | None = None
) -> str:
    """Return the adapter that commands take where none is named: $PASTA_ADAPTER, else one of two.

    The large model's where this machine has room for it; a line says what it lacks. Without a
    `config`, for pulling, it does not matter which model is there already.
    """
    from pasta_decoding.engines.native import find_compiler

    if named := environment.get("PASTA_ADAPTER"):
        return named
    base, asked = BASES[LARGE_MODEL], config or EngineConfig()
    place = next(one for one in (cache, *cache.absolute().parents) if one.exists())
    is_there, small_is_there = ((cache / one).exists() for one in (base.name, DEFAULT_MODEL))
    needed = {
        "the engine auto or fast": asked.engine in ("auto", "fast") and not asked.is_remote,
        f"{2 * base.memory_gb} GB of free memory": free_bytes() >= 2e9 * base.memory_gb,
        "a C++ compiler (g++)": find_compiler() is not None
        or (asked.engine == "auto" and (asked.device or default_device()) != "cpu"),
        f"{base.disk_gb} GB of free disk at {cache}": is_there
        or shutil.disk_usage(place).free >= 1e9 * base.disk_gb,
        f"`pasta pull {base.name}`": config is None or is_there or not small_is_there,
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
        own = named in (config.adapter_name, str(config.whole))
        about = "the same weights with promises banned" if own else f"{named}, promises banned"
        rest = config if config.whole is None else replace(config, model=None)
        return rest.of(named), about
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
