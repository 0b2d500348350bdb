"""What engines can run on this machine: models, memory for a cache, cores."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL = "full_attention"
SLIDING = "sliding_attention"

# These change the rotation with the length seen so far: a cached key would depend on when it was
# computed, and decoding could not equal training.
_MOVING_ROPES = frozenset({"dynamic", "longrope"})


def attention_windows(config: Any) -> dict[str, int | None]:
    """Return the window of each kind of layer, under transformers' name for it.

    A query at position p sees keys at positions above p - window; None: all that it may see. Takes
    a text model's config. Kinds other than full and sliding attention are returned with None.
    """
    # A file may set a window that the model's class does not have: it is ignored.
    has_window = hasattr(type(config), "sliding_window")
    window: int | None = config.sliding_window if has_window else None
    kinds = getattr(config, "layer_types", None) or [FULL if window is None else SLIDING]
    return {kind: window if kind == SLIDING else None for kind in sorted(set(kinds))}


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise PastaError with the first part of a model that the torch engine cannot compute."""
    config = model.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = ", ".join(sorted(set(attention_windows(config)) - {FULL, SLIDING}))
    moving = ", ".join(sorted(rope_types(ropes) & _MOVING_ROPES))
    obstacles = {
        "it is an encoder-decoder": model.config.is_encoder_decoder,
        "it has recurrent layers, whose state cannot be forked and joined": getattr(
            model, "_is_stateful", False
        ),
        "it has no rotary positions (RoPE)": not ropes or getattr(config, "alibi", False),
        f"its attention is neither full nor a sliding window but {kinds}": kinds,
        "its attention caps its scores": getattr(config, "attn_logit_softcapping", None),
        "its attention has sinks": any("sinks" in name for name, _ in model.named_parameters()),
        "its attention is bidirectional": getattr(config, "use_bidirectional_attention", None),
        f"its rotary positions ({moving}) change with the length": moving,
        "its code does not take attention functions from outside": not getattr(
            model, "_supports_attention_backend", False
        ),
    }
    for reason, is_obstacle in obstacles.items():
        if is_obstacle:
            raise PastaError(
                f"the torch engine cannot run this {model.config.model_type} model: {reason}"
            )


def rope_types(ropes: dict[str, Any]) -> set[str]:
    """Return the types of rotary positions.

    `ropes` is `rope_parameters` of a config: parameters for all layers, or by kind of layer.
    """
    by_kind = [parameters for parameters in ropes.values() if isinstance(parameters, dict)]
    return {str(parameters.get("rope_type")) for parameters in by_kind or [ropes]}


def machine_load() -> tuple[float, int]:
    """Return how many threads wanted a core in the last minute on average, and the cores.

    Windows does not count the threads: 0.
    """
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return average, os.cpu_count() or 1


def free_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that may be taken: the machine's, or less in a container (cgroup v2)."""
    machine_bytes = psutil.virtual_memory().available
    try:
        limit_bytes = int((group / "memory.max").read_text())
        used_bytes = int((group / "memory.current").read_text())
        statistics = (group / "memory.stat").read_text()
    except (OSError, ValueError):  # no container, or one without a limit
        return machine_bytes
    # Cached pages of files count as used, and are given back when memory is needed.
    cached_bytes = re.findall(r"^(?:in)?active_file (\d+)", statistics, re.M)
    return min(machine_bytes, limit_bytes - used_bytes + sum(map(int, cached_bytes)))


def refuse_large_cache(cache_tokens: int, token_bytes: int) -> None:
    """Raise PastaError for a cache larger than the free memory, which would end the process."""
    cache_bytes = cache_tokens * token_bytes
    available_bytes = free_bytes()
    if cache_bytes > available_bytes:
        raise PastaError(
            f"a cache of {cache_tokens} tokens takes {cache_bytes / 1e9:.1f} GB, and "
            f"{available_bytes / 1e9:.1f} GB of memory are free: at most "
            f"{available_bytes // token_bytes} tokens fit"
        )


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def release_openmp_threads() -> None:
    """Give back the calling thread's OpenMP team; its next parallel work makes a new one.

    libgomp keeps a team for each thread that ever computed in parallel. When the teams of a process
    have more threads than there are cores, they no longer spin while they wait (GOMP_SPINCOUNT in
    its manual), and a step of a small model takes three times as long.
    """
    loaded_modules = len(sys.modules.keys() & {"torch", "llama_cpp"})
    for pause_team in _pause_functions(loaded_modules):
        pause_team(1)  # omp_pause_soft


@cache
def _pause_functions(_loaded_modules: int) -> tuple[Callable[[int], int], ...]:
    """Return `omp_pause_resource_all` (OpenMP 5.0) of each libgomp in this process.

    The answer changes when a module that brings a libgomp is loaded: their number is the cache's
    key.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:  # not Linux: other libraries, which have no such limit
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libgomp" in line}
    runtimes = [ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY) for path in sorted(paths)]
    return tuple(
        runtime.omp_pause_resource_all
        for runtime in runtimes
        if hasattr(runtime, "omp_pause_resource_all")
    )
