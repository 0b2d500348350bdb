"""What a parallel answer is compared with: a model that was taught to answer, but sequentially.

The same weights with promises banned are no such thing: they were trained to promise, and loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.errors import PastaError
from pasta_decoding.models.load import NO_ADAPTER, SEQUENTIAL, is_whole, shipped_adapters


@dataclass(frozen=True, slots=True)
class Baseline:
    """A sequential rival. It decodes with promises banned, whatever it is.

    config: loads it.
    name:     for a column's head.
    about:    what it is, for a reader.
    """

    config: EngineConfig
    name: str
    about: str


def baseline_of(config: EngineConfig, named: str | None) -> Baseline:
    """Return what to compare a checkpoint with: what is named, else the baseline that ships for it.

    A checkpoint that does not ship is compared with its base model. Raises PastaError where that
    is not known: of a whole model, and on servers.
    """
    if named is not None:
        return _named(config, named)
    if config.is_remote or config.whole is not None:
        raise PastaError(
            f"nothing tells what {config.whole or 'a model on servers'} is to be compared with",
            hint="Name it: --baseline takes an adapter or a whole model; the model itself, too, "
            "which then answers with promises banned.",
        )
    if config.model is None and config.adapter_name in shipped_adapters():
        about = "trained on the same responses with the tags taken out"
        return Baseline(replace(config, adapter=SEQUENTIAL), SEQUENTIAL, about)
    base = "the default model" if config.model is None else config.model.name
    about = "the base model as it is, which was not trained on these responses"
    return Baseline(replace(config, adapter=NO_ADAPTER), base, about)


def _named(config: EngineConfig, named: str) -> Baseline:
    whole = is_whole(Path(named)) or config.whole is not None
    there = replace(config, adapter=named, model=None if whole else config.model)
    if named in (config.adapter_name, str(config.whole)):
        return Baseline(there, Path(named).name, "the same weights with promises banned")
    return Baseline(there, Path(named).name, f"{named}, with promises banned")


def checkpoint_name(config: EngineConfig) -> str:
    """Return what a checkpoint is called where there is little room."""
    return config.whole.name if config.whole else Path(config.adapter_name).name
