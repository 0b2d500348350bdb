"""Where a figure was measured: machine and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine() -> str:
    """Name processor, core count, GPU and system, for the side of a figure."""
    import torch

    processor = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line for line in lines if line.startswith("model name"))
        processor = model.partition(":")[2].strip()
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join([processor, f"{os.cpu_count()} cores", *gpu, platform.system()])


def versions() -> dict[str, str]:
    """Return the versions of what computes an answer, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in ("pasta-decoding", "torch", "transformers", "llama-cpp-python"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str | None:
    """Return the commit of the code that runs, `+` if it was changed since; None outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # not that of a project around site-packages
        return git("describe", "--always", "--dirty=+")
    except (OSError, subprocess.CalledProcessError):
        return None
