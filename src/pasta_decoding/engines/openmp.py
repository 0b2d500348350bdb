"""OpenMP's threads, of which a process should have one team alone.

Each thread that computes in parallel has a team of its own, which libgomp keeps when the work is
done. As soon as the teams of a process have more threads than there are cores, libgomp's threads
do not wait for each other at work any more but go to sleep at once (its manual, GOMP_SPINCOUNT):
a step of a small model, with its hundreds of parallel parts, then takes three times as long.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

_SOFT = 1  # omp_pause_soft, of OpenMP 5.0
_BRING_IT = {"torch", "llama_cpp"}


def release_team() -> None:
    """Give back the calling thread's team; its next parallel work makes a new one.

    Does nothing where the thread has none, or the process no libgomp.
    """
    for pause in _libraries(len(sys.modules.keys() & _BRING_IT)):
        pause(_SOFT)


@cache
def _libraries(_brought: int) -> tuple[Callable[[int], int], ...]:
    """Return `omp_pause_resource_all` of each libgomp in this process. Looks again with each."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:  # not Linux: other libraries, which know no such limit
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libgomp" in line}
    loaded = (ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY) for path in sorted(paths))
    return tuple(one.omp_pause_resource_all for one in loaded if _pauses(one))


def _pauses(library: ctypes.CDLL) -> bool:
    return hasattr(library, "omp_pause_resource_all")  # since GCC 9
