"""From a base model's folder and an adapter's to one plain model that speaks the language."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pasta_decoding.errors import PastaError
from pasta_decoding.files import sha256
from pasta_decoding.gguf_file import GgufFile
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.adapter import LayerUpdates, merge_adapter, read_layer_updates
from pasta_decoding.models.bases import BASES, DEFAULT_MODEL
from pasta_decoding.models.checkpoint import (
    FILE_NAME,
    Checkpoint,
    ModelStub,
    add_missing_tokens,
    choose_tokens,
    read_checkpoint,
)
from pasta_decoding.models.pretrained import errors_of, from_pretrained, load_config, load_tokenizer
from pasta_decoding.models.template import template_end

DEFAULT_ADAPTER = BASES[DEFAULT_MODEL].adapter
SEQUENTIAL = "sequential"
"""The baseline of a shipped adapter: trained on many of the same responses, tags taken out."""
NO_ADAPTER = "none"
"""The base model as it is, in place of an adapter's name."""
_PACKAGE = Path(__file__).parents[1]
_SHIPPED = (_PACKAGE / "adapters", _PACKAGE.parents[1] / "adapters")


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


# Which files


def find_adapter(name: str) -> Path:
    """Return the folder of an adapter, given as its folder, its training run's, or by name."""
    path = Path(name)
    if path.is_dir():
        held = [one for one in (path, path / "adapter") if (one / FILE_NAME).is_file()]
        if not held and any((path / one).is_file() for one in ("metrics.jsonl", "prompts.jsonl")):
            raise PastaError(f"the training run in {path} is not finished: it holds no adapter yet")
        return held[0] if held else path
    for shipped in _SHIPPED:
        if (shipped / name / FILE_NAME).is_file():
            return shipped / name
    raise PastaError(f"no adapter {name!r}; {', '.join(shipped_adapters())} ship, or give a folder")


def shipped_adapters() -> list[str]:
    found = {path.parent.name for place in _SHIPPED for path in place.glob(f"*/{FILE_NAME}")}
    return sorted(found, key=lambda name: (name != DEFAULT_ADAPTER, name))


def known_base(adapter: str) -> str:
    """Return the name of the known base model that an adapter was trained on, or the default's."""
    name = base_name(None if adapter == NO_ADAPTER else find_adapter(adapter))
    return name if name in BASES else DEFAULT_MODEL


def base_name(adapter: Path | None) -> str:
    """Return the name of the base model that an adapter or a whole model was trained on."""
    if adapter is None:
        return DEFAULT_MODEL
    if adapter.suffix != ".gguf":
        hub = read_checkpoint(adapter).base.name
    else:
        own = GgufFile(adapter).fields.get(checkpoints.GGUF_KEY)
        hub = str(adapter) if own is None else checkpoints.from_json(own, "").base.name
    return next((one.name for one in BASES.values() if one.hub == hub), hub)


def is_whole(path: Path) -> bool:
    """Is it a base model and an adapter in one: a GGUF, or a folder as `export --to hf` writes?"""
    return holds_weights(path) and (path.suffix == ".gguf" or (path / FILE_NAME).is_file())


def holds_weights(adapter: Path) -> bool:
    """Does the path hold a whole model, and not only what an adapter changes?"""
    names = [one for one in ("adapter_config.json", "config.json") if (adapter / one).exists()]
    return names == ["config.json"] or adapter.suffix == ".gguf"


def adapter_digest(adapter: Path) -> str:
    if adapter.is_file():
        return sha256(adapter)[:16]
    digest = hashlib.sha256()
    for path in sorted([*adapter.glob("*.safetensors"), *adapter.glob("*.json")]):
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()[:16]


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


