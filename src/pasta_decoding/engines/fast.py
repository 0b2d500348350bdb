"""A small decoder of our own: Llama, SmolLM, Mistral, Qwen 2, Qwen 3 and Gemma 3.

It computes over weights of 32, 16, 8 or 4 bits, and an adapter beside them, in float32. With the
C++ operators a row's result does not depend, to the bit, on the other rows of its step, nor on
where its prompt was cut. Every other model goes to the torch engine, which is the reference.

Shapes: Q tokens of the pass, F of them with logits, I width of the model, M of its MLP, H heads,
G kv heads, D head width, S slots, N segments (the tokens of one request), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.engines.base import Branch, Feed, FloatArray, Limits
from pasta_decoding.engines.kv_cache import Batch, BoolArray, CachedEngine, is_causal
from pasta_decoding.engines.native import Linear, NativeOperators, Operators, Part, operators
from pasta_decoding.engines.support import attention_windows, refuse_large_cache, rope_types
from pasta_decoding.engines.weights import ModelWeights
from pasta_decoding.errors import PastaError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
ROPES = {"default", "linear", "llama3", "yarn"}

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of each token's angles, [Q, D / 2]."""


def obstacle(config: Any) -> str | None:
    """Return why the fast engine does not run a model, given its text config; None if it does."""
    if config.model_type not in FAMILIES:
        return f"it is of the family {config.model_type}"
    if other := rope_types(config.rope_parameters) - ROPES:
        return f"its rotary positions are {', '.join(sorted(other))}"
    capped = any(getattr(config, f"{one}_logit_softcapping", None) for one in ("attn", "final"))
    if capped or getattr(config, "use_bidirectional_attention", None):
        return "it caps its scores or attends in both directions"
    return None


def linear(ops: Operators, own: ModelWeights, *names: str) -> Linear:
    """Return linear layers that read the same inputs."""
    return ops.linear(
        [Part(own.matrix(one), own.added.get(one), own.vector(f"{one}.bias")) for one in names]
    )


