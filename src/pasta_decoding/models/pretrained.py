"""Models, configs and tokenizers that transformers loads from folders."""

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
    "key_mapping": {  # for a text model that is a part of one that also sees images
        r"^language_model\.lm_head\.": "lm_head.",
        r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
    },
}


def from_pretrained(
    model_class: Any, source: Path, folder: Path | None, settings: dict[str, Any]
) -> Any:
    """Return a model of this class. Raises PastaError for weights that do not fit it.

    source:   the name for error messages.
    folder:   of the weights; None if `settings` have them as a `state_dict`.
    settings: of transformers' `from_pretrained`.
    """
    with errors_as(f"the model in {source} cannot be loaded", Exception):
        model, loading = model_class.from_pretrained(folder, **settings, **_LOADING)
        layers = f"{model.base_model_prefix}.layers."
        surplus = [name for name in loading["unexpected_keys"] if name.startswith(layers)]
        for problem, names in (("misses", loading["missing_keys"]), ("has no place for", surplus)):
            if names:
                raise ValueError(f"it {problem} {min(names)} (tensors in all: {len(names)})")
    _drop_invalid_generation_config(model)
    # A head in the file counts, whatever the settings say of tied weights.
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    model.config.tie_word_embeddings = head is None or head.weight is embeddings.weight
    # Without these, transformers saves weights by its own names.
    vars(model).pop("_weight_conversions", None)
    return model


def _drop_invalid_generation_config(model: Any) -> None:
    """Keep only the tokens of settings that transformers refuses to save.

    An example is a temperature where nothing is sampled.
    """
    config = model.generation_config
    try:
        config.validate(strict=True)
    except ValueError:
        model.generation_config = type(config)(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id
        )


def load_config(folder: Path) -> Any:
    """Return the config of a model; of one that also sees images, that of its text model."""
    from transformers import AutoConfig

    with errors_of("settings", folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text_config = config.get_text_config()
        for name in ("eos_token_id", "quantization_config", "tie_word_embeddings"):
            value = getattr(config, name, None)
            if value is not None:
                setattr(text_config, name, value)
        return text_config


def load_tokenizer(base: Path) -> Any:
    """Load the tokenizer of a model's folder or GGUF file, without the weights."""
    from transformers import AutoTokenizer

    if base.suffix == ".gguf":
        return read_tokenizer(GgufFile(base))
    with errors_of("tokenizer", base):
        tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        tokenizer.encode("")  # reads settings that loading does not
        return tokenizer


def errors_of(part: str, folder: Path) -> AbstractContextManager[None]:
    """Turn every error of the block into a PastaError that names `part` and `folder`.

    Raises PastaError at once for a path that is no model's folder.
    """
    if not folder.exists():
        raise PastaError(f"{folder} is neither a folder nor a name on the hub, OWNER/NAME")
    if (folder / "adapter_config.json").is_file():
        raise PastaError(f"{folder} holds an adapter, not a model: name it with --adapter")
    if not (folder / "config.json").is_file():
        raise PastaError(f"{folder} holds no model")
    return errors_as(f"the {part} in {folder} cannot be loaded", Exception)
