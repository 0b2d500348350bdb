"""Whether a cache fits this machine, before it is taken: the kernel would say it by killing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pasta_decoding.errors import PastaError

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def refuse_what_cannot_fit(cells: int, cell_bytes: int) -> None:
    """Raise PastaError if `cells` of a cache take more memory than the machine has left."""
    needed, left = cells * cell_bytes, available_bytes()
    if left is not None and needed > left:
        raise PastaError(
            f"a cache of {cells} tokens takes {needed / 1e9:.1f} GB, and {left / 1e9:.1f} GB of "
            "memory are left here",
            hint=f"Give --ctx at most {left // cell_bytes}.",
        )


def cell_numbers(config: Mapping[str, Any]) -> int | None:
    """Return how many numbers a token's keys and values are; None if the config does not say."""
    text = config.get("text_config", config)
    try:
        heads = text["num_attention_heads"]
        width = text.get("head_dim") or text["hidden_size"] // heads
        kv_heads = text.get("num_key_value_heads") or heads
        return int(2 * text["num_hidden_layers"] * kv_heads * width)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
        return None


def available_bytes(memory: Path = _MEMORY, group: Path = _GROUP) -> int | None:
    """Return how much memory the process can still have; None where nobody says.

    group: folder of its control group (cgroup v2), such as a container has.
    """
    found = [_available(memory), _left_in(group)]
    return min((number for number in found if number is not None), default=None)


def _available(memory: Path) -> int | None:
    try:
        lines = memory.read_text(encoding="ascii").splitlines()
    except OSError:  # another system: all memory that there is
        names = getattr(os, "sysconf_names", {})
        known = "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
    sizes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    kilobytes = next(sizes, None)
    return None if kilobytes is None else int(kilobytes) * 1024


def _left_in(group: Path) -> int | None:
    """Return what its limit leaves a group; pages of files that it only reads can be dropped."""
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None:
        return None
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    dropped = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, limit - max(0, (used or 0) - dropped))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
