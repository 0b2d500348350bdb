"""From the files of a base model and an adapter to one model that speaks the language."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pasta_decoding.errors import PastaError
from pasta_decoding.gguf_file import GgufFile
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.adapter import LayerUpdates, merge_adapter, read_layer_updates
from pasta_decoding.models.catalog import BaseWithAdapter, ModelSource, WholeModel
from pasta_decoding.models.checkpoint import (
    Checkpoint,
    ModelStub,
    add_missing_tokens,
    choose_tokens,
    read_checkpoint,
)
from pasta_decoding.models.gguf_reader import read_config, read_ends, read_tokenizer
from pasta_decoding.models.pretrained import errors_of, from_pretrained, load_config, load_tokenizer
from pasta_decoding.models.template import template_end


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its adapter merged in, float32 by default, and its tokenizer.

    model:   a `ModelStub` where an engine loads the weights itself.
    eos_ids: ids that end an answer.
    warning: a sentence for the user on this pair of model and adapter, or None.
    layer_updates: those of an adapter that is not merged.
    """

    model: Any
    tokenizer: Any
    checkpoint: Checkpoint
    eos_ids: frozenset[int]
    warning: str | None = None
    layer_updates: LayerUpdates = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The id to put after an answer that the model did not end itself.

        Raises PastaError if there is none.
        """
        if not self.eos_ids:
            raise PastaError("the model names no token that ends an answer")
        for token in (template_end(self.tokenizer), self.tokenizer.eos_token_id):
            if token in self.eos_ids:
                return int(token)
        return min(self.eos_ids)


# Devices


def default_device() -> str:
    """Return the first GPU, or "cpu" if there is none."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def native_dtype(device: str) -> str:
    """Return "bfloat16" if `device` computes in it, else "float32". Every GPU is taken to do so."""
    import torch

    if device != "cpu":
        return "bfloat16"
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    is_native = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return "bfloat16" if is_native else "float32"


# Loading. All raise PastaError for a broken, foreign or mismatched checkpoint.


def load_base(source: ModelSource, *, dtype: str = "float32", **settings: Any) -> LoadedModel:
    """Load a model without its adapter, but with rows for the control tokens.

    A base model alone has control tokens so that decoding can ban them: it answers sequentially.

    dtype:    a name of torch's, or "auto" for that of a folder's files.
    settings: of `from_pretrained`.
    """
    import torch
    import transformers

    path = source.weights
    settings |= {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if path.suffix == ".gguf":
        file = GgufFile(path)
        stub = load_gguf(file, source)
        if file.frequency_factors is not None:
            raise PastaError(f"{path} scales its rotary positions: only the engine fast reads it")
        model_class = getattr(transformers, stub.model.config.architectures[0])
        # Each weight is dequantised when it is asked for.
        settings |= {"config": stub.model.config, "state_dict": file.weights}
        model = from_pretrained(model_class, path, None, settings)
        model.name_or_path = model.config.name_or_path = ""  # peft looks "None" up on the hub
        return replace(stub, model=model, layer_updates={})
    record = _record_of(source)  # a broken one is refused before weights load
    tokenizer = load_tokenizer(path)
    settings["config"] = load_config(path)
    model = from_pretrained(transformers.AutoModelForCausalLM, path, path, settings)
    ends = eos_ids(model.generation_config.eos_token_id, tokenizer)
    loaded = matched_model(model, tokenizer, ends, record, path.name)
    rows = max(loaded.checkpoint.control.ids) + 1
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows)
    return loaded


def load_model(source: ModelSource, *, dtype: str = "float32") -> LoadedModel:
    """Load a model and merge its adapter."""
    import torch

    loaded = load_base(source, dtype=dtype)
    for name, weight in loaded.model.named_parameters():
        if not weight.sum(dtype=torch.float32).isfinite():
            raise PastaError(
                f"the model in {source.weights} has numbers that are not finite, in {name}"
            )
    if isinstance(source, BaseWithAdapter):
        merge_adapter(loaded.model, source.adapter)
    return loaded


def load_gguf(file: GgufFile, source: ModelSource) -> LoadedModel:
    """Read the tokenizer, the config and the checkpoint of a GGUF; its weights stay in the file.

    An adapter is not merged: its updates are read. `file` is that of `source.weights`.
    """
    path = file.path
    record_text = file.fields.get(checkpoints.GGUF_KEY)
    model = ModelStub(read_config(file), file.weights)
    tokenizer = read_tokenizer(file)
    if record_text is not None and not isinstance(source, WholeModel):
        raise PastaError(f"{path} holds an adapter already: name no other one beside it")
    ends = eos_ids(read_ends(file), tokenizer)
    if record_text is not None:
        checkpoint = checkpoints.from_json(record_text, str(path))
        loaded = LoadedModel(model, tokenizer, checkpoint, ends)
    else:
        record = read_checkpoint(source.adapter) if isinstance(source, BaseWithAdapter) else None
        loaded = matched_model(model, tokenizer, ends, record, path.stem)
    if max(loaded.checkpoint.control.ids) >= model.config.vocab_size:
        raise PastaError(f"{path} has no spare tokens, which the language's tags need")
    if isinstance(source, BaseWithAdapter):
        updates = read_layer_updates(file.weights, source.adapter)
        return replace(loaded, layer_updates=updates)
    return loaded


def load_metadata(source: ModelSource) -> LoadedModel:
    """Load all but the weights, for a model that a server has. The config counts added tokens.

    It cannot check which model the server has.
    """
    from transformers import GenerationConfig

    path = source.weights
    if path.suffix == ".gguf":
        return load_gguf(GgufFile(path), source)
    record = _record_of(source)
    tokenizer = load_tokenizer(path)
    config = load_config(path)
    with errors_of("settings", path):
        has_settings = (path / "generation_config.json").is_file()
        settings = GenerationConfig.from_pretrained(path) if has_settings else config
    ends = eos_ids(settings.eos_token_id, tokenizer)
    loaded = matched_model(ModelStub(config, {}), tokenizer, ends, record, path.name)
    if record is not None:  # a base model that is served as it is has no tokens added
        config.vocab_size = max(config.vocab_size, max(loaded.checkpoint.control.ids) + 1)
    return loaded


def _record_of(source: ModelSource) -> Checkpoint | None:
    return None if source.checkpoint_path is None else read_checkpoint(source.checkpoint_path)


def matched_model(
    model: Any, tokenizer: Any, ends: frozenset[int], record: Checkpoint | None, name: str
) -> LoadedModel:
    """Return a model with the checkpoint that was trained on it.

    The tokenizer gets the control tokens. Raises PastaError for the checkpoint of another model.

    record: None for a base model alone.
    name:   what a base model alone is called.
    """
    if record is None:
        control = choose_tokens(tokenizer)
        description = checkpoints.describe(model, tokenizer, control, name=name)
        return LoadedModel(model, tokenizer, replace(description, joins=()), ends)
    add_missing_tokens(tokenizer, record.token_texts)
    warning = checkpoints.check_match(record, model, tokenizer)
    return LoadedModel(model, tokenizer, record, ends, warning)


def eos_ids(setting: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end an answer, by a model's settings, tokenizer and chat template.

    setting: the setting `eos_token_id`: an id, a list of ids and None, or None.
    """
    ends = list(setting) if isinstance(setting, list) else [setting]
    ends += [tokenizer.eos_token_id, template_end(tokenizer)]
    ids = [end for end in ends if end is not None]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < len(tokenizer):
            raise PastaError(f"the settings end answers with {token!r}, which is no token's id")
    return frozenset(ids)
