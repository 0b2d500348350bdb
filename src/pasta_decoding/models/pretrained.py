"""What transformers loads from the folders of other people."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.gguf_file import GgufFile
from pasta_decoding.models.gguf_reader import read_tokenizer

_LOADING: dict[str, Any] = {
    "trust_remote_code": False,
    "output_loading_info": True,
    "key_mapping": {  # where the text model is a part of one that also sees images
        r"^language_model\.lm_head\.": "lm_head.",
        r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
    },
}


def from_pretrained(kind: Any, source: Path, folder: Path | None, settings: dict[str, Any]) -> Any:
    """Return a model of this class. Raises PastaError for weights that do not fit it."""
    with errors_as(f"the model in {source} cannot be loaded", Exception):
        model, told = kind.from_pretrained(folder, **settings, **_LOADING)
        layers = f"{model.base_model_prefix}.layers."
        beyond = [name for name in told["unexpected_keys"] if name.startswith(layers)]
        for what, names in (("misses", told["missing_keys"]), ("has no place for", beyond)):
            if names:
                raise ValueError(f"it {what} {min(names)} (tensors in all: {len(names)})")
    try:
        own = model.generation_config
        own.validate(strict=True)
    except ValueError:  # such as a temperature where nothing is sampled: it is never saved
        tokens = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id")}
        model.generation_config = type(own)(**tokens)
    # A file with a head of its own counts, whatever the settings say.
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = head is None or head.weight is embeddings.weight
    vars(model).pop("_weight_conversions", None)  # it is saved by its own names for weights
    return model


def load_config(folder: Path) -> Any:
    """Return the settings of a model; of one that also sees images, those of its text model."""
    from transformers import AutoConfig

    with errors_of("settings", folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config()
        for name in ("eos_token_id", "quantization_config", "tie_word_embeddings"):
            if (value := getattr(config, name, None)) is not None:
                setattr(text, name, value)
        return text


def load_tokenizer(base: Path) -> Any:
    """Load the tokenizer of a model's folder or GGUF file alone, without its weights."""
    from transformers import AutoTokenizer

    if base.suffix == ".gguf":
        return read_tokenizer(GgufFile(base))
    with errors_of("tokenizer", base):
        tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        tokenizer.encode("")  # reads settings that loading does not
        return tokenizer


def errors_of(what: str, folder: Path) -> AbstractContextManager[None]:
    """Name the folder in whatever a library raises for the files of somebody else."""
    if not folder.exists():
        raise PastaError(f"{folder} is neither a folder nor a name on the hub, OWNER/NAME")
    if (folder / "adapter_config.json").is_file():
        raise PastaError(f"{folder} holds an adapter, not a model: name it with --adapter")
    if not (folder / "config.json").is_file():
        raise PastaError(f"{folder} holds no model")
    return errors_as(f"the {what} in {folder} cannot be loaded", Exception)
