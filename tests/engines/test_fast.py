"""What the fast engine promises beyond the contract: results to the bit, formats, adapters."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from pasta_decoding.data.rows import read_rows
from pasta_decoding.engines.base import Branch, Feed, FloatArray
from pasta_decoding.engines.fast import FastEngine
from pasta_decoding.engines.layers import merged_linear
from pasta_decoding.engines.native import (
    PACKED,
    STRUCT_BYTES,
    FileMatrix,
    NativeLinear,
    load_operators,
)
from pasta_decoding.engines.weights import Linear, ModelWeights, stored
from pasta_decoding.errors import PastaError
from pasta_decoding.gguf_file import GgufFile, GgufTensor
from pasta_decoding.models.catalog import WholeModel
from pasta_decoding.models.checkpoint import ModelStub
from pasta_decoding.models.gguf_reader import read_config
from pasta_decoding.models.gguf_writer import write_gguf
from pasta_decoding.models.load import load_gguf
from tests.engines.oracle import Recorder, assert_equals_recompute, dense
from tests.engines.subjects import fast, speaking
from tests.engines.test_torch import fork_join_go_on
from tests.tiny import OPERATORS, TINY_MODELS, seeded, tiny_llama, tiny_model

DATA = Path(__file__).parents[2] / "data"
KINDS = [*sorted(PACKED), *(GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q3_K"))]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.fixture(scope="module")
def native() -> Any:
    """Build the C++ code, or skip what needs it."""
    operators = load_operators(OPERATORS)
    if operators is None:
        pytest.skip("needs a C++ compiler")
    return operators


def random(*shape: int, seed: int = 0) -> Tensor:
    with seeded(seed):
        return torch.randn(*shape)


def weight(kind: GGMLQuantizationType, outputs: int, inputs: int) -> GgufTensor:
    """Return random weights as a file has them."""
    block, size = GGML_QUANT_SIZES[kind]
    if inputs % block:
        pytest.skip("a file has whole blocks")
    if block == 1:
        numbers_OI = random(outputs, inputs, seed=outputs)
        if kind.name == "F16":
            bytes_ON = numbers_OI.half().view(torch.uint8).numpy()
            return GgufTensor(bytes_ON, kind, (outputs, inputs))
        return stored(numbers_OI.bfloat16() if kind.name == "BF16" else numbers_OI)
    shape = (outputs, inputs // block, size)
    blocks = np.random.default_rng(outputs).integers(0, 256, shape, dtype=np.uint8)
    numbers = {"Q6_K": [208], "Q3_K": [108]}.get(kind.name, [0])
    if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        numbers = [0, 2]
    for at in numbers:  # float16, of which random bytes may be no numbers
        blocks[..., at : at + 2] = random(*shape[:2], 1, seed=at).half().numpy().view(np.uint8)
    return GgufTensor(blocks.reshape(outputs, -1), kind, (outputs, inputs))


# --- linear layers ------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (83, 256), (200, 576), (7, 37)])
def test_weights_are_the_files(
    native: Any, kind: GGMLQuantizationType, outputs: int, inputs: int
) -> None:
    """Products with 1 are the weights, up to the last bit."""
    tensor = weight(kind, outputs, inputs)
    output_IO = NativeLinear(native, [Linear(tensor)])(torch.eye(inputs))
    expected_OI = tensor[:]
    tolerance = 1e-6 * float(expected_OI.std())
    torch.testing.assert_close(output_IO.T, expected_OI, rtol=1e-6, atol=tolerance)


@each_kind
def test_a_row_does_not_depend_on_the_others(native: Any, kind: GGMLQuantizationType) -> None:
    added = (random(3, 256).bfloat16(), random(64, 3).bfloat16())
    linear = NativeLinear(native, [Linear(weight(kind, 64, 256), added)])
    input_QI = random(40, 256, seed=1)
    together_QO = linear(input_QI)
    for first in (0, 1, 2, 3, 6, 39):
        for last in range(first + 1, 41, 3):
            assert torch.equal(linear(input_QI[first:last]), together_QO[first:last])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_an_input_that_is_large_costs_those_of_its_own_block_alone_their_precision(
    native: Any, kind: str
) -> None:
    """As in llama.cpp, 32 inputs share a scale beside formats whose blocks have 32 weights."""
    tensor = weight(GGMLQuantizationType[kind], 64, 256)
    input_1I = random(1, 256, seed=1)
    input_1I[0, 40] = 1000.0
    output_1O = NativeLinear(native, [Linear(tensor)])(input_1I)
    large_OB = tensor[:][:, 32:64]
    rounded_1B = (input_1I[:, 32:64] * 0.127).round() / 0.127
    expected_1O = input_1I @ tensor[:].T + (rounded_1B - input_1I[:, 32:64]) @ large_OB.T
    assert (output_1O - expected_1O).abs().max() < 0.05 * tensor[:].std() * 16


def test_parts_of_one_layer_round_their_inputs_as_their_formats_do(native: Any) -> None:
    """Alone and beside a part of the other kind, a part gives the same to the bit."""
    parts = [
        Linear(weight(GGMLQuantizationType[kind], 32, 512)) for kind in ("Q4_K", "Q8_0", "F16")
    ]
    input_QI = random(3, 512, seed=1)
    together_QO = NativeLinear(native, parts)(input_QI)
    alone = [NativeLinear(native, [part])(input_QI) for part in parts]
    assert torch.equal(together_QO, torch.cat(alone, dim=1))


def adapted(tensor: GgufTensor, rank: int) -> Linear:
    """Return a layer with a random adapter and bias."""
    outputs, inputs = tensor.shape
    added = (random(rank, inputs).bfloat16(), random(outputs, rank).bfloat16())
    return Linear(tensor, added, random(outputs))


@each_kind
def test_joined_layers_have_adapters_and_biases_of_their_own(
    native: Any, kind: GGMLQuantizationType
) -> None:
    parts = [
        adapted(weight(kind, 48, 256), rank=5),
        Linear(weight(kind, 16, 256)),
        adapted(weight(kind, 30, 256), rank=40),
    ]
    input_QI = random(7, 256, seed=1)
    output_QO = NativeLinear(native, parts)(input_QI)
    expected_QO = merged_linear(parts)(input_QI)
    # The adapter's first matrix is in bfloat16 beside small weights.
    error = 1e-5 if kind.name in ("F32", "F16", "Q3_K") else 0.06
    assert (output_QO - expected_QO).abs().max() < error * expected_QO.std()


# --- the library --------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
def test_a_struct_of_another_size_is_refused_when_the_library_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment_bytes = STRUCT_BYTES["Segment"]
    monkeypatch.setitem(STRUCT_BYTES, "Segment", segment_bytes + 8)
    with pytest.raises(PastaError) as error:
        load_operators.__wrapped__(OPERATORS)
    assert str(error.value) == (
        "the operators of the fast engine do not fit this version of Pasta: "
        "Segment takes 40 bytes there, 48 here"
    )


@pytest.mark.parametrize("size", [0, 5000])
def test_a_library_that_was_cut_short_is_built_again_once(
    native: Any, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load it would end the process."""
    library = Path(native._name)
    copy = shutil.copy(library, tmp_path)
    shutil.copy(library.with_suffix(".sha256"), tmp_path)
    os.truncate(copy, size)
    run = subprocess.run
    builds: list[Any] = []

    def counted(command: Any, **settings: Any) -> Any:
        if "-o" in command:
            builds.append(command)
        return run(command, **settings)

    monkeypatch.setattr(subprocess, "run", counted)
    for _ in range(2):
        assert load_operators.__wrapped__(tmp_path) is not None
    assert len(builds) == 1