def load_base(
    base: Path, adapter: Path | None = None, *, dtype: str = "float32", **settings: Any
) -> LoadedModel:
    """Load a base model with room for the tokens of an adapter, which is not put on it yet.

    adapter:  a whole model takes the place of the base. Without one the control tokens are there
              to be banned: the model can only be decoded sequentially.
    dtype:    a name of torch's, or "auto" for that of a folder's files.
    settings: of `from_pretrained`.
    """
    import torch
    import transformers

    source = base if adapter is None or not holds_weights(adapter) else adapter
    settings |= {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if source.suffix == ".gguf":
        file = GgufFile(source)
        read = load_gguf(file, adapter)
        if file.frequency_factors is not None:
            raise PastaError(f"{source} scales its rotary positions: only the engine fast reads it")
        kind = getattr(transformers, read.model.config.architectures[0])
        # Each weight is dequantised when it is asked for.
        settings |= {"config": read.model.config, "state_dict": file.weights}
        model = from_pretrained(kind, source, None, settings)
        model.name_or_path = model.config.name_or_path = ""  # peft looks "None" up on the hub
        return replace(read, model=model, added={})
    record = None if adapter is None else read_checkpoint(adapter)  # refused before weights load
    tokenizer = load_tokenizer(source)
    settings["config"] = load_config(source)
    model = from_pretrained(transformers.AutoModelForCausalLM, source, source, settings)
    ends = eos_ids(model.generation_config.eos_token_id, tokenizer)
    loaded = checked(model, tokenizer, ends, record, source.name)
    rows = max(loaded.checkpoint.control.ids) + 1
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows)
    return loaded


def load_model(base: Path, adapter: Path | None, *, dtype: str = "float32") -> LoadedModel:
    """Load a model and merge its adapter."""
    import torch

    loaded = load_base(base, adapter, dtype=dtype)
    for name, weight in loaded.model.named_parameters():
        if not weight.sum(dtype=torch.float32).isfinite():
            raise PastaError(f"the model in {base} has numbers that are not finite, in {name}")
    if adapter is not None and not holds_weights(adapter):
        merge_adapter(loaded.model, adapter)
    return loaded


def load_gguf(file: GgufFile, adapter: Path | None) -> LoadedModel:
    """Read all of a GGUF but its weights, which stay in the file, and what an adapter adds to them.

    adapter: the file's own path if `pasta export` wrote it, with its adapter in it.
    """
    from pasta_decoding.models.gguf import read_config, read_ends, read_tokenizer

    path, own = file.path, file.fields.get(checkpoints.GGUF_KEY)
    model, tokenizer = ModelStub(read_config(file), file.weights), read_tokenizer(file)
    if own is not None and adapter != path:
        raise PastaError(f"{path} holds an adapter already: name no other one beside it")
    apart, ends = None if adapter == path else adapter, eos_ids(read_ends(file), tokenizer)
    if own is not None:
        loaded = LoadedModel(model, tokenizer, checkpoints.from_json(own, str(path)), ends)
    else:
        record = None if apart is None else read_checkpoint(apart)
        loaded = checked(model, tokenizer, ends, record, path.stem)
    if max(loaded.checkpoint.control.ids) >= model.config.vocab_size:
        raise PastaError(f"{path} has no spare tokens, which the language's tags need")
    return (
        loaded if apart is None else replace(loaded, added=read_layer_updates(file.weights, apart))
    )


def load_metadata(base: Path, adapter: Path | None) -> LoadedModel:
    """Load all but the weights; the config counts the adapter's added tokens.

    It cannot check which model a server has. `adapter` is `base` itself for a whole model.
    """
    from transformers import GenerationConfig

    if base.suffix == ".gguf":
        return load_gguf(GgufFile(base), adapter)
    record = None if adapter is None else read_checkpoint(adapter)
    tokenizer, config = load_tokenizer(base), load_config(base)
    with errors_of("settings", base):
        has_own = (base / "generation_config.json").is_file()
        settings = GenerationConfig.from_pretrained(base) if has_own else config
    ends = eos_ids(settings.eos_token_id, tokenizer)
    loaded = checked(ModelStub(config, {}), tokenizer, ends, record, base.name)
    if adapter is not None:  # a base model that is served as it is has no tokens added
        config.vocab_size = max(config.vocab_size, max(loaded.checkpoint.control.ids) + 1)
    return loaded


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