class Layer:
    """One layer of a decoder; `number` is its place, `kind` that of its attention."""

    def __init__(
        self, number: int, weights: ModelWeights, ops: Operators, keys_GSD: Tensor,
        values_GSD: Tensor,
    ) -> None:  # fmt: skip
        name, own = f"model.layers.{number}", f"model.layers.{number}.self_attn"
        config = weights.config
        windows, kinds = attention_windows(config), getattr(config, "layer_types", None)
        self.kind: str = kinds[number] if kinds else next(iter(windows))
        self.window = windows[self.kind]
        self.keys_GSD, self.values_GSD = keys_GSD, values_GSD
        self._ops, self._epsilon = ops, float(config.rms_norm_eps)
        self._gelu = weights.is_gemma
        self._heads, self._kv_heads = config.num_attention_heads, len(keys_GSD)
        width = keys_GSD.shape[-1]
        self._scaling = (getattr(config, "query_pre_attn_scalar", None) or width) ** -0.5
        self._qkv = linear(ops, weights, f"{own}.q_proj", f"{own}.k_proj", f"{own}.v_proj")
        self._out = linear(ops, weights, f"{own}.o_proj")
        self._gate_up = linear(ops, weights, f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        self._down = linear(ops, weights, f"{name}.mlp.down_proj")
        self._query_norm = weights.norm(f"{own}.q_norm")
        self._key_norm = weights.norm(f"{own}.k_norm")
        # Gemma also has norms behind attention and MLP; others call the one before the MLP this.
        after = weights.norm(f"{name}.post_attention_layernorm")
        before_mlp = weights.norm(f"{name}.pre_feedforward_layernorm")
        self._input_norm = weights.norm(f"{name}.input_layernorm")
        self._attention_norm = None if before_mlp is None else after
        self._before_mlp_norm = after if before_mlp is None else before_mlp
        self._mlp_norm = weights.norm(f"{name}.post_feedforward_layernorm")

    def __call__(self, hidden_QI: Tensor, rotation: Rotation, table: SlotTable) -> Tensor:
        attended_QI = self._attend(self._norm(hidden_QI, self._input_norm), rotation, table)
        hidden_QI = hidden_QI + self._norm(attended_QI, self._attention_norm)
        gate_up_Q2M = self._gate_up(self._norm(hidden_QI, self._before_mlp_norm))
        mlp_QI = self._down(self._ops.gated(gate_up_Q2M, self._gelu))
        return hidden_QI + self._norm(mlp_QI, self._mlp_norm)

    def _attend(self, input_QI: Tensor, rotation: Rotation, table: SlotTable) -> Tensor:
        tokens, width = len(input_QI), self.keys_GSD.shape[-1]
        heads_QHD = self._qkv(input_QI).view(tokens, -1, width)
        split = [self._heads, self._kv_heads, self._kv_heads]
        query_QHD, key_QGD, value_QGD = torch.split(heads_QHD, split, dim=1)
        if self._query_norm is not None:
            query_QHD = self._norm(query_QHD, self._query_norm)
            key_QGD = self._norm(key_QGD, self._key_norm)
        for one_QHD in (query_QHD, key_QGD):
            self._ops.rotate_(one_QHD, *rotation)
        out_QHD = self._ops.attend(
            query_QHD, key_QGD, value_QGD, self.keys_GSD, self.values_GSD, *table, self._scaling
        )
        return self._out(out_QHD.view(tokens, -1))

    def _norm(self, input_QI: Tensor, weight_I: Tensor | None) -> Tensor:
        return (
            input_QI if weight_I is None else self._ops.rms_norm(input_QI, weight_I, self._epsilon)
        )


SlotTable = tuple[Tensor, Tensor]
"""What each segment sees, as the operator reads it.

table_N6: for each segment its first query, its number of queries, the slot of the first one, the
          first visible slot, the last one + 1, and the offset of its mask in `masks` (-1: it has
          none, and each query sees all slots up to its own).
masks:    bytes, 1 for a slot that a query sees; [queries, slots] for each segment with a mask.
"""


def slot_table(batch: Batch, window: int | None) -> SlotTable:
    """Lay out what each request's part of a step sees in a layer with this window."""
    table: list[list[int]] = []
    masks: list[BoolArray] = []
    first = end_of_masks = 0
    for item in batch.items:
        mask_QK, queries, mask = item.visible(window), len(item.written), -1
        if not is_causal(mask_QK):
            mask = end_of_masks
            masks.append(mask_QK.ravel())
            end_of_masks += mask_QK.size
        table.append([first, queries, item.written.start, item.start, item.written.stop, mask])
        first += queries
    flat = np.concatenate(masks) if masks else np.zeros(0, dtype=np.bool_)
    return torch.tensor(table), torch.from_numpy(flat.view(np.uint8))


def head_width(config: Any) -> int:
    """Return how many numbers a head has."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def frequencies(config: Any, kind: str, factors: Tensor | None) -> tuple[Tensor, float]:
    """Return the angle of one position for each pair of a head's numbers, and a scale.

    factors: the file's divisors of frequencies; None: the config has the scaling.
    """
    nested = config.rope_parameters.get(kind)
    rope = nested or config.rope_parameters
    if factors is None and rope.get("rope_type", "default") != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind if nested else None)
    width = head_width(config)
    frequency_D = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    return frequency_D if factors is None else frequency_D / factors, 1.0


def rotation(positions_Q1: Tensor, frequency_D: Tensor, scale: float) -> Rotation:
    """Return cosine and sine: by float64, so that no split of the work shows in them."""
    angle_QD = (positions_Q1 * frequency_D).double()
    return (angle_QD.cos() * scale).float(), (angle_QD.sin() * scale).float()


class FastEngine(CachedEngine):
    """Implements `Engine` on the weights of a model of a family that it knows, on a processor.

    cache_dtype: of keys and values, float32 or bfloat16; None takes that of the weights.
    ops:         None takes the C++ operators, or torch's where they cannot be built.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        cache_tokens: int = DEFAULT_CACHE_TOKENS,
        cache_dtype: torch.dtype | None = None,
        ops: Operators | None = None,
    ) -> None:
        config = weights.config
        if reason := obstacle(config):
            raise PastaError(f"the fast engine cannot run this {config.model_type} model: {reason}")
        super().__init__(
            Limits(int(config.vocab_size), int(config.max_position_embeddings), cache_tokens)
        )
        self._ops = ops or operators() or Operators()
        self._weights, self._epsilon = weights, float(config.rms_norm_eps)
        heads, dtype = config.num_key_value_heads, cache_dtype or weights.dtype
        shape = (2, config.num_hidden_layers, heads, cache_tokens, head_width(config))
        refuse_large_cache(cache_tokens, math.prod(shape) // cache_tokens * dtype.itemsize)
        self._slots = torch.zeros(shape, dtype=dtype)  # keys and values of each layer
        self._layers = [
            Layer(number, weights, self._ops, *self._slots[:, number]) for number in range(shape[1])
        ]
        self._frequencies = {
            one: frequencies(config, one, weights.frequency_factors)
            for one in {layer.kind for layer in self._layers}
        }
        self._scale = config.hidden_size**0.5 if weights.is_gemma else 1.0
        norm_I = weights.norm("model.norm")
        assert norm_I is not None, "every family has one"
        self._norm_I = norm_I
        self._head = linear(self._ops, weights, "lm_head")
        self.name = f"fast {weights.form if isinstance(self._ops, NativeOperators) else 'float32'}"

    def copy(self, source: Branch, target: Branch, tokens: int) -> None:
        given, taken = self.copied(source, target, tokens)
        self._slots[..., taken, :] = self._slots[..., given, :]

    @torch.inference_mode()
    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        batch = self.plan(feeds)
        if not batch.items:
            return np.empty((0, self.vocabulary_size), dtype=np.float32)
        tables = {one: slot_table(batch, one) for one in {layer.window for layer in self._layers}}
        positions_Q1 = torch.tensor(batch.positions, dtype=torch.float32)[:, None]
        rotations = {kind: rotation(positions_Q1, *one) for kind, one in self._frequencies.items()}
        hidden_QI = self._weights.embed(batch.ids) * self._scale
        for layer in self._layers:
            hidden_QI = layer(hidden_QI, rotations[layer.kind], tables[layer.window])
        hidden_FI = hidden_QI[torch.tensor(batch.wanted, dtype=torch.long)]
        output_FI = self._ops.rms_norm(hidden_FI, self._norm_I, self._epsilon)
        logits_FV: FloatArray = self._head(output_FI).numpy()
        return logits_FV if batch.order is None else logits_FV[batch.order]