def test_weights_without_memory_for_them_are_an_error_and_not_the_end(native: Any) -> None:
    linear = NativeLinear(native, [Linear(weight(GGMLQuantizationType.F32, 16, 32))])
    matrix = FileMatrix(weight(GGMLQuantizationType.F32, 16, 32))
    matrix.outputs = 2**44
    with pytest.raises(MemoryError):
        native.pasta_add_part(linear.pointer, matrix, None, 0, None, 1)
    assert linear(torch.zeros(1, 32)).shape == (1, 16)


# --- models -------------------------------------------------------------------------------------


def fed(branch: Branch, tokens: int, at: int) -> Feed:
    return Feed((branch,), tuple(range(1, tokens + 1)), tuple(range(at, at + tokens)))


def answers(engine: FastEngine) -> FloatArray:
    """Return the logits of two requests that share steps; one is forked and joined."""
    main, other = (engine.open(reserved_tokens=300) for _ in range(2))
    rows = [engine.step([fed(main, 90, 0), fed(other, 40, 0)])]
    rows.append(engine.step([fed(main, 80, 90), fed(other, 1, 40)]))
    children = [engine.fork(main), engine.fork(main)]
    rows.append(engine.step([fed(children[0], 3, 170), fed(children[1], 23, 170)]))
    engine.join(main, children)
    rows.append(engine.step([fed(other, 2, 41), fed(main, 33, 193)]))
    return np.concatenate(rows)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 80), (8, 1, 6)])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.usefixtures("native")
