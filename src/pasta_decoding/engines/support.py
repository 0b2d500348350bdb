"""What an engine can run here: models it computes exactly, memory for its cache, cores it uses."""

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

FULL, SLIDING = "full_attention", "sliding_attention"

# These change the rotation with the length seen so far: a cached key would depend on when it was
# computed, and decoding could not equal training.
_MOVING_ROPES = frozenset({"dynamic", "longrope"})


def attention_windows(config: Any) -> dict[str, int | None]:
    """Return the window of each kind of layer, under transformers' name for it.

    A query at position p sees keys at positions above p - window; None: all that it may see. Takes
    a text model's config. Kinds other than full and sliding attention are returned with None.
    """
    # A left-over setting of another model means nothing to one that does not know it.
    known = hasattr(type(config), "sliding_window")
    window: int | None = config.sliding_window if known else None
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
    for reason, found in obstacles.items():
        if found:
            raise PastaError(
                f"the torch engine cannot run this {model.config.model_type} model: {reason}"
            )


def rope_types(ropes: dict[str, Any]) -> set[str]:
    """Return the types of rotary positions: one for all layers, or one for each kind of layer."""
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    return {str(rope.get("rope_type")) for rope in nested or [ropes]}


def free_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how much memory may be taken: of the machine's, and of a container's (cgroup v2)."""
    free = psutil.virtual_memory().available
    try:
        most, used = (int((group / f"memory.{one}").read_text()) for one in ("max", "current"))
        # What is held of files is given back when memory is needed.
        files = re.findall(r"^(?:in)?active_file (\d+)", (group / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):  # no container, or one without a limit
        return free
    return min(free, most - used + sum(map(int, files)))


def refuse_large_cache(cache_tokens: int, token_bytes: int) -> None:
    """Raise PastaError for a cache larger than the free memory: it would end the process."""
    free, needed = free_bytes(), cache_tokens * token_bytes
    if needed > free:
        raise PastaError(
            f"a cache of {cache_tokens} tokens takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} "
            f"GB of memory are free: at most {free // token_bytes} tokens fit"
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
    for pause in _pauses(len(sys.modules.keys() & {"torch", "llama_cpp"})):
        pause(1)  # omp_pause_soft


@cache
def _pauses(_libraries_loaded: int) -> tuple[Callable[[int], int], ...]:
    """Return `omp_pause_resource_all` (OpenMP 5.0) of each libgomp in this process."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:  # not Linux: other libraries, which have no such limit
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libgomp" in line}
    loaded = [ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY) for path in sorted(paths)]
    name = "omp_pause_resource_all"
    return tuple(getattr(one, name) for one in loaded if hasattr(one, name))
