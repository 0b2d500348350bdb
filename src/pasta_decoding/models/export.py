"""Exports for other programs: one GGUF file for llama.cpp, or a merged Hugging Face folder.

A program that does not know the language would sample control tokens and never write the chunks
that they promise. So the exported settings ban these tokens, and the model answers sequentially.
Pasta itself does not read the bans.
"""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import written_whole
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.catalog import ModelSource
from pasta_decoding.models.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from pasta_decoding.models.gguf_writer import FLOAT_TYPES, write_gguf
from pasta_decoding.models.load import LoadedModel

FORMAT = 1
"""A part of names in the cache. A change of exports raises it, so that no older file is used."""

Quantize = Callable[[Path, Path, str], None]
"""(GGUF in F32, GGUF to write, file type): llama.cpp's own quantiser."""

CARD = "README.md"
RECIPE = "custom_generate"
"""Where transformers looks for the way in which a model wants to be decoded."""
_TAGS = ("pasta-decoding", "parallel-decoding", RECIPE)
_RELATIVE_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)[^)]*\)")


def export_gguf(loaded: LoadedModel, target: Path, file_type: str, *, quantize: Quantize) -> None:
    """Write a merged checkpoint as one GGUF file, complete or not at all.

    Raises PastaError for a number format that the model's shapes do not allow. llama.cpp would
    silently take another format for these matrices.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[file_type.removesuffix("_M")]]
    for name, weight in loaded.model.named_parameters():
        if weight.ndim > 1 and weight.shape[-1] % block:
            raise PastaError(
                f"{file_type} wants rows of a multiple of {block} numbers, but those of {name} "
                f"have {weight.shape[-1]}"
            )
    with _written_whole(target) as partial:
        if file_type in FLOAT_TYPES:
            write_gguf(loaded, partial, float_type=file_type)
            return
        plain = partial.with_name(f"{partial.name}.f32")
        write_gguf(loaded, plain, float_type="F32")
        quantize(plain, partial, file_type)


def export_hf(loaded: LoadedModel, target: Path, *, adapter: Path | None = None) -> None:
    """Write a merged checkpoint as a Hugging Face folder, `pasta.json` and model card included.

    adapter: the folder of the adapter that was merged. Its card has figures, data and licence.
    """
    if target.exists():
        raise PastaError(f"{target} exists")
    with _written_whole(target) as partial:
        loaded.model.save_pretrained(partial)
        write_beside_weights(loaded, partial, adapter)


def cached_name(source: ModelSource, form: str) -> str:
    """Return the name, without a suffix, under which the cache keeps a model in another form.

    form: its number format. Raises PastaError for a folder that holds no `pasta.json`.
    """
    paths = [source.weights]
    if source.checkpoint_path is not None:
        read_checkpoint(source.checkpoint_path)  # raises for a folder that has none
        paths = [source.checkpoint_path, source.weights]
    digest = hashlib.sha256(f"{FORMAT} {form}".encode())
    for path in paths:
        for file in _checkpoint_files(path):
            state = file.stat()
            digest.update(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode())
    return f"{paths[0].resolve().name}-{digest.hexdigest()[:12]}-{form}"


def _checkpoint_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted([*path.glob("*.safetensors"), *path.glob("*.bin"), *path.glob("*.json")])


@contextmanager
def _written_whole(target: Path) -> Iterator[Path]:
    from safetensors import SafetensorError  # also of a full disk

    with errors_as(f"cannot write {target}", OSError, SafetensorError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as partial:
            yield partial


def write_beside_weights(loaded: LoadedModel, folder: Path, adapter: Path | None = None) -> None:
    """Write tokenizer, settings, card and `pasta.json` of a merged checkpoint: all but weights.

    adapter: the folder of the adapter that was merged, whose card may be read.
    """
    loaded.tokenizer.save_pretrained(folder)
    settings = copy.deepcopy(loaded.model.generation_config)
    settings.suppress_tokens = sorted(loaded.checkpoint.control.ids)
    settings.eos_token_id = sorted(loaded.eos_ids)
    settings.save_pretrained(folder)
    (folder / CARD).write_text(model_card(loaded.checkpoint, adapter), encoding="utf-8")
    (folder / RECIPE).mkdir()
    shutil.copyfile(Path(__file__).with_name(f"{RECIPE}.txt"), folder / RECIPE / "generate.py")
    (folder / RECIPE / "requirements.txt").write_text("pasta-decoding\n", encoding="utf-8")
    write_checkpoint(checkpoints.describe_merged(loaded.model, loaded.checkpoint), folder)


def model_card(checkpoint: Checkpoint, adapter: Path | None = None) -> str:
    """Return the README.md of a merged folder: its use, and the card of the adapter.

    Raises PastaError if the adapter's card cannot be read.
    """
    from huggingface_hub import ModelCard, ModelCardData

    metadata = ModelCardData()
    adapter_card = ""
    if adapter is not None and (adapter / CARD).is_file():
        with errors_as(f"{adapter / CARD} cannot be read", Exception):  # of YAML and the hub client
            card = ModelCard.load(adapter / CARD)
        metadata = card.data
        adapter_card = _RELATIVE_LINK.sub(r"\1", card.text).strip()
    base = checkpoint.base.name
    is_on_hub = base.count("/") == 1 and not base.startswith((".", "/", "~"))
    metadata.tags = list(_TAGS)
    metadata.library_name = "transformers"
    metadata.pipeline_tag = "text-generation"
    metadata.base_model = base if is_on_hub else None
    return ModelCard.from_template(
        metadata,
        str(Path(__file__).with_name("model_card.md")),
        base=base,
        scheme=checkpoint.scheme,
        joins=" and ".join(f"`{join}`" for join in checkpoint.joins) or "none",
        ids=", ".join(map(str, sorted(checkpoint.control.ids))),
        insist="" if "text" in checkpoint.joins else " --join text",
        adapter_card=adapter_card,
    ).content