def test_the_cpp_code_computes_what_torch_does(
    family: str, heads: int, kv_heads: int, width: int, dtype: torch.dtype, error: float
) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}
    model = tiny_model(family, hidden_size=72, intermediate_size=60, **shape)
    logits = answers(fast(ModelWeights(model), cache_dtype=dtype))
    expected = answers(fast(ModelWeights(model), cache_dtype=dtype, plain=True))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=error)


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_rounded_inputs_change_the_default_model_as_little_as_in_llama_cpp(
    default_model: Path, default_tokenizer: PreTrainedTokenizerBase
) -> None:
    """KL to float32: llama.cpp's is 0.0037 nats a token; groups of 256 inputs gave 0.02."""
    if default_model.suffix != ".gguf":
        pytest.skip("needs the GGUF file")
    file = GgufFile(default_model)
    weights = ModelWeights(load_gguf(file, WholeModel(default_model)).model, file=file)
    text = next(iter(read_rows(DATA / "annotated_clean.jsonl.gz"))).response
    ids = default_tokenizer.encode(text)[:100]
    logprobs = []
    for plain in (True, False):
        engine = fast(weights, plain=plain, cache_tokens=200)
        main = engine.open(reserved_tokens=200)
        feeds = [Feed((main,), (token,), (position,)) for position, token in enumerate(ids)]
        logits_TV = np.concatenate([engine.step([feed]) for feed in feeds])
        logprobs.append(torch.from_numpy(logits_TV).double().log_softmax(-1))
    exact_TV, rounded_TV = logprobs
    divergence = (exact_TV.exp() * (exact_TV - rounded_TV)).sum(-1).mean()
    assert divergence < 1.5 * 0.0037


def prefilled(engine: FastEngine, cuts: list[int]) -> FloatArray:
    """Return the logits after a prompt of 120 tokens, fed in pieces."""
    ids = np.random.default_rng(3).integers(0, 100, 120).tolist()
    main = engine.open(reserved_tokens=121)
    for start, end in zip([0, *cuts], [*cuts, 120], strict=True):
        logits_FV = engine.step([Feed((main,), tuple(ids[start:end]), tuple(range(start, end)))])
    engine.close(main)
    return logits_FV


