"""Weighted means of adapters that come from one start: points between a fast one and a good one.

The weights of models finetuned from one start can be averaged; the mean lies between them in what
it does, often above the line ("model soups", Wortsman et al. 2022). What is averaged are the
adapters' own tensors, the factors of LoRA and the control tokens' rows. The mean of factors is not
the factor of the mean: for adapters that were not trained one from the other, or from a common
one, it is nothing of use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError
from pasta_decoding.models.checkpoint import Checkpoint, load
from pasta_decoding.training.adapter_files import (
    read_config,
    read_tensors,
    refuse_existing,
    write_adapter,
)

if TYPE_CHECKING:
    import torch

_LORA_SETTINGS = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
)
"""What the tensors mean depends on these, so they must be the same in all adapters."""


def average(adapters: Sequence[tuple[Path, float]], out: Path) -> Path:
    """Write the mean of LoRA adapters to the folder `out`, and return it.

    adapters: folders, and their weights, whose sum is 1; one may be negative.
    The mean keeps those joins that all were trained for. Tensors are averaged in float32 and
    stored in the first adapter's type.

    Raises PastaError if `out` exists, the weights are none, or the adapters differ in anything
    else than their tensors' values.
    """
    refuse_existing(out)
    if not math.isclose(total := math.fsum(weight for _, weight in adapters), 1, abs_tol=1e-6):
        raise PastaError(f"the weights add up to {total:g}, not to 1")
    folders = [folder for folder, _ in adapters]
    checkpoint, config = _common(folders), _common_config(folders)
    tensors = _mean(adapters)
    return write_adapter(out, tensors, config, checkpoint)


def _common(folders: Sequence[Path]) -> Checkpoint:
    """Return the record of the mean. Raises PastaError if the adapters' records contradict."""
    first, *others = checkpoints = [load(folder) for folder in folders]
    for folder, other in zip(folders[1:], others, strict=True):
        if replace(other, joins=first.joins) != first:
            raise PastaError(
                f"{folders[0]} and {folder} differ in base model, control tokens, scheme or topics",
                hint="Average adapters of one family; their pasta.json files say what they are.",
            )
    joins = tuple(join for join in first.joins if all(join in one.joins for one in checkpoints))
    if not joins and first.joins:
        raise PastaError(
            "no join is known to all of the adapters",
            hint="`pasta train sft --join kv --join text` trains for both.",
        )
    return replace(first, joins=joins)


def _common_config(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the first adapter's peft config. Raises PastaError if the others' LoRA differs."""
    first, *others = [read_config(folder) for folder in folders]
    for folder, other in zip(folders[1:], others, strict=True):
        for name in _LORA_SETTINGS:
            if other.get(name) != first.get(name):
                raise PastaError(
                    f"{folders[0]} has {name} {first.get(name)}, {folder} {other.get(name)}",
                    hint="Average adapters that were trained with the same settings of LoRA.",
                )
    return first


def _mean(adapters: Sequence[tuple[Path, float]]) -> dict[str, torch.Tensor]:
    (first, weight), *others = adapters
    tensors = read_tensors(first)
    mean = {name: weight * one.float() for name, one in tensors.items()}
    for folder, weight in others:
        other = read_tensors(folder)
        if {name: one.shape for name, one in other.items()} != {
            name: one.shape for name, one in tensors.items()
        }:
            raise PastaError(
                f"{first} and {folder} have other tensors",
                hint="Adapters can be averaged that were trained with the same rank, on the same "
                "modules.",
            )
        for name, one in other.items():
            mean[name] += weight * one.float()
    return {name: one.to(tensors[name].dtype).contiguous() for name, one in mean.items()}
