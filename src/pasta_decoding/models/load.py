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

    model: an `ModelStub` where an engine loads the weights itself.
    eos_ids: ids that end an answer.
    warning: what a user should know of this pair of model and adapter; None if there is nothing.
    added: what an adapter adds to layers, where it is not merged.
    """

    model: Any
    tokenizer: Any
    checkpoint: Checkpoint
    eos_ids: frozenset[int]
    warning: str | None = None
    added: LayerUpdates = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The id behind an answer whose end nobody chose. Raises PastaError if there is none."""
        if not self.eos_ids:
            raise PastaError("the model names no token that ends an answer")
        own = (template_end(self.tokenizer), self.tokenizer.eos_token_id)
        return next((one for one in own if one in self.eos_ids), min(self.eos_ids))


# Where they are computed


def default_device() -> str:
    """Return the first GPU, or "cpu" if there is none."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def native_dtype(device: str) -> str:
    """Return "bfloat16" where `device` computes in it, else "float32". Any GPU counts as one."""
    import torch

    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    native = device != "cpu" or capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return "bfloat16" if native else "float32"


# Loading. All raise PastaError for a broken, foreign or mismatched checkpoint.


def load_base(source: ModelSource, *, dtype: str = "float32", **settings: Any) -> LoadedModel:
    """Load a model with room for the tokens of an adapter, which is not put on it yet.

    Without an adapter the control tokens are there to be banned: the model can only be decoded
    sequentially.

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
        return replace(stub, model=model, added={})
    record = _record_of(source)  # a broken one is refused before weights load
    tokenizer = load_tokenizer(path)
    settings["config"] = load_config(path)
    model = from_pretrained(transformers.AutoModelForCausalLM, path, path, settings)
    ends = eos_ids(model.generation_config.eos_token_id, tokenizer)
    loaded = checked(model, tokenizer, ends, record, path.name)
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
    """Read all of a GGUF but its weights, which stay in the file, and what an adapter adds to them.

    file: that of `source.weights`. If `pasta export` wrote it, it is a whole model.
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
        loaded = checked(model, tokenizer, ends, record, path.stem)
    if max(loaded.checkpoint.control.ids) >= model.config.vocab_size:
        raise PastaError(f"{path} has no spare tokens, which the language's tags need")
    if isinstance(source, BaseWithAdapter):
        return replace(loaded, added=read_layer_updates(file.weights, source.adapter))
    return loaded


def load_metadata(source: ModelSource) -> LoadedModel:
    """Load all but the weights; the config counts the adapter's added tokens.

    It cannot check which model a server has.
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
    loaded = checked(ModelStub(config, {}), tokenizer, ends, record, path.name)
    if record is not None:  # a base model that is served as it is has no tokens added
        config.vocab_size = max(config.vocab_size, max(loaded.checkpoint.control.ids) + 1)
    return loaded


def _record_of(source: ModelSource) -> Checkpoint | None:
    return None if source.checkpoint_path is None else read_checkpoint(source.checkpoint_path)


def checked(
    model: Any, tokenizer: Any, ends: frozenset[int], record: Checkpoint | None, name: str
) -> LoadedModel:
    """Let the tokenizer learn the control tokens. Raises PastaError for another model's record."""
    if record is None:
        control = choose_tokens(tokenizer)
        described = checkpoints.describe(model, tokenizer, control, name=name)
        return LoadedModel(model, tokenizer, replace(described, joins=()), ends)
    add_missing_tokens(tokenizer, record.token_texts)
    warning = checkpoints.check_match(record, model, tokenizer)
    return LoadedModel(model, tokenizer, record, ends, warning)


def eos_ids(named: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end an answer, by a model's settings, tokenizer and chat template."""
    listed = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    found = [one for one in (*listed, template_end(tokenizer)) if one is not None]
    for one in found:
        if not isinstance(one, int) or not 0 <= one < len(tokenizer):
            raise PastaError(f"the settings end answers with {one!r}, which is no token's id")
    return frozenset(found)
