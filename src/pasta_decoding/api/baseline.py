"""The baseline of parallel answers: a model that was trained to answer sequentially.

The parallel model with promises banned is no baseline: it was trained to promise, and loops.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.errors import PastaError
from pasta_decoding.models.load import NO_ADAPTER, SEQUENTIAL, is_whole, shipped_adapters


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
