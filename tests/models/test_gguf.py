"""GGUF files: what is refused, what comes back, and that the weights mean the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from transformers import GPT2Config, GPT2LMHeadModel

from pasta_decoding.errors import PastaError
from pasta_decoding.models.export import cached_name, export_gguf, export_hf
from pasta_decoding.models.gguf import has_translation, read_metadata, write_gguf
from pasta_decoding.models.load import Loaded, load_model
from tests.checkpoint import TinyCheckpoint, make_adapter
from tests.engines.subjects import speaking
from tests.tiny import tiny_llama


def no_quantiser(source: Path, target: Path, file_type: str) -> None:
    raise AssertionError((source, target, file_type))


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: TinyCheckpoint) -> Loaded:
    return load_model(tiny_checkpoint.base, tiny_checkpoint.adapter)


def texts_of(path: Path) -> dict[str, str]:
    fields = GGUFReader(path).fields
    return {key: fields[key].contents() for key in fields if key.startswith("pasta.")}


def test_checkpoint_ends_and_tokenizer_come_back(loaded: Loaded, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(loaded, path)
    back = read_metadata(texts_of(path).get, path)
    assert (back.checkpoint, back.eos_ids) == (loaded.checkpoint, loaded.eos_ids)
    text = "It's 7 <|im_end|>\n\n  x"
    assert back.tokenizer.encode(text) == loaded.tokenizer.encode(text)
    assert back.tokenizer.chat_template == loaded.tokenizer.chat_template


@pytest.mark.parametrize("file_type", ["F16", "BF16"])
def test_matrices_are_halved_and_vectors_stay(
    file_type: str, loaded: Loaded, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(loaded, path, float_type=file_type)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == file_type
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert "output.weight" not in kinds  # tied


def test_llama_scaling_has_its_own_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = tiny_llama(rope_parameters=rope)
    write_gguf(speaking(model), tmp_path / "tiny.gguf")
    (factors,) = (
        tensor.data
        for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors
        if tensor.name == "rope_freqs.weight"
    )
    plain = 10_000.0 ** -(np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(plain / factors, model.model.rotary_emb.inv_freq, rtol=1e-6)


def test_an_architecture_without_a_translation_is_refused_by_name(tmp_path: Path) -> None:
    small = GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4)
    loaded = speaking(tiny_llama())
    gpt2 = Loaded(GPT2LMHeadModel(small), loaded.tokenizer, loaded.checkpoint, loaded.eos_ids)
    with pytest.raises(PastaError, match="cannot export gpt2 models to GGUF, only llama, q"):
        export_gguf(gpt2, tmp_path / "x.gguf", "F16", quantize=no_quantiser)
    assert list(tmp_path.iterdir()) == []


def test_rotary_positions_without_a_translation_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(PastaError, match="rotary positions of type 'yarn'"):
        write_gguf(speaking(tiny_llama(rope_parameters=rope)), tmp_path / "x.gguf")


def test_a_file_without_our_metadata_is_refused() -> None:
    with pytest.raises(PastaError, match=r"holds no pasta\.checkpoint") as caught:
        read_metadata(lambda _: None, Path("foreign.gguf"))
    assert "pasta export" in caught.value.hint


def test_a_failure_leaves_the_old_file_and_nothing_else(loaded: Loaded, tmp_path: Path) -> None:
    def full_disk(_source: Path, target: Path, _type: str) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "x.gguf").write_bytes(b"old")
    with pytest.raises(PastaError, match="No space left on device"):
        export_gguf(loaded, tmp_path / "x.gguf", "Q4_0", quantize=full_disk)
    assert (tmp_path / "x.gguf").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_a_merged_folder_loads_as_an_adapter_that_needs_no_base(
    loaded: Loaded, tmp_path: Path
) -> None:
    export_hf(loaded, tmp_path / "merged")
    again = load_model(tmp_path / "no-base", tmp_path / "merged")
    assert again.checkpoint == loaded.checkpoint
    for name, weight in loaded.model.state_dict().items():
        np.testing.assert_array_equal(again.model.state_dict()[name], weight)
    with pytest.raises(PastaError, match="exists"):
        export_hf(loaded, tmp_path / "merged")


def test_who_may_read_an_exported_folder_may_read_its_weights(
    loaded: Loaded, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        export_hf(loaded, tmp_path / "merged")
    finally:
        os.umask(before)
    paths = list((tmp_path / "merged").rglob("*"))
    modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in paths}
    assert modes == {(False, 0o640), (True, 0o750)}


def test_the_cache_tells_checkpoints_and_types_apart(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base, adapter = tiny_checkpoint.base, tiny_checkpoint.adapter
    other = make_adapter(base, tmp_path / "other", seed=1)
    names = {cached_name(base, a, t) for a in (adapter, other) for t in ("F16", "Q4_0")}
    assert len(names) == 4
    assert cached_name(base, adapter, "F16") in names


@pytest.mark.parametrize(
    ("file", "change", "known"),
    [
        ("config.json", {}, True),
        ("config.json", {"model_type": "gemma3_text"}, False),
        ("config.json", {"rope_parameters": {"rope_type": "yarn"}}, False),
        ("config.json", {"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, False),
        ("config.json", {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, True),
        ("config.json", {"rope_parameters": None}, True),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, False),
        ("tokenizer.json", {"model": {"type": "BPE", "byte_fallback": True}}, False),
        ("tokenizer.json", None, False),
    ],
)
def test_a_folders_settings_tell_whether_there_is_a_translation(
    file: str,
    change: dict[str, object] | None,
    known: bool,
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
) -> None:
    base = shutil.copytree(tiny_checkpoint.base, tmp_path / "base")
    if change is None:
        (base / file).unlink()
    else:
        found = json.loads((base / file).read_text())
        (base / file).write_text(json.dumps(found | change))
    assert has_translation(base) is known


@pytest.mark.llama
@pytest.mark.parametrize(("file_type", "name"), [("Q4_K_M", "Q4_K_M"), ("Q6_K", "Q6_K")])
def test_k_quants_are_written_where_the_rows_allow_them(
    file_type: str, name: str, tmp_path: Path
) -> None:
    from pasta_decoding.engines.llama import LlamaEngine
    from pasta_decoding.engines.llamacpp import quantize

    wide = tiny_llama(hidden_size=256, intermediate_size=512, head_dim=64)
    export_gguf(speaking(wide), tmp_path / "x.gguf", file_type, quantize=quantize)
    assert LlamaEngine(tmp_path / "x.gguf", cache_tokens=256).name == f"llama {name}"


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q5_K_M", "Q6_K"])
def test_k_quants_are_refused_where_llama_cpp_would_take_another_format(
    file_type: str, loaded: Loaded, tmp_path: Path
) -> None:
    with pytest.raises(PastaError, match=f"{file_type} wants rows of a multiple of 256") as caught:
        export_gguf(loaded, tmp_path / "x.gguf", file_type, quantize=no_quantiser)
    assert "have 32" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
