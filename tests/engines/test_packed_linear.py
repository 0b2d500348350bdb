"""Packed layers compute what the layers that they stand for do, whatever keeps their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor, nn

from pasta_decoding.engines import compiled
from pasta_decoding.engines.packed_linear import (
    LowRank,
    Packed,
    PackedLinear,
    in_place_of,
    pack,
    pack_blocks,
    packed_layers,
)
from tests.engines.subjects import compiled_tiny
from tests.tiny import TINY_MODELS, seeded

CAPABILITIES: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
ABLE = bool(CAPABILITIES.get("avx512_bf16"))

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ABLE, reason="the operator needs AVX-512 with bfloat16"),
]

FORMATS = ("Q4_1", "Q8_0", "bfloat16")


@pytest.fixture(autouse=True)
def operator() -> None:
    """Load it, with whichever program."""
    compiled_tiny("llama")


def stored(weight_OI: Tensor, kept: str) -> Tensor:
    """Return the weights as a file of this number format gives them back, in float32."""
    if kept == "bfloat16":
        return weight_OI.bfloat16().float()
    kind = GGMLQuantizationType[kept]
    return torch.from_numpy(dequantize(quantize(weight_OI.numpy(), kind), kind))


def packed(weight_OI: Tensor, kept: str) -> Packed:
    found = pack(weight_OI) if kept == "bfloat16" else pack_blocks(weight_OI)
    assert found is not None
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    with seeded(seed):
        return torch.randn(*shape)


def assert_near(found_QO: Tensor, expected_QO: Tensor, *, of: float = 1e-5) -> None:
    error = (found_QO.double() - expected_QO).abs().max() / expected_QO.abs().max()
    assert error < of, error


@pytest.mark.parametrize("kept", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 96), (83, 64), (200, 576)])
def test_a_layer_computes_its_products_at_any_width(kept: str, outputs: int, inputs: int) -> None:
    weight_OI = stored(random(outputs, inputs), kept)
    layer = PackedLinear([packed(weight_OI, kept)], [None])
    for tokens in (*range(1, 14), 25, 40):
        input_QI = random(tokens, inputs, seed=tokens).bfloat16()
        assert_near(layer(input_QI), input_QI.double() @ weight_OI.double().T)


@pytest.mark.parametrize("kept", ["Q4_1", "Q8_0"])
def test_weights_stay_as_they_are_stored(kept: str) -> None:
    """Each unit vector of inputs gives a column back, which bfloat16 could not hold."""
    weight_OI = stored(random(48, 64), kept)
    layer = PackedLinear([packed(weight_OI, kept)], [None])
    torch.testing.assert_close(layer(torch.eye(64).bfloat16()).T, weight_OI, rtol=0, atol=1e-7)
    assert not torch.equal(weight_OI.bfloat16().float(), weight_OI)


@pytest.mark.parametrize("kept", FORMATS)
def test_what_is_added_comes_on_top_of_each_layer(kept: str) -> None:
    sizes, ranks = (48, 16, 32), (5, None, 16)
    weights = [stored(random(size, 96, seed=size), kept) for size in sizes]
    added: list[LowRank | None] = [
        None if rank is None else (random(rank, 96).bfloat16(), random(size, rank).bfloat16())
        for size, rank in zip(sizes, ranks, strict=True)
    ]
    layer = PackedLinear([packed(weight_OI, kept) for weight_OI in weights], added)
    input_QI = random(7, 96, seed=1).bfloat16()
    expected = [
        input_QI.double()
        @ (weight_OI.double() + (one[1].double() @ one[0].double() if one else 0)).T
        for weight_OI, one in zip(weights, added, strict=True)
    ]
    # What `down` makes of the inputs is rounded to bfloat16, as it is where peft computes in it.
    assert_near(layer(input_QI), torch.cat(expected, dim=1), of=3e-3)


@pytest.mark.parametrize("kept", FORMATS)
def test_an_output_does_not_depend_on_what_else_is_computed(kept: str) -> None:
    weight_OI, added = stored(random(64, 96), kept), (random(3, 96), random(64, 3))
    layer = PackedLinear([packed(weight_OI, kept)], [added])
    input_QI = random(40, 96, seed=1).bfloat16()
    together = layer(input_QI)
    for first, last in ((0, 1), (1, 3), (5, 13), (20, 40)):
        assert torch.equal(layer(input_QI[first:last]), together[first:last])


def test_only_what_is_given_back_exactly_is_kept_in_blocks() -> None:
    assert pack_blocks(random(16, 64)) is None
    for kept in ("Q4_0", "Q5_1"):
        assert pack_blocks(stored(random(16, 64), kept)) is None
    exact = stored(random(16, 64), "Q4_1")
    assert pack_blocks(exact) is not None
    assert pack_blocks(exact.bfloat16()) is None
    exact[3, 40] += 1e-6
    assert pack_blocks(exact) is None
    assert pack(random(16, 40)) is None, "no whole blocks"


def test_blocks_of_one_value_are_kept() -> None:
    weight_OI = torch.zeros(16, 64)
    weight_OI[2, :32] = 0.5
    input_QI = random(3, 64).bfloat16()
    assert_near(
        PackedLinear([packed(weight_OI, "Q4_1")], [None])(input_QI),
        input_QI.double() @ weight_OI.double().T,
    )


def on_a_grid(name: str) -> Any:
    """Return a tiny model whose layers are as a Q4_1 file has them."""
    model = TINY_MODELS[name](vocabulary=96, tie_word_embeddings=True)
    for one in model.modules():
        if isinstance(one, nn.Linear):
            one.weight.data = stored(one.weight.data, "Q4_1")
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("apart", [True, False])
@torch.no_grad()
def test_a_model_with_packed_layers_is_the_model(name: str, apart: bool) -> None:
    model, exact = on_a_grid(name), on_a_grid(name)
    added: dict[str, LowRank] = {}
    for layer, one in exact.named_modules():
        if isinstance(one, nn.Linear) and layer != "lm_head":
            down_RI, up_OR = 0.3 * random(4, one.in_features), 0.3 * random(one.out_features, 4)
            added[layer] = (down_RI.bfloat16(), up_OR.bfloat16())
            one.weight += added[layer][1].float() @ added[layer][0].float()
    layers = packed_layers(model, added) if apart else packed_layers(exact)
    assert layers.keys() == {n for n, one in model.named_modules() if isinstance(one, nn.Linear)}
    calls = {id(layer.called) for layer in layers.values()}
    assert len(calls) == 4 * model.config.num_hidden_layers + 1, "q, k and v; gate and up"
    input_ids = torch.arange(1, 40)[None]
    expected, merged = exact(input_ids=input_ids).logits[0], exact.bfloat16()
    rounded = merged(input_ids=input_ids).logits[0].float()
    computing = model.bfloat16() if apart else merged
    before = dict(computing.named_modules())
    with in_place_of(computing, layers):
        found = computing(input_ids=input_ids).logits[0]
    assert dict(computing.named_modules()) == before
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 1.1 * (rounded - expected).abs().mean()


@torch.no_grad()
def test_layers_that_cannot_be_packed_stay() -> None:
    model = TINY_MODELS["llama"](intermediate_size=48)
    layers = packed_layers(model)
    assert [name for name in layers if "down_proj" in name] == []
    assert len(layers) == 6 * model.config.num_hidden_layers + 1
    program = compiled._exported(model.bfloat16(), layers)
    called = [str(node.target) for node in program.graph.nodes if "pasta" in str(node.target)]
    assert called.count("pasta.linear.default") == 3 * model.config.num_hidden_layers + 1
