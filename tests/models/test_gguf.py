"""GGUF files: what is refused, what comes back, and that the weights mean the same."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from pasta_decoding.errors import PastaError
from pasta_decoding.gguf_file import GgufFile, GgufTensor
from pasta_decoding.models.catalog import BaseAlone, BaseWithAdapter, WholeModel
from pasta_decoding.models.checkpoint import GGUF_KEY, choose_tokens, describe
from pasta_decoding.models.export import cached_name, export_gguf, export_hf
from pasta_decoding.models.gguf_reader import read_config, read_tokenizer
from pasta_decoding.models.gguf_writer import has_translation, write_gguf
from pasta_decoding.models.load import LoadedModel, eos_ids, load_gguf, load_model
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.models.template import Message
from tests.checkpoint import END_ID, TinyCheckpoint, byte_tokenizer, make_adapter, make_base
from tests.engines.subjects import speaking
from tests.engines.test_fast import ROPES, each_kind
from tests.shapes import LLAMA3_SPLIT, llama3_tokenizer
from tests.tiny import TINY_MODELS, tiny_llama


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: TinyCheckpoint) -> LoadedModel:
    return load_model(tiny_checkpoint.source)


# Reading


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and a pair that is one token: transformers reads no file without one."""
    tokenizer: Any = byte_tokenizer()
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["model"] |= {
        "merges": [["t", "h"]],
        "vocab": {**described["model"]["vocab"], "th": 256},
    }
    for added in described["added_tokens"]:
        added["id"] += 1
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(described))
    return tokenizer


def smollm_tokenizer() -> PreTrainedTokenizerFast:
    """Digits are cut apart, and a token is added that is not special."""
    tokenizer = plain_tokenizer()
    backend: Any = tokenizer.backend_tokenizer
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), plain]
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = plain_tokenizer()
    backend: Any = tokenizer.backend_tokenizer
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT.replace("{1,3}", "")), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.normalizer = normalizers.NFC()
    return tokenizer


TOKENIZERS = {
    "gpt-2": plain_tokenizer,
    "smollm": smollm_tokenizer,
    "qwen2": qwen_tokenizer,
    "llama-bpe": llama3_tokenizer,
}
TEXTS = [
    "",
    "It's 7 <|im_end|>\n\n  x",
    "Naïve cafe\u0301, 東京, 😀",
    " 20245. one\n\n10.",
    "user x",
]
TALK = [Message("user", "Why? <|im_end|>"), Message("assistant", "b"), Message("user", "c")]


def written(
    model: Any, path: Path, tokenizer: Any, ends: Collection[int] = (), float_type: str = "F32"
) -> LoadedModel:
    """Write a model with a tokenizer to `path`; return what was written."""
    control = choose_tokens(tokenizer)
    checkpoint = describe(model, tokenizer, control, name="tests/tiny")
    loaded = LoadedModel(model, tokenizer, checkpoint, frozenset({tokenizer.eos_token_id, *ends}))
    write_gguf(loaded, path, float_type=float_type)
    return loaded


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_comes_back_with_its_template_and_ends(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    tokenizer = TOKENIZERS[name]()
    loaded = written(tiny_llama(vocabulary=300), path, tokenizer, [3])
    assert GGUFReader(path).fields["tokenizer.ggml.pre"].contents() == name
    back = load_gguf(GgufFile(path), WholeModel(path))
    assert (back.checkpoint, back.eos_ids) == (loaded.checkpoint, loaded.eos_ids)
    assert (back.layer_updates, back.end) == ({}, tokenizer.eos_token_id)
    assert back.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert back.tokenizer.all_special_ids == tokenizer.all_special_ids
    for text in TEXTS:
        assert back.tokenizer.encode(text) == tokenizer.encode(text)
    assert PromptEncoder(back.tokenizer).encode(TALK) == PromptEncoder(tokenizer).encode(TALK)


@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_config_tokenizer_and_weights_are_those_that_transformers_reads(
    name: str, tied: bool, tmp_path: Path
) -> None:
    make: Any = TINY_MODELS[name]
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    model = make(
        vocabulary=300,
        tie_word_embeddings=tied,
        num_attention_heads=8,
        head_dim=4,
        rope_parameters=rope,
    )
    written(model, tmp_path / "x.gguf", plain_tokenizer())
    file = GgufFile(tmp_path / "x.gguf")
    ours = read_config(file)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="x.gguf")
    for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps",
                "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "eos_token_id",
                "max_position_embeddings", "tie_word_embeddings"):  # fmt: skip
        assert getattr(ours, key) == getattr(theirs, key), key
    assert (ours.head_dim, ours.rope_parameters) == (4, rope)
    parameters = dict(model.named_parameters())
    assert file.weights.keys() == parameters.keys()
    for key, weight in parameters.items():
        assert torch.equal(file.weights[key][:], weight), key
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    for text in TEXTS:
        assert read_tokenizer(file).encode(text) == tokenizer.encode(text)


