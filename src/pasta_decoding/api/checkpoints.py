"""What a config names: the files of a checkpoint, fetched or found, and its baseline's.

The parallel model with promises banned is no baseline: it was trained to promise, and loops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pasta_decoding.api.config import EngineConfig, beside_whole
from pasta_decoding.errors import PastaError
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
from pasta_decoding.models.pull import model_folder, pull


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files that a config names, to be opened.

    base:    folder of the weights, or a GGUF file.
    adapter: folder of the adapter; `base` itself for a whole model, None for a base model alone.
    cache:   folder for what is exported on the way.
    """

    config: EngineConfig
    base: Path
    adapter: Path | None
    cache: Path

    @property
    def is_gguf(self) -> bool:
        """Is it one GGUF file?"""
        return self.base.suffix == ".gguf"

    @property
    def device(self) -> str:
        """Where torch would compute."""
        return self.config.device or default_device()


def find(config: EngineConfig, cache: Path) -> Checkpoint:
    """Return the files that a config names. Raises PastaError for what is not there."""
    if config.whole is not None:
        return Checkpoint(config, config.whole, config.whole, cache)
    name = config.adapter_name
    adapter = None if name == NO_ADAPTER else find_adapter(name)
    if adapter is not None and holds_weights(adapter):  # without its `pasta.json`: loading says so
        return Checkpoint(config, adapter, adapter, cache)
    base = model_folder(config.model or Path(known_base(name)), cache)
    if config.model is not None and is_whole(base) and base.suffix != ".gguf":
        if config.adapter is not None:
            raise beside_whole(config.model)
        adapter = base
    return Checkpoint(config, base, adapter, cache)


def fetched(config: EngineConfig, cache: Path) -> EngineConfig:
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


def baseline_of(config: EngineConfig, named: str | None) -> tuple[EngineConfig, str]:
    """Return the config of a checkpoint's baseline, and a description of it.

    named: an adapter or a whole model. None: `sequential` for adapters that ship, the base model
           for others. Raises PastaError for whole models and servers, whose baseline is unknown.
    """
    if named is not None:
        whole = is_whole(Path(named)) or config.whole is not None
        own = named in (config.adapter_name, str(config.whole))
        about = "the same weights with promises banned" if own else f"{named}, promises banned"
        return replace(config, adapter=named, model=None if whole else config.model), about
    if config.is_remote or config.whole is not None:
        raise PastaError(
            f"no baseline is known for {config.whole or 'a model on servers'}: name an adapter or "
            "a whole model with --baseline"
        )
    if config.model is None and config.adapter_name in shipped_adapters():
        about = "trained on most of the same responses with the tags taken out"
        return replace(config, adapter=SEQUENTIAL), about
    about = "the base model as it is, which was not trained on these responses"
    return replace(config, adapter=NO_ADAPTER), about
