"""Promised lengths that are used more evenly, without training: offsets to their logits.

Greedy decoding promises the likeliest length, and where most chunks are of similar lengths that is
one of two, though the model's mean probability of each is the share that chunks of it have. So a
rarer length gets an offset to its logit (logit adjustment, Menon et al. 2021, arXiv 2007.07314).
It is written into the row that the length has in the output layer, along a direction on which the
states in front of a promised length all have the value 1.

Shapes: P promises of the rows, B length buckets, D width of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pasta_decoding.data.dataset import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import read
from pasta_decoding.models.loading import Loaded, load_model
from pasta_decoding.models.merging import output_rows
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.training.adapter_files import (
    read_config,
    read_tensors,
    refuse_existing,
    write_adapter,
)
from pasta_decoding.training.score import read_layouts
from pasta_decoding.training.view import compile_answer

if TYPE_CHECKING:
    from torch import Tensor

_RIDGE = 1e-3  # on the direction, of the mean square of a state's number
_FEWEST = 50  # promises
_TOGETHER = 8  # rows that are read at a time


@dataclass(frozen=True, slots=True)
class Lengths:
    """What was found in the rows and what has changed there, by length bucket.

    probable: the model's mean probability of each.
    before:   the share that the greedy choice gives each.
    after:    the same with the offsets. While decoding, promises follow each other, so shares there
              are others: ask and measure.
    """

    promises: int
    probable: dict[int, float]
    before: dict[int, float]
    after: dict[int, float]


def offset_lengths(
    adapter: Path, base: Path, rows: Iterable[Row], out: Path, offsets: Mapping[int, float]
) -> Lengths:
    """Write an adapter to the folder `out` whose lengths have offsets to their logits, in nats.

    rows: annotated answers like those that it writes, best its own; they are read, not learnt.

    Raises PastaError if `out` exists, a length is no bucket, the adapter holds a whole model, or
    the rows have few promises.
    """
    import torch

    refuse_existing(out)
    tensors, settings = read_tensors(adapter), read_config(adapter)
    loaded = load_model(base, adapter)
    close = loaded.checkpoint.control.promise_close
    for length in offsets.keys() - close.keys():
        known = ", ".join(map(str, close))
        raise PastaError(f"{length} is not a length that can be promised", hint=f"Known: {known}.")
    state_PD = _states(loaded, rows)
    if len(state_PD) < _FEWEST:
        raise PastaError(
            f"the rows have {len(state_PD)} promises, which say little",
            hint=f"Give annotated answers with {_FEWEST} or more.",
        )
    offset_B = torch.tensor([offsets.get(length, 0.0) for length in close], dtype=torch.float64)
    change_BD = offset_B[:, None] * _direction(state_PD)
    trained = dict(output_rows(loaded.model, tensors, settings))
    if not trained:
        raise PastaError(f"the adapter in {adapter} has no rows of the output layer to write to")
    for name, tokens in trained.items():
        changed = tensors[name].double()
        changed[[tokens.index(token) for token in close.values()]] += change_BD
        tensors[name] = changed.to(tensors[name].dtype)
    write_adapter(out, tensors, settings, loaded.checkpoint)
    head_VD = loaded.model.get_output_embeddings().weight.detach()
    row_BD = head_VD[list(close.values())].double()
    before_PB, after_PB = state_PD @ row_BD.T, state_PD @ (row_BD + change_BD).T
    found = (before_PB.softmax(1).mean(0), _shares(before_PB), _shares(after_PB))
    return Lengths(
        len(state_PD), *(dict(zip(close, share_B.tolist(), strict=True)) for share_B in found)
    )


def _shares(logits_PB: Tensor) -> Tensor:
    """Return share_B: how often each length is the likeliest."""
    import torch

    return torch.bincount(logits_PB.argmax(1), minlength=logits_PB.shape[1]) / len(logits_PB)


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
