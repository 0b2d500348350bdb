"""How far back each kind of layer of a model sees, by position."""

from __future__ import annotations

from typing import Any

import numpy as np

from pasta_decoding.engines.pool import BoolArray, Step

FULL, SLIDING = "full_attention", "sliding_attention"


def attention_windows(config: Any) -> dict[str, int | None]:
    """Return the window of each kind of layer, under transformers' name for it.

    A query at position p sees keys at positions above p - window; None: all that it may see. Takes
    a text model's config. Kinds other than full and sliding attention are returned with None.
    """
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [FULL if window is None else SLIDING]
    return {kind: window if kind == SLIDING else None for kind in sorted(set(kinds))}


def visible(step: Step, window: int | None) -> BoolArray:
    """Return which cells each token sees in a layer with this window."""
    if window is None:
        return step.mask_QK
    positions_Q = np.array(step.positions)
    near_QK: BoolArray = positions_Q[:, None] - step.cell_positions_K[None, :] < window
    return step.mask_QK & near_QK


def sees_all_before(mask_QK: BoolArray) -> bool:
    """Do the queries see just the cells up to their own, and are they one, or all there is?"""
    queries, cells = mask_QK.shape
    if queries not in (1, cells):
        return False
    return np.array_equal(mask_QK, np.tri(queries, cells, cells - queries))