def test_a_marker_of_the_template_is_a_token_whatever_the_file_calls_it(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    tokenizer = plain_tokenizer()
    written(tiny_llama(vocabulary=300), path, tokenizer)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert isinstance(start, int)
    before, key, after = path.read_bytes().partition(b"tokenizer.ggml.token_type")
    # After the key come the type of the value, the type and the number of its items, and the items.
    offset = 4 + 4 + 8 + 4 * start
    changed_kinds = after[:offset] + struct.pack("<i", 1) + after[offset + 4 :]
    path.write_bytes(before + key + changed_kinds)
    assert read_tokenizer(GgufFile(path)).encode("<|im_start|>") == [start]


@pytest.fixture
def foreign(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    """Return a GGUF of the tiny base model as others write it: without a checkpoint of Pasta's."""
    path = tmp_path / "foreign.gguf"
    key = GGUF_KEY.encode()
    write_gguf(load_model(BaseAlone(tiny_checkpoint.base)), path, float_type="F32")
    path.write_bytes(path.read_bytes().replace(key, b"x" * len(key)))
    return path


def test_a_foreign_file_is_a_base_model_for_an_adapter(
    foreign: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    alone = load_gguf(GgufFile(foreign), WholeModel(foreign))
    assert alone.checkpoint.joins == ()
    assert alone.layer_updates == {}
    assert alone.eos_ids == {END_ID}
    loaded = load_gguf(GgufFile(foreign), BaseWithAdapter(foreign, tiny_checkpoint.adapter))
    merged = load_model(tiny_checkpoint.source)
    assert (loaded.checkpoint, loaded.warning) == (merged.checkpoint, None)
    assert "model.embed_tokens" in loaded.layer_updates


def test_an_adapter_of_another_base_or_beside_another_is_refused(
    foreign: Path, loaded: LoadedModel, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    other = make_adapter(make_base(tmp_path / "base", seed=1), tmp_path / "other")
    with pytest.raises(PastaError, match=r"was trained on tests/tiny-llama \(norms_sha256"):
        load_gguf(GgufFile(foreign), BaseWithAdapter(foreign, other))
    merged = tmp_path / "merged.gguf"
    write_gguf(loaded, merged)
    with pytest.raises(PastaError, match=r"merged\.gguf holds an adapter already"):
        load_gguf(GgufFile(merged), BaseWithAdapter(merged, tiny_checkpoint.adapter))


def test_the_templates_end_counts_beside_the_one_that_the_file_names(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = load_model(BaseAlone(tiny_checkpoint.base))
    path = tmp_path / "x.gguf"
    write_gguf(LoadedModel(base.model, base.tokenizer, base.checkpoint, frozenset({256})), path)
    loaded = load_gguf(GgufFile(path), WholeModel(path))
    assert loaded.eos_ids == eos_ids([256], loaded.tokenizer) == {256, END_ID}
    assert loaded.end == END_ID


PART = struct.pack("<4sIQQQ11sIH", b"GGUF", 3, 0, 1, 11, b"split.count", 2, 2)
NESTED = struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"x", 9) + struct.pack("<IQ", 9, 1) * 5000


def numbered(key: str, number: int, kind: int = 4) -> Callable[[bytes, int], bytes]:
    """Return a damage that gives a setting another value and another type."""

    def damage(raw: bytes, _at: int) -> bytes:
        before, key_and_kind, after = raw.partition(key.encode() + struct.pack("<I", 4))
        return before + key_and_kind[:-4] + struct.pack("<II", kind, number) + after[4:]

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda *_: b"", "is not a GGUF file that can be read: cannot mmap an empty file"),
        (lambda raw, _: raw[:4] + b"\x09" + raw[5:], "it begins with b'GGUF', version 9"),
        (lambda raw, _: raw[:500], "is not a GGUF file that can be read: "),
        (lambda raw, _: raw[:-4000], "it ends before the end of "),
        (lambda raw, at: raw[:at] + b"\x63" + raw[at + 1 :], "99 is not a valid GGMLQuant"),
        (lambda raw, _: raw.replace(b"llama", b"lluma"), "of the family lluma, not llama, qwen2"),
        (lambda raw, _: raw.replace(b"context_", b"contents"), "sets llama.contentslength, which"),
        (lambda raw, _: raw.replace(b"k.1.ffn_up", b"k.1.ffn_xy"), "such as blk.1.ffn_xy.weight"),
        (lambda raw, _: raw.replace(b"feed_forward_length", b"rope.scaling.factor"), "type linear"),
        (lambda raw, _: raw[:-2] + b"\x00\x7c", "numbers that are not finite, in output.weight"),
        (lambda *_: PART, "is one of the 2 parts of a model"),
        (lambda *_: NESTED, "is not a GGUF file that can be read: maximum recursion depth"),
        (lambda raw, at: raw[:at] + b"\x0c" + raw[at + 1 :], "blk.0.attn_q.weight end inside of a"),
        (numbered("llama.block_count", 2**31), "holds no blk.2.attn_q.weight"),
        (numbered("llama.block_count", 2, 6), "holds no whole number above 0 as llama.block_c"),
        (numbered("llama.rope.dimension_count", 4), "has heads of the widths [4, 8], not of one"),
        (numbered("llama.attention.head_count", 0), "holds no whole number above 0 as llama.att"),
        (numbered("llama.attention.head_count_kv", 3), "attn_k.weight in the shape 16 x 32"),
        (numbered("tokenizer.ggml.eos_token_id", 999), "has 999 as tokenizer.ggml.eos_token_id"),
        (lambda raw, _: raw.replace(b"gpt2", b"bert"), "is of the kind bert, gpt-2; only byte-l"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(
    damage: Callable[[bytes, int], bytes], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(speaking(tiny_llama()), path)
    raw = path.read_bytes()
    shape = b"blk.0.attn_q.weight" + struct.pack("<IQQ", 2, 32, 32)
    path.write_bytes(damage(raw, raw.index(shape) + len(shape)))
    with pytest.raises(PastaError, match=re.escape(message)) as caught:
        load_gguf(GgufFile(path), WholeModel(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@each_kind
def test_numbers_that_are_not_finite_are_found_by_the_scales(kind: GGMLQuantizationType) -> None:
    width, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (2000, 1, size), dtype=np.uint8)
    weights = [GgufTensor(block, kind, (1, width)) for block in blocks]
    with np.errstate(all="ignore"):
        assert {weight.is_finite() for weight in weights} == {True, False}
        for weight in weights:
            assert weight.is_finite() == bool(weight[:].isfinite().all())


def test_a_number_format_that_cannot_be_read_is_named() -> None:
    weight = GgufTensor(np.zeros((2, 66), np.uint8), GGMLQuantizationType.Q8_K, (2, 256))
    with pytest.raises(PastaError, match="weights of the kind Q8_K cannot be read"):
        weight[:]


# Writing


@pytest.mark.parametrize("file_type", ["F16", "BF16"])
def test_matrices_are_halved_and_vectors_stay(
    file_type: str, loaded: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(loaded, path, float_type=file_type)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == file_type
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert "output.weight" not in kinds  # tied


def test_llama_scaling_has_its_own_tensor(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, **ROPES["llama3"]}
    model = tiny_llama(rope_parameters=rope)
    write_gguf(speaking(model), tmp_path / "tiny.gguf")
    factors = GgufFile(tmp_path / "tiny.gguf").tensors["rope_freqs.weight"][:].numpy()
    plain = 10_000.0 ** -(np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(plain / factors, model.model.rotary_emb.inv_freq, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "file_type", "message"),
    [
        (GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4)), "F16",
         "cannot export gpt2 models to GGUF, only llama, q"),
        (tiny_llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
         "F16", "cannot export rotary positions of type 'yarn' to GGUF, only default, llama3"),
        (tiny_llama(), "Q4_K_M", "Q4_K_M wants rows of a multiple of 256 numbers, but those of "),
        (tiny_llama(), "Q6_K", "Q6_K wants rows of a multiple of 256 numbers, but those of "),
    ],
)  # fmt: skip
def test_what_has_no_translation_is_refused_and_leaves_nothing(
    model: Any, file_type: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(PastaError, match=message):
        export_gguf(
            replace(speaking(tiny_llama()), model=model),
            tmp_path / "x.gguf",
            file_type,
            quantize=lambda *_: pytest.fail("nothing is to be quantised"),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_merged_folder_needs_no_base_and_may_be_read_by_whom_its_maker_allows(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        export_hf(loaded, tmp_path / "merged")
    finally:
        os.umask(before)
    paths = list((tmp_path / "merged").rglob("*"))
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in paths}
    assert modes == {(False, 0o640), (True, 0o750)}
    again = load_model(WholeModel(tmp_path / "merged"))
    assert again.checkpoint == loaded.checkpoint
    for name, weight in loaded.model.state_dict().items():
        np.testing.assert_array_equal(again.model.state_dict()[name], weight)
    with pytest.raises(PastaError, match="exists"):
        export_hf(loaded, tmp_path / "merged")


def test_the_cache_tells_checkpoints_and_types_apart(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint.base
    adapter = tiny_checkpoint.adapter
    other = make_adapter(base, tmp_path / "other", seed=1)
    sources = (BaseWithAdapter(base, adapter), BaseWithAdapter(base, other))
    names = {cached_name(source, dtype) for source in sources for dtype in ("F16", "Q4_0")}
    assert len(names) == 4
    assert cached_name(BaseWithAdapter(base, adapter), "F16") in names


LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_a_folders_settings_tell_whether_there_is_a_translation(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_checkpoint.base, tmp_path / "base")
    for file, change, expected in (
        ("config.json", {}, True),
        ("config.json", {"model_type": "gemma3_text"}, False),
        ("config.json", {"hidden_act": "gelu"}, False),
        ("config.json", {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, False),
        ("config.json", {"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, False),
        ("config.json", {"rope_parameters": None, "rope_scaling": LLAMA3}, True),
        ("tokenizer.json", {"model": {"type": "BPE", "byte_fallback": True}}, False),
    ):
        before = (base / file).read_text()
        (base / file).write_text(json.dumps(json.loads(before) | change))
        assert has_translation(base) is expected, change
        (base / file).write_text(before)
    (base / "tokenizer.json").unlink()
    assert not has_translation(base)


@pytest.mark.llama
@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q6_K"])
def test_k_quants_are_written_where_the_rows_allow_them(file_type: str, tmp_path: Path) -> None:
    from pasta_decoding.engines.llama import LlamaEngine, quantize

    wide = tiny_llama(hidden_size=256, intermediate_size=512, head_dim=64)
    export_gguf(speaking(wide), tmp_path / "x.gguf", file_type, quantize=quantize)
    assert LlamaEngine(tmp_path / "x.gguf", cache_tokens=256).name == f"llama {file_type}"
