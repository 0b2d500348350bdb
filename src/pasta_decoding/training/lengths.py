"""Promised lengths that are used as often as chunks have them, without training.

Greedy decoding promises the likeliest length, and where most chunks are of similar lengths that is
one of two, though the model knows better: its mean probability of a length is the share that chunks
of this length have. So each length gets an offset to its logit, as in logit adjustment (Menon et
al. 2021, arXiv 2007.07314); here they are those with which the greedy choice has the wanted shares,
the dual variables of an optimal transport from states to lengths. They are written into the rows
that the lengths have in the output layer, along a direction on which the states in front of a
promised length all have the value 1.

Shapes: P promises of the rows, B length buckets, D width of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.data.dataset import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import read
from pasta_decoding.models.checkpoint import save
from pasta_decoding.models.loading import Loaded, holds_weights, load_model
from pasta_decoding.models.merging import trained_rows
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.training.average import CONFIG, WEIGHTS, read_tensors
from pasta_decoding.training.score import read_layouts
from pasta_decoding.training.view import compile_answer

if TYPE_CHECKING:
    from torch import Tensor

RARE = 0.03
"""Lengths with a smaller share stay as they are: too few chunks have them to follow a promise."""
_RIDGE = 1e-3  # on the direction, of the mean square of a state's number
_FEWEST = 50  # promises
_TOGETHER = 8  # rows that are read at a time
_STEPS = 4000  # of the subgradient that finds offsets


@dataclass(frozen=True, slots=True)
class Lengths:
    """What was found and changed, by length bucket.

    probable: the model's mean probability of each: the share that chunks of it have.
    before:   the share that greedy decoding gave each on these rows.
    after:    the share with the change.
    """

    promises: int
    probable: dict[int, float]
    before: dict[int, float]
    after: dict[int, float]


def adjust_lengths(
    adapter: Path, base: Path, rows: Iterable[Row], out: Path, *, by: float
) -> Lengths:
    """Write an adapter to the folder `out` that promises rarer lengths more often.

    rows: annotated answers like those that it writes, best its own; they are read, not learnt.
    by:   how far shares move to those that chunks have: 0 changes nothing, 1 is all the way.

    Raises PastaError if `out` exists, the adapter holds a whole model, or rows have few promises.
    """
    import torch
    from safetensors.torch import save_file

    if out.exists():
        raise PastaError(f"{out} exists already", hint="Choose another --out.")
    if holds_weights(adapter):
        raise PastaError(f"{adapter} is a whole model", hint="Give the adapter it was made of.")
    loaded, tensors = load_model(base, adapter), read_tensors(adapter)
    close = loaded.checkpoint.control.promise_close
    name, places = _rows_of(close.values(), adapter, loaded.model)
    state_PD, row_BD = _states(loaded, rows), _head(loaded.model)[list(close.values())].double()
    if len(state_PD) < _FEWEST:
        raise PastaError(
            f"the rows have {len(state_PD)} promises, which say little",
            hint=f"Give annotated answers with {_FEWEST} or more.",
        )
    logits_PB = state_PD @ row_BD.T
    probable_B, greedy_B = logits_PB.softmax(1).mean(0), _shares(logits_PB)
    wanted_B = torch.lerp(greedy_B, probable_B, by)
    offset_B = _offsets(logits_PB, wanted_B, probable_B >= RARE)
    change_BD = offset_B[:, None] * _direction(state_PD)
    changed = tensors[name].double()
    changed[places] += change_BD
    tensors[name] = changed.to(tensors[name].dtype)
    with written_whole(out) as partial:
        partial.mkdir(parents=True)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_bytes((adapter / CONFIG).read_bytes())
        save(loaded.checkpoint, partial)

    def by_length(share_B: Tensor) -> dict[int, float]:
        return dict(zip(close, share_B.tolist(), strict=True))

    return Lengths(
        promises=len(state_PD),
        probable=by_length(probable_B),
        before=by_length(greedy_B),
        after=by_length(_shares(logits_PB + state_PD @ change_BD.T)),
    )


def _shares(logits_PB: Tensor) -> Tensor:
    """Return share_B of the greedy choices."""
    import torch

    counts_B = torch.bincount(logits_PB.argmax(1), minlength=logits_PB.shape[1])
    return counts_B.double() / len(logits_PB)


def _offsets(logits_PB: Tensor, wanted_B: Tensor, moved_B: Tensor) -> Tensor:
    """Return offset_B with which greedy choices have the wanted shares, nearly; 0 unless moved.

    It minimises mean_P(max_B(logits + offset)) - sum_B(wanted * offset), which is convex, by
    subgradients in steps that get smaller.
    """
    import torch

    offset_B = torch.zeros_like(wanted_B)
    for step in range(_STEPS):
        missing_B = (wanted_B - _shares(logits_PB + offset_B)) * moved_B
        offset_B += 1.5 / (1 + step / 100) * missing_B
    return offset_B


def _states(loaded: Loaded, rows: Iterable[Row]) -> Tensor:
    """Return state_PD (float64) in front of every promised length."""
    import torch

    control, config = loaded.checkpoint.control, loaded.model.config.get_text_config()
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=control.ids)
    lengths, found = set(control.promise_close.values()), [torch.empty(0, config.hidden_size)]
    loaded.model.eval()
    waiting = iter(rows)
    while together := list(islice(waiting, _TOGETHER)):
        layouts = [
            layout
            for row in together
            for layout in compile_answer(
                encoder.encode([*row.history, Message("user", row.instruction)]),
                read(row.response),
                control=control,
                encode=encoder.encode_text,
                scheme=scheme_named(loaded.checkpoint.scheme),
                end=loaded.end,
                max_tokens=config.max_position_embeddings,
            )
        ]
        scored = read_layouts(loaded.model, layouts, layers=[config.num_hidden_layers])
        for layout, (_, state_TD) in zip(layouts, scored, strict=True):
            assert state_TD is not None
            found.append(state_TD[[label in lengths for label in layout.label]])
    return torch.cat(found).double()


def _direction(state_PD: Tensor) -> Tensor:
    """Return direction_D on which each state nearly has the value 1, by ridge regression."""
    import torch

    square_DD = state_PD.T @ state_PD / len(state_PD)
    ridge = _RIDGE * state_PD.square().mean()
    return torch.linalg.solve(
        square_DD + ridge * torch.eye(len(square_DD), dtype=square_DD.dtype), state_PD.mean(0)
    )


def _head(model: Any) -> Tensor:
    weight_VD: Tensor = model.get_output_embeddings().weight.detach()
    return weight_VD


def _rows_of(ids: Iterable[int], adapter: Path, model: Any) -> tuple[str, list[int]]:
    """Return which of the adapter's tensors has rows of the output layer, and where these are."""
    settings = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    head = model.get_output_embeddings().weight
    for name, layer, tokens in trained_rows(read_tensors(adapter), settings):
        if model.get_submodule(layer).weight is head:
            return name, [tokens.index(token) for token in ids]
    raise PastaError(
        f"{adapter} has no trained rows of the output layer",
        hint="Give one that `pasta train sft` wrote with LoRA.",
    )
