"""Whether a cache fits this machine, before it is taken: the kernel would say it by killing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pasta_decoding.errors import PastaError

_MEMORY = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


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


def available_bytes(memory: Path = _MEMORY, group_limit: Path = _GROUP_LIMIT) -> int | None:
    """Return how much memory the process can still have; None where nobody says."""
    found = [_available(memory), _number(group_limit)]
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


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