@pytest.mark.parametrize("name", TINY_MODELS)
def test_where_a_prompt_is_cut_changes_no_bit(name: str) -> None:
    engine = fast(ModelWeights(TINY_MODELS[name]()))
    in_one_feed = prefilled(engine, [])
    random_ = np.random.default_rng(4)
    for _ in range(10):
        cuts = sorted(random_.choice(np.arange(1, 120), 4, replace=False).tolist())
        np.testing.assert_array_equal(prefilled(engine, cuts), in_one_feed)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_other_requests_in_a_step_change_no_bit(name: str) -> None:
    engine = fast(ModelWeights(TINY_MODELS[name]()))

    def logits_with(others: int) -> FloatArray:
        requests = [engine.open(reserved_tokens=60) for _ in range(1 + others)]
        for start, request in enumerate(requests, 20):
            engine.step([Feed((request,), (start,) * start, tuple(range(start)))])
        feeds = [Feed((request,), (9,), (start,)) for start, request in enumerate(requests, 20)]
        row: FloatArray = engine.step(feeds)[0]
        for request in requests:
            engine.close(request)
        return row

    alone = logits_with(others=0)
    for others in (1, 2, 6, 31):
        np.testing.assert_array_equal(logits_with(others), alone)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_which_branch_was_faster_changes_no_bit(name: str) -> None:
    engine = fast(ModelWeights(TINY_MODELS[name]()))

    def joined(turns: str) -> FloatArray:
        """Return logits of three children, fed in these turns, and of their parent after them."""
        main = engine.open(reserved_tokens=300)
        engine.step([fed(main, 70, 0)])
        children = {child: engine.fork(main) for child in "abc"}
        positions = dict.fromkeys(children, 70)
        rows: dict[str, FloatArray] = {}
        for turn in turns.split():
            feeds = []
            for child in turn:
                position = positions[child]
                feeds.append(Feed((children[child],), (ord(child) - position % 9,), (position,)))
                positions[child] += 1
            rows |= dict(zip(turn, engine.step(feeds), strict=True))
        first, *others = dict.fromkeys(reversed(turns.replace(" ", "")))
        engine.join(children[first], [children[child] for child in others])
        engine.join(main, [children[first]])
        last = engine.step([fed(main, 3, 90)])
        engine.close(main)
        return np.concatenate([np.stack([rows[child] for child in "abc"]), last])

    expected = joined("abc abc abc abc abc")
    for turns in ("a a a a a b b b b b c c c c c", "c bc bc a ab abc ab ac"):
        np.testing.assert_array_equal(joined(turns), expected)


@pytest.mark.parametrize("plain", [False, True], ids=["C++", "torch"])
@torch.no_grad()
def test_an_adapter_beside_the_weights_is_the_merged_model(plain: bool) -> None:
    model = TINY_MODELS["qwen2"]()
    merged = TINY_MODELS["qwen2"]()
    added = {}
    for name, layer in merged.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            down_RI = (0.3 * random(4, layer.in_features)).bfloat16()
            up_OR = random(layer.out_features, 4).bfloat16()
            added[name] = (down_RI, up_OR)
            layer.weight += up_OR.float() @ down_RI.float()
    record = Recorder(fast(ModelWeights(model, added), plain=plain))
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
    record = Recorder(fast(ModelWeights(tiny_llama(rope_parameters=rope))))
    fork_join_go_on(record)
    assert_equals_recompute(record, dense(tiny_llama(rope_parameters=rope)))


@pytest.mark.parametrize("plain", [False, True], ids=["C++", "torch"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_file_is_the_model_that_it_was_written_from(
    name: str, plain: bool, tmp_path: Path
) -> None:
    write_gguf(speaking(TINY_MODELS[name]()), tmp_path / "x.gguf", float_type="F32")
    file = GgufFile(tmp_path / "x.gguf")
    weights = ModelWeights(ModelStub(read_config(file), file.weights), file=file)
    record = Recorder(fast(weights, plain=plain))
    fork_join_go_on(record)
    assert_equals_recompute(record, dense(TINY_MODELS[name]()))


def test_other_families_are_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=4)
    with torch.device("meta"), pytest.raises(PastaError) as error:
        FastEngine(ModelWeights(AutoModelForCausalLM.from_config(config)))
    assert str(error.value) == (
        "the fast engine cannot run this gpt2 model: it is of the family gpt2"
    )
