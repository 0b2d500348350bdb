"""How much memory training takes on each GPU: counted on tensors without storage, not guessed.

A model of one layer and one of two are built and run on fake tensors. What the second one has more
is a layer's share, so a model of any depth is known in a second and without its weights.

Shapes: T tokens of a pack, H heads, D head width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

from pasta_decoding.models.control_tokens import BUCKETS, ControlTokens
from pasta_decoding.training.lora import add_lora

KERNEL = "pasta_counted"
ADAM_STATES = 2
GATHERED_LAYERS = 2
"""Sharded training holds the layer that it computes and the one that it fetches meanwhile."""


@dataclass(frozen=True, slots=True)
class Count:
    """Numbers of a model of some depth.

    parameters: all; trained: those that are.
    weight_bytes, trained_bytes: as they are stored.
    saved_bytes: what one pack's forward pass keeps for the way back.
    """

    parameters: int
    trained: int
    weight_bytes: int
    trained_bytes: int
    saved_bytes: int

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Count)))

    def __sub__(self, other: Count) -> Count:
        return self + other.times(-1)

    def times(self, factor: int) -> Count:
        """Return that many of them."""
        return Count(*(factor * getattr(self, field.name) for field in fields(Count)))


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on each GPU at the worst moment of a step. Buffers of libraries come on top.

    copies: weights as they compute: gathered from all GPUs, or in another number format.
    """

    weights: int
    gradients: int
    optimiser: int
    copies: int
    activations: int
    mask: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Measured:
    """One layer of a model, everything else of it, and how it is to be trained."""

    config: Any
    tokens: int
    lora_rank: int
    layer: Count
    rest: Count

    @property
    def whole(self) -> Count:
        """The model at its own depth."""
        return self.rest + self.layer.times(self.config.num_hidden_layers)


def measure(config: Any, *, tokens: int, lora_rank: int) -> Measured:
    """Count a Hugging Face decoder. Takes some seconds, and no memory to speak of.

    tokens:    of one pack; each is taken to have a label.
    lora_rank: 0 trains all weights.
    """
    one, two = (count_model(config, layers, tokens, lora_rank) for layers in (1, 2))
    return Measured(config, tokens, lora_rank, layer=two - one, rest=one + one - two)


def estimate(model: Measured, *, gpus: int, recompute: bool) -> Need:
    """Return what each of `gpus` needs that share weights, gradients and optimiser state.

    recompute: activations are computed again on the way back (`--gradient-checkpointing`).
    """
    whole, layer, rest = model.whole, model.layer, model.rest
    # Where all weights are trained they are kept in float32, and bfloat16 copies compute.
    stored = 1 if model.lora_rank else 2
    copies = 0 if model.lora_rank else 2 * whole.parameters
    if gpus > 1:
        copies = 2 * max(layer.parameters * GATHERED_LAYERS, rest.parameters)
    return Need(
        weights=stored * whole.weight_bytes // gpus,
        gradients=stored * whole.trained_bytes // gpus,
        optimiser=stored * ADAM_STATES * whole.trained_bytes // gpus,
        copies=copies,
        activations=_activations(model, recompute=recompute),
        mask=model.tokens**2,
    )


def _activations(model: Measured, *, recompute: bool) -> int:
    logits = model.tokens * model.config.vocab_size * (4 + 2)  # their gradient, in both formats
    if not recompute:
        return model.whole.saved_bytes + logits
    kept = model.config.num_hidden_layers * model.tokens * model.config.hidden_size * 2
    return kept + model.rest.saved_bytes + max(logits, model.layer.saved_bytes)


def count_model(config: Any, layers: int, tokens: int, lora_rank: int) -> Count:
    """Count a model in bfloat16 with the shapes of `config`, but so many layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=KERNEL
        )
        if lora_rank:
            model = add_lora(model, _some_binding(), rank=lora_rank, seed=0)
    parameters = list(model.parameters())
    trained = [one for one in parameters if one.requires_grad]
    return Count(
        sum(one.numel() for one in parameters),
        sum(one.numel() for one in trained),
        sum(map(_bytes, parameters)),
        sum(map(_bytes, trained)),
        saved_bytes(model, tokens),
    )


def saved_bytes(model: Any, tokens: int) -> int:
    """Return what a forward pass over `tokens` tokens with as many labels keeps for the way back.

    The weights of `model` are not read; they may be on the meta device.
    """
    with FakeTensorMode():  # as on a device, but without storage; meta tensors know no autocast
        ids = torch.zeros(1, tokens, dtype=torch.long)
        state = {
            name: torch.empty(one.shape, dtype=one.dtype, requires_grad=one.requires_grad)
            for name, one in (*model.named_parameters(), *model.named_buffers())
        }
        with _saved(state.values()) as saved, torch.autocast("cpu", torch.bfloat16):
            inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False}
            logits = functional_call(model.train(), state, kwargs=inputs).logits[0]
            loss = cross_entropy(logits.float(), ids[0])
        assert loss.requires_grad, "something is trained"
        return sum(saved())


@contextmanager
def _saved(parameters: Iterable[Tensor]) -> Iterator[Callable[[], Iterator[int]]]:
    """Watch what autograd keeps, each storage once, without the weights themselves."""
    own = {one.untyped_storage()._cdata for one in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: (storage.nbytes() for storage in kept.values())


class _Kernel(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps: no T x T scores, but one number a query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out


def _attention(_module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    out: Tensor = _Kernel.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _some_binding() -> ControlTokens:
    ids = count()
    single = [next(ids) for _ in range(4)]
    return ControlTokens(single[0], {size: next(ids) for size in BUCKETS}, *single[1:])


AttentionInterface.register(KERNEL, _attention)
AttentionMaskInterface.register(KERNEL, sdpa_mask)
