"""Where a figure was measured: the machine, the commit of this code, the versions of packages."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_MEASURED_PACKAGES = ("pasta-decoding", "torch", "transformers", "llama-cpp-python")


def provenance() -> dict[str, Any]:
    """Return machine, commit and versions by their keys in run.json."""
    return {"machine": machine(), "commit": commit(), "versions": versions()}


def machine() -> str:
    """Return one line: processor, core count, GPU if there is one, and operating system."""
    import torch

    parts = [_processor(), f"{os.cpu_count()} cores"]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    parts.append(platform.system())
    return ", ".join(parts)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute, as far as installed."""
    version_of = {"python": platform.python_version()}
    for package in _MEASURED_PACKAGES:
        with suppress(PackageNotFoundError):
            version_of[package] = version(package)
    return version_of


def commit() -> str | None:
    """Return the commit of this code, with `+` if it was changed since; None outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Fails in a site-packages folder inside another project, whose commit means nothing here.
        git("ls-files", "--error-unmatch", __file__)
        return git("describe", "--always", "--dirty=+")
    except (OSError, subprocess.CalledProcessError):
        return None
