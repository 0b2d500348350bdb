"""A checkpoint leaves Pasta: one GGUF file for llama.cpp, or a merged Hugging Face folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.card import AdapterCard, read_card
from pasta_decoding.models.gguf import FLOAT_TYPES, write_gguf
from pasta_decoding.models.loading import Loaded
from pasta_decoding.models.plain_tools import write_beside_weights

# Raised when the same checkpoint gives another file, so that older ones in the cache are not used.
FORMAT = 1

ROW_BLOCKS = {"Q8_0": 32, "Q4_0": 32, "Q6_K": 256, "Q5_K_M": 256, "Q4_K_M": 256}
"""Numbers that share a scale: a row of a matrix is a multiple of them."""

Quantize = Callable[[Path, Path, str], None]
"""(GGUF in F32, GGUF to write, file type): llama.cpp's own quantiser."""


def export_gguf(
    loaded: Loaded, target: Path, file_type: str, *, quantize: Quantize, progress: bool = False
) -> None:
    """Write a merged checkpoint as one GGUF file, whole or not at all.

    Raises PastaError for a number format that the model's shapes do not allow: llama.cpp would
    take another one for these matrices, and not say so.
    """
    _check_rows(loaded.model, file_type)
    with _written_whole(target) as partial:
        if file_type in FLOAT_TYPES:
            write_gguf(loaded, partial, float_type=file_type, progress=progress)
            return
        with TemporaryDirectory(dir=target.parent) as scratch:
            plain = Path(scratch) / "f32.gguf"
            write_gguf(loaded, plain, float_type="F32", progress=progress)
            quantize(plain, partial, file_type)


def _check_rows(model: Any, file_type: str) -> None:
    block = ROW_BLOCKS.get(file_type, 1)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and weight.shape[-1] % block:
            raise PastaError(
                f"{file_type} wants rows of a multiple of {block} numbers, but those of {name} "
                f"have {weight.shape[-1]}",
                hint="Choose F16 or BF16, or Q8_0 where rows are a multiple of 32.",
            )


def export_hf(loaded: Loaded, target: Path, *, adapter: Path | None = None) -> None:
    """Write a merged checkpoint as a Hugging Face folder, `pasta.json` and model card included.

    Its `generation_config.json` keeps plain tools from writing control tokens.

    adapter: the folder that was merged in, whose own card has the figures, the data, the licence.
    """
    known = AdapterCard() if adapter is None else read_card(adapter)
    if target.exists():
        raise PastaError(f"{target} exists", hint="Choose another -o, or remove it.")
    with _written_whole(target) as partial:
        loaded.model.save_pretrained(partial)
        loaded.tokenizer.save_pretrained(partial)
        settings = loaded.model.generation_config
        write_beside_weights(partial, loaded.checkpoint, settings, loaded.eos_ids, known)
        checkpoints.save(loaded.checkpoint, partial)


def cached_name(base: Path, adapter: Path | None, form: str) -> str:
    """Return the name under which the cache keeps this very checkpoint in another form.

    It has no suffix yet. `form` is its number format and whatever else sets it apart.
    """
    if adapter is not None:
        checkpoints.load(adapter)  # what is no checkpoint is told before
    digest = hashlib.sha256(f"{FORMAT} {form}".encode())
    for folder in (base,) if adapter is None else (adapter, base):
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
            state = path.stat()
            digest.update(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode())
    name = base.resolve().name if adapter is None else adapter.resolve().name
    return f"{name}-{digest.hexdigest()[:12]}-{form}"


@contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    """Give a path to write to; what is there at the end becomes `target` by one rename."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as partial:
            yield partial
    except OSError as error:
        raise PastaError(
            f"cannot write {target}: {error}", hint="Choose a folder with room that you may write."
        ) from error
