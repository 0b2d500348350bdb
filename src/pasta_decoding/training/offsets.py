"""What greedy decoding passes over is chosen more often, without training: offsets to logits.

Greedy decoding promises the likeliest length, and where most chunks are of similar lengths that is
one of two, though the model's mean probability of each is the share that chunks of it have. So a
rarer length gets an offset to its logit (logit adjustment, Menon et al. 2021, arXiv 2007.07314).
An offset to the promise itself makes the same model promise more, and so faster, or less. One to
the sync makes it wait where rows wait, and hardly anywhere else.

An offset is written into the row that the token has in the output layer, along a direction on which
the states where the token may be chosen all have the value 1. For the sync these are few among the
places that look like them, so there the others have the value 0.

Shapes: S states where a token may be chosen, B length buckets, D width of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pasta_decoding.data.dataset import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import MAIN, Joining, Layout
from pasta_decoding.models.control_tokens import ControlTokens
from pasta_decoding.models.loading import Loaded, load_model
from pasta_decoding.models.merging import output_rows
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.training.adapter_files import (
    read_config,
    read_tensors,
    refuse_existing,
    write_adapter,
)
from pasta_decoding.training.config import SftConfig, joins_named
from pasta_decoding.training.score import read_layouts
from pasta_decoding.training.sft import compile_row

if TYPE_CHECKING:
    from torch import Tensor

_RIDGE = 1e-3  # on a direction, of the mean square of a state's number
_FEWEST = 50  # promises, or syncs
_TOGETHER = 8  # rows that are read at a time
_BLOCK = 128  # states whose logits are in memory at a time


@dataclass(frozen=True, slots=True)
class Share:
    """How often a token is chosen in the rows that were read, as a share of the places.

    probable: the model's mean probability of it.
    before:   how often it is the likeliest.
    after:    the same with the offsets. While decoding, one choice follows the other, so shares
              there are others: ask and measure.
    """

    probable: float
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Offsets:
    """What was found in the rows and what has changed there.

    promises: how many the rows have.
    lengths:  of the promises, by length bucket.
    promise:  of the main thread's tokens outside of topics.
    syncs:    how many the rows have.
    sync:     of these places; None if there are none.
    no_sync:  the sync's, of the main thread's other tokens outside of topics.
    """

    promises: int
    lengths: dict[int, Share]
    promise: Share
    syncs: int
    sync: Share | None
    no_sync: Share


def offset_logits(
    adapter: Path,
    base: Path,
    rows: Iterable[Row],
    out: Path,
    *,
    lengths: Mapping[int, float],
    promise: float = 0.0,
    sync: float = 0.0,
    say: Callable[[str], None] = lambda _line: None,
) -> Offsets:
    """Write an adapter to the folder `out` in which some control tokens have offsets, in nats.

    rows: annotated answers like those that it writes, best its own; they are read, not learnt.
    say:  is told which rows cannot be read.

    Raises PastaError if `out` exists, a length is no bucket, the adapter holds a whole model, or
    the rows have few promises, or few syncs where these get an offset.
    """
    import torch

    refuse_existing(out)
    tensors, settings = read_tensors(adapter), read_config(adapter)
    loaded = load_model(base, adapter)
    control = loaded.checkpoint.control
    close = control.promise_close
    for length in lengths.keys() - close.keys():
        known = ", ".join(map(str, close))
        raise PastaError(f"{length} is not a length that can be promised", hint=f"Known: {known}.")
    state_SD = _states(loaded, rows, say)
    for name, needed in (("promise", True), ("sync", sync != 0)):
        if needed and len(state_SD[name]) < _FEWEST:
            raise PastaError(
                f"the rows have {len(state_SD[name])} {name}s, which say little",
                hint=f"Give annotated answers with {_FEWEST} or more.",
            )
    idle_SD = torch.cat([state_SD["text"], state_SD["promise"]])
    main_SD = torch.cat([idle_SD, state_SD["sync"]])
    offset_B = torch.tensor([lengths.get(length, 0.0) for length in close], dtype=torch.float64)
    change_BD = offset_B[:, None] * _direction(state_SD["length"])
    promise_D = promise * _direction(main_SD)
    sync_D = torch.zeros_like(promise_D)
    if sync:
        sync_D = sync * _direction(state_SD["sync"], state_SD["text"], state_SD["promise"])
    changes = {
        control.promise_open: promise_D,
        control.sync: sync_D,
        **dict(zip(close.values(), change_BD, strict=True)),
    }
    trained = dict(output_rows(loaded.model, tensors, settings))
    if not trained:
        raise PastaError(f"the adapter in {adapter} has no rows of the output layer to write to")
    for name, tokens in trained.items():
        changed = tensors[name].double()
        for token, change in changes.items():
            changed[tokens.index(token)] += change
        tensors[name] = changed.to(tensors[name].dtype)
    write_adapter(out, tensors, settings, loaded.checkpoint)
    head_VD = loaded.model.get_output_embeddings().weight.detach()
    return Offsets(
        promises=len(state_SD["promise"]),
        lengths=_length_shares(
            state_SD["length"], head_VD[list(close.values())].double(), change_BD, list(close)
        ),
        promise=_share(main_SD, head_VD, control.promise_open, promise_D),
        syncs=len(state_SD["sync"]),
        sync=_share(state_SD["sync"], head_VD, control.sync, sync_D)
        if len(state_SD["sync"])
        else None,
        no_sync=_share(idle_SD, head_VD, control.sync, sync_D),
    )


def _length_shares(
    state_SD: Tensor, row_BD: Tensor, change_BD: Tensor, lengths: list[int]
) -> dict[int, Share]:
    import torch

    before_SB, after_SB = state_SD @ row_BD.T, state_SD @ (row_BD + change_BD).T
    chosen = (
        torch.bincount(logits_SB.argmax(1), minlength=len(lengths)) / len(state_SD)
        for logits_SB in (before_SB, after_SB)
    )
    columns = (column_B.tolist() for column_B in (before_SB.softmax(1).mean(0), *chosen))
    return dict(zip(lengths, map(Share, *columns), strict=True))


def _share(state_SD: Tensor, head_VD: Tensor, token: int, change_D: Tensor) -> Share:
    import torch

    probable = before = after = 0.0
    for block_SD in torch.split(state_SD, _BLOCK):
        logits_SV = block_SD.to(head_VD.dtype) @ head_VD.T
        probable += logits_SV.softmax(1)[:, token].sum().item()
        own_S = logits_SV[:, token].clone()
        logits_SV[:, token] = -float("inf")
        rival_S = logits_SV.amax(1)
        before += (own_S > rival_S).sum().item()
        after += (own_S + block_SD @ change_D > rival_S).sum().item()
    return Share(*(total / len(state_SD) for total in (probable, before, after)))


def _states(loaded: Loaded, rows: Iterable[Row], say: Callable[[str], None]) -> dict[str, Tensor]:
    """Return the states (float64) [S, D] of each kind of place (`_places`)."""
    import torch

    control = loaded.checkpoint.control
    width = loaded.model.config.get_text_config().hidden_size
    found = {kind: [torch.empty(0, width)] for kind in ("text", "promise", "sync", "length")}
    for layout, state_TD in _read(loaded, rows, say):
        places = _places(layout, control)
        for kind, states in found.items():
            states.append(state_TD[[place == kind for place in places]])
    return {kind: torch.cat(states).double() for kind, states in found.items()}


def _places(layout: Layout, control: ControlTokens) -> list[str | None]:
    """Return, token by token, what stands behind it.

    "length", or in the main thread and in no topic "promise", "sync" or "text"; None elsewhere.
    """
    lengths = frozenset(control.promise_close.values())
    found: list[str | None] = []
    in_topic = False
    for label, thread in zip(layout.label, layout.thread, strict=True):
        if label is None or thread != MAIN:
            found.append(None)
        elif label in lengths:
            found.append("length")
            in_topic = False
        elif in_topic:
            found.append(None)
        elif label == control.promise_open:
            found.append("promise")
            in_topic = True
        else:
            found.append("sync" if label == control.sync else "text")
    return found


def _read(
    loaded: Loaded, rows: Iterable[Row], say: Callable[[str], None]
) -> Iterator[tuple[Layout, Tensor]]:
    """Yield how each row is laid out and its tokens' last hidden states [T, D]."""
    checkpoint, config = loaded.checkpoint, loaded.model.config.get_text_config()
    control = checkpoint.control
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=control.ids)
    laying = SftConfig(
        data=(),
        base_name=checkpoint.base.name,
        scheme=checkpoint.scheme,
        topic=checkpoint.topic,
        joins=joins_named(checkpoint.joins[:1]) or (Joining.kv,),
        max_tokens=config.max_position_embeddings,
    )
    loaded.model.eval()
    waiting = iter(rows)
    while together := list(islice(waiting, _TOGETHER)):
        layouts: list[Layout] = []
        for row in together:
            try:
                layouts += compile_row(row, encoder, control, laying, end=loaded.end)
            except PastaError as reason:
                say(f"row {row.id} left out: {reason}")
        scored = read_layouts(loaded.model, layouts, layers=[config.num_hidden_layers])
        for layout, (_, state_TD) in zip(layouts, scored, strict=True):
            assert state_TD is not None
            yield layout, state_TD


def _direction(state_SD: Tensor, *others_SD: Tensor) -> Tensor:
    """Return direction_D on which each state nearly has the value 1, by ridge regression.

    Those of `others_SD` nearly have the value 0; each of them weighs as much as `state_SD`.
    """
    import torch

    square_DD = torch.stack(
        [one_SD.T @ one_SD / len(one_SD) for one_SD in (state_SD, *others_SD)]
    ).sum(0)
    ridge = _RIDGE * square_DD.diagonal().mean()
    return torch.linalg.solve(
        square_DD + ridge * torch.eye(len(square_DD), dtype=square_DD.dtype), state_SD.mean(0)
    )
