"""What the fast engine promises beyond the contract: results to the bit, formats, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pasta_decoding.engines.base import Feed, FloatArray
from pasta_decoding.engines.fast import FastEngine
from pasta_decoding.engines.native import Operators, Part, operators
from pasta_decoding.engines.packed import PACKED, LowRank, Weights
from pasta_decoding.engines.weights import GgufWeights, ModelWeights
from pasta_decoding.errors import PastaError
from pasta_decoding.gguf_file import GgufFile
from pasta_decoding.models.gguf import read_config, write_gguf
from tests.engines.oracle import Recorder, assert_equals_recompute, dense
from tests.engines.subjects import speaking
from tests.engines.test_torch import fork_join_go_on
from tests.tiny import TINY_MODELS, seeded, tiny_llama

KEPT_OTHERWISE = [GGMLQuantizationType[one] for one in ("F32", "BF16", "Q5_1")]
FORMATS = ("Q4_1", "Q8_0", "bfloat16", "float32")


@pytest.fixture(scope="module")
def native() -> Operators:
    """Build the operators, or skip what needs them."""
    found = operators()
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    with seeded(seed):
        return torch.randn(*shape)


def stored(weight_OI: Tensor, kind: str) -> Tensor:
    """Return the weights as a file of this number format gives them back."""
    if kind in ("bfloat16", "float32"):
        return weight_OI.to(getattr(torch, kind))
    number = GGMLQuantizationType[kind]
    return torch.from_numpy(dequantize(quantize(weight_OI.numpy(), number), number))


def layer(weight_OI: Tensor, added: LowRank | None = None, bias_O: Tensor | None = None) -> Part:
    return Part(Weights.of(weight_OI).in_blocks(), added, bias_O)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Compare weights, which came out as products with 1: the last bit may be another."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.std()))


# --- linear layers ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (83, 64), (200, 576), (7, 37)])
def test_weights_are_the_files(native: Operators, kind: str, outputs: int, inputs: int) -> None:
    if inputs % 32 and kind.startswith("Q"):
        pytest.skip("a file has whole blocks")
    weight_OI = stored(random(outputs, inputs), kind)
    part = layer(weight_OI)
    assert part.weights.kind.name == {"bfloat16": "BF16", "float32": "F32"}.get(kind, kind)
    assert_same(native.linear([part])(torch.eye(inputs)).T, weight_OI.float())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_does_not_depend_on_the_others(native: Operators, kind: str) -> None:
    added = (random(3, 96).bfloat16(), random(64, 3).bfloat16())
    linear = native.linear([layer(stored(random(64, 96), kind), added)])
    input_QI = random(40, 96, seed=1)
    together_QO = linear(input_QI)
    for first in range(0, 40, 3):
        for last in range(first + 1, 41):
            assert torch.equal(linear(input_QI[first:last]), together_QO[first:last])


@pytest.mark.parametrize("kind", FORMATS)
def test_joined_layers_have_adapters_and_biases_of_their_own(native: Operators, kind: str) -> None:
    sizes, ranks = (48, 16, 30), (5, None, 40)
    parts = [
        layer(
            stored(random(size, 96, seed=size), kind),
            (random(rank, 96).bfloat16(), random(size, rank).bfloat16()) if rank else None,
            random(size) if rank else None,
        )
        for size, rank in zip(sizes, ranks, strict=True)
    ]
    input_QI = random(7, 96, seed=1)
    found_QO, expected_QO = (ops.linear(parts)(input_QI) for ops in (native, Operators()))
    # Inputs of other weights than those of 32 bits are rounded.
    error = 1e-5 if kind == "float32" else 0.03
    assert (found_QO - expected_QO).abs().max() < error * expected_QO.std()


def test_only_what_is_given_back_exactly_is_kept_in_blocks() -> None:
    exact = stored(random(32, 64), "Q4_1")
    exact[30, 40] += 1e-6
    for weight_OI in (random(16, 64), stored(random(16, 64), "Q5_1"), exact):
        assert Weights.of(weight_OI).in_blocks().kind == GGMLQuantizationType.F32
    zeros = Weights.of(torch.zeros(16, 64)).in_blocks()
    assert zeros.kind == GGMLQuantizationType.Q4_1, "blocks of one value"


@pytest.mark.parametrize("kind", [*sorted(PACKED), *KEPT_OTHERWISE], ids=lambda kind: kind.name)
def test_a_files_rows_give_its_values(native: Operators, kind: GGMLQuantizationType) -> None:
    inputs, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (40, 512 // inputs, size), dtype=np.uint8)
    numbers = {"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2]}.get(kind.name, [0])
    for at in numbers:  # float16, of which random bytes may be no numbers
        scales = random(*blocks.shape[:2], 1, seed=at).half().numpy()
        blocks[..., at : at + 2] = scales.view(np.uint8)
    rows = blocks.reshape(40, -1)
    if inputs == 1:
        rows = quantize(random(40, 512).numpy(), kind).view(np.uint8)
    found_OI = native.linear([Part(Weights(rows, kind, 512), None, None)])(torch.eye(512)).T
    assert_same(found_OI, torch.from_numpy(dequantize(rows, kind)))


# --- other operators ----------------------------------------------------------------------------


@pytest.mark.parametrize("gelu", [True, False])
def test_operators_compute_what_torch_does(native: Operators, gelu: bool) -> None:
    plain, rows = Operators(), random(9, 3, 12)
    norms = [one.rms_norm(rows, random(12, seed=1), 1e-5) for one in (native, plain)]
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(*(one.gated(4 * random(9, 60), gelu) for one in (native, plain)))
    turned = [rows.clone(), rows.clone()]
    for one, heads_QHD in zip((native, plain), turned, strict=True):
        one.rotate_(heads_QHD, random(9, 6, seed=2), random(9, 6, seed=3))
    torch.testing.assert_close(*turned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 80), (8, 1, 6)])
def test_attention_is_torchs(
    native: Operators, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> None:
    requests = [(40, 40, False), (3, 170, True), (1, 64, False), (33, 300, True)]
    table: list[list[int]] = []
    masks: list[Tensor] = []
    first = start = 0
    for queries, slots, masked in requests:
        mask = sum(map(len, masks)) if masked else -1
        table.append([first, queries, start + slots - queries, start, start + slots, mask])
        if masked:
            seen_QK = torch.tril(random(queries, slots) > 0, slots - queries)
            seen_QK[:, slots - queries :].fill_diagonal_(True)
            masks.append(seen_QK.flatten().to(torch.uint8))
        first, start = first + queries, start + slots
    new_QHD = random(first, heads + 2 * kv_heads, width)
    query, key, value = torch.split(new_QHD, [heads, kv_heads, kv_heads], dim=1)
    found = []
    for one in (native, Operators()):
        cache = random(2, kv_heads, start, width, seed=5).to(dtype)
        out = one.attend(
            query, key, value, cache[0], cache[1], torch.tensor(table), torch.cat(masks), 0.3
        )
        found.append((out, cache))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0][1], found[1][1])


# --- models -------------------------------------------------------------------------------------


def prefilled(engine: FastEngine, cuts: list[int]) -> FloatArray:
    """Return the logits behind a prompt of 120 tokens, fed in pieces."""
    ids = np.random.default_rng(3).integers(0, 100, 120).tolist()
    main = engine.open(reserved_tokens=121)
    for start, end in zip([0, *cuts], [*cuts, 120], strict=True):
        found = engine.step([Feed((main,), tuple(ids[start:end]), tuple(range(start, end)))])
    engine.close(main)
    return found


@pytest.mark.parametrize("name", TINY_MODELS)
def test_where_a_prompt_is_cut_changes_no_bit(name: str) -> None:
    engine = FastEngine(ModelWeights(TINY_MODELS[name]()))
    whole = prefilled(engine, [])
    random_ = np.random.default_rng(4)
    for _ in range(10):
        cuts = sorted(random_.choice(np.arange(1, 120), 4, replace=False).tolist())
        np.testing.assert_array_equal(prefilled(engine, cuts), whole)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_other_requests_in_a_step_change_no_bit(name: str) -> None:
    engine = FastEngine(ModelWeights(TINY_MODELS[name]()))

    def beside(others: int) -> FloatArray:
        requests = [engine.open(reserved_tokens=60) for _ in range(1 + others)]
        for start, request in enumerate(requests, 20):
            engine.step([Feed((request,), (start,) * start, tuple(range(start)))])
        feeds = [Feed((one,), (9,), (start,)) for start, one in enumerate(requests, 20)]
        row: FloatArray = engine.step(feeds)[0]
        for request in requests:
            engine.close(request)
        return row

    alone = beside(0)
    for others in (1, 2, 6, 31):
        np.testing.assert_array_equal(beside(others), alone)


@pytest.mark.parametrize("ops", [None, Operators()], ids=["C++", "torch"])
@torch.no_grad()
def test_an_adapter_beside_the_weights_is_the_merged_model(ops: Operators | None) -> None:
    model, merged, added = TINY_MODELS["qwen2"](), TINY_MODELS["qwen2"](), {}
    for name, layer in merged.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            down_RI, up_OR = 0.3 * random(4, layer.in_features), random(layer.out_features, 4)
            added[name] = (down_RI.bfloat16(), up_OR.bfloat16())
            layer.weight += added[name][1].float() @ added[name][0].float()
    record = Recorder(FastEngine(ModelWeights(model, added), ops=ops))
    fork_join_go_on(record)
    assert_equals_recompute(record, dense(merged))


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_positions_are_transformers(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    record = Recorder(FastEngine(ModelWeights(tiny_llama(rope_parameters=rope))))
    fork_join_go_on(record)
    assert_equals_recompute(record, dense(tiny_llama(rope_parameters=rope)))


@pytest.mark.parametrize("ops", [None, Operators()], ids=["C++", "torch"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_file_is_the_model_that_it_was_written_from(
    name: str, ops: Operators | None, tmp_path: Path
) -> None:
    write_gguf(speaking(TINY_MODELS[name]()), tmp_path / "x.gguf", float_type="F32")
    file = GgufFile(tmp_path / "x.gguf")
    weights = GgufWeights(file, read_config(file))
    engine = FastEngine(weights, cache_dtype=torch.float32, ops=ops)
    record = Recorder(engine)
    fork_join_go_on(record)
    assert_equals_recompute(record, dense(TINY_MODELS[name]()))


def test_other_families_are_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=4)
    with torch.device("meta"), pytest.raises(PastaError) as error:
        FastEngine(ModelWeights(AutoModelForCausalLM.from_config(config)))
    assert str(error.value) == (
        "the fast engine cannot run this gpt2 model: it is of the family gpt2"
    )
