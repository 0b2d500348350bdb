"""A logits processor for vLLM, which loads it by the entry point group `vllm.logits_processors`.

It holds every guided request to the rules of its thread; others it leaves alone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PastaLogitsProcessor"]


def __getattr__(name: str) -> Any:
    """Import the processor when it is asked for: all below it does without vLLM."""
    if name == "PastaLogitsProcessor":
        from pasta_decoding.vllm.processor import PastaLogitsProcessor

        return PastaLogitsProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
