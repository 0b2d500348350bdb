"""Which adapter commands take where none is named: it depends on this machine."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.engines.support import free_bytes
from pasta_decoding.models.bases import BASES, DEFAULT_MODEL, LARGE_MODEL
from pasta_decoding.models.load import default_device

log = logging.getLogger(__name__)


def default_adapter(
    cache: Path, environment: Mapping[str, str], config: EngineConfig | None = None
) -> str:
    """Return $PASTA_ADAPTER, else the large model's adapter, or the small one's if that lacks room.

    A log line says what the machine lacks.

    config: the engine that will run it. None, for pulling: any, and a small model that is already
            in the cache does not count.
    """
    from pasta_decoding.engines.native import find_compiler

    if named := environment.get("PASTA_ADAPTER"):
        return named
    large = BASES[LARGE_MODEL]
    engine = config or EngineConfig()
    has_large = (cache / large.name).exists()
    has_small_alone = (cache / DEFAULT_MODEL).exists() and not has_large
    on_gpu = engine.engine == "auto" and (engine.device or default_device()) != "cpu"
    disk = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    requirements = {
        "the engine auto or fast": engine.engine in ("auto", "fast") and not engine.is_remote,
        f"{2 * large.memory_gb} GB of free memory": free_bytes() >= 2e9 * large.memory_gb,
        "a C++ compiler (g++)": find_compiler() is not None or on_gpu,
        f"{large.disk_gb} GB of free disk at {cache}": has_large
        or shutil.disk_usage(disk).free >= 1e9 * large.disk_gb,
        f"`pasta pull {large.name}`": config is None or not has_small_alone,
    }
    missing = [requirement for requirement, is_met in requirements.items() if not is_met]
    if not missing:
        return large.adapter
    log.info("taking the small model: %s needs %s", large.name, " and ".join(missing))
    return BASES[DEFAULT_MODEL].adapter
