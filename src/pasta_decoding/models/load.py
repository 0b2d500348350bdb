"""From a base model's folder and an adapter's to one plain model that speaks the language.

An adapter is LoRA and trained token rows. They are merged here, to the bit as peft does it, so
decoding needs no peft, whose import takes longer than a short answer; and engines that add an
adapter beside the base's weights read it here, too.
Shapes: O and I outputs and inputs of a linear layer, R rank, T trained tokens.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError
from pasta_decoding.files import sha256
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.models.control_tokens import (
    add_missing_tokens,
    choose_tokens,
    grow_vocabulary,
)

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_ADAPTER = "balanced"
SEQUENTIAL = "sequential"
"""The baseline of the shipped adapters: trained on the same responses, tags taken out."""
NO_ADAPTER = "none"
"""The base model as it is, in place of an adapter's name."""
_PACKAGE = Path(__file__).parents[1]
_SHIPPED = (_PACKAGE / "adapters", _PACKAGE.parents[1] / "adapters")

_LORA = (".lora_A.weight", ".lora_B.weight")
_TOKENS = ".token_adapter.trainable_tokens_delta"
# What else an adapter may have; each changes what its weights mean.
_FOREIGN = (
    "use_dora", "use_bdlora", "use_qalora", "lora_bias", "fan_in_fan_out", "layer_replication",
    "modules_to_save", "rank_pattern", "alpha_pattern", "alora_invocation_tokens",
    "target_parameters", "megatron_config", "arrow_config", "kasa_config",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its adapter merged in, float32 unless told otherwise, and its tokenizer.

    model: None where an engine loads the weights itself.
    eos_ids: ids that end an answer.
    warning: what a user should know of this pair of model and adapter; None if there is nothing.
    """

    model: Any
    tokenizer: Any
    checkpoint: Checkpoint
    eos_ids: frozenset[int]
    warning: str | None = None

    @property
    def end(self) -> int:
        """The id behind an answer whose end nobody chose. Raises PastaError if there is none."""
        return answer_end(self.tokenizer, self.eos_ids)


def answer_end(tokenizer: Any, eos_ids: Collection[int]) -> int:
    """Return the one of `eos_ids` behind an answer that training shows: the tokenizer's own.

    Raises PastaError if there is none.
    """
    if not eos_ids:
        raise PastaError("the model's generation_config.json names no token that ends an answer")
    own: int | None = tokenizer.eos_token_id
    return own if own in eos_ids and own is not None else min(eos_ids)


def find_adapter(name: str) -> Path:
    """Return the folder of an adapter, given as its folder, its training run's, or by name."""
    path = Path(name)
    if path.is_dir():
        return _adapter_in(path)
    for shipped in _SHIPPED:
        if (shipped / name / checkpoints.FILE_NAME).is_file():
            return shipped / name
    raise PastaError(f"no adapter {name!r}; {', '.join(shipped_adapters())} ship, or give a folder")


def _adapter_in(folder: Path) -> Path:
    """Return the folder, or what it holds if it is that of a training run."""
    if (folder / checkpoints.FILE_NAME).is_file():
        return folder
    if (folder / "adapter" / checkpoints.FILE_NAME).is_file():
        return folder / "adapter"
    if any((folder / left).is_file() for left in ("metrics.jsonl", "prompts.jsonl")):
        raise PastaError(f"the training run in {folder} is not finished: it holds no adapter yet")
    return folder


def shipped_adapters() -> list[str]:
    """Return the names of the adapters that come with the package, the default one first."""
    found = {
        path.parent.name for place in _SHIPPED for path in place.glob(f"*/{checkpoints.FILE_NAME}")
    }
    return sorted(found, key=lambda name: (name != DEFAULT_ADAPTER, name))


def default_device() -> str:
    """Return the first GPU, or "cpu" if there is none."""
    if not may_have_gpu():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def may_have_gpu() -> bool:
    """Is there a driver that torch could compute with? Where there is none, torch is not asked.

    Its import takes longer than a short answer of the default model.
    """
    drivers = ("libcuda.so.1", "nvcuda.dll", "libamdhip64.so")
    return Path("/dev/kfd").exists() or any(map(_is_library, drivers))


def _is_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def native_dtype(device: str) -> str:
    """Return "bfloat16" where `device` computes in it, else "float32". Any GPU counts as one.

    Native bfloat16 does more than halve the memory traffic: a step of two threads then costs the
    same as a step of one, where float32 pays for the second thread.
    """
    import torch

    if device != "cpu":
        return "bfloat16"
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    native = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return "bfloat16" if native else "float32"


def adapter_digest(adapter: Path) -> str:
    """Return what tells an adapter from others: 16 hex digits over its weights and settings."""
    digest = hashlib.sha256()
    for path in sorted([*adapter.glob("*.safetensors"), *adapter.glob("*.json")]):
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()[:16]


def load_model(base: Path, adapter: Path | None, *, dtype: str = "float32") -> Loaded:
    """Load and merge. Raises PastaError for a broken, foreign or mismatched checkpoint.

    Without an adapter it is the base model, which can only be decoded sequentially.
    """
    loaded = _unmerged(base, adapter, dtype)
    if adapter is not None and not holds_weights(adapter):
        merge_adapter(loaded.model, adapter)
    return loaded


def load_apart(base: Path, adapter: Path | None) -> tuple[Loaded, dict[str, tuple[Any, Any]]]:
    """Load a model in the number format of its files, and what its adapter adds to its layers.

    That is down_RI and up_OR by a layer's name, as `read_added` has them, and empty where there is
    nothing to merge. Raises PastaError as `load_model` does.
    """
    loaded = _unmerged(base, adapter, "auto")
    if adapter is None or holds_weights(adapter):
        return loaded, {}
    return loaded, read_added(loaded.model, adapter)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What an adapter changes, by the names of layers.

    low_rank: down_RI and up_OR; `scale` times up @ down is added to the layer's weight.
    rows:     tokens, and the rows [T, I] that replace theirs in a table; a tied head shares them.
    """

    low_rank: dict[str, tuple[Tensor, Tensor]]
    rows: dict[str, tuple[list[int], Tensor]]
    scale: float


def read_adapter(folder: Path) -> AdapterWeights:
    """Read an adapter of the kind that Pasta trains. Raises PastaError for another, or no file."""
    with _adapter_errors(folder):
        from safetensors.torch import load_file

        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        foreign = [name for name in _FOREIGN if settings.get(name)]
        if settings["peft_type"] != "LORA" or settings.get("bias", "none") != "none" or foreign:
            said = ", ".join(foreign) or f"{settings['peft_type']}, bias {settings.get('bias')!r}"
            raise PastaError(
                f"the adapter is of a kind that Pasta does not merge ({said}); merge it with peft"
            )
        found = load_file(folder / "adapter_model.safetensors")
        weights = {name.removeprefix("base_model.model."): one for name, one in found.items()}
        for name in weights:
            if not name.endswith((*_LORA, _TOKENS)):
                raise KeyError(f"{name} has no place")
        layers = [n.removesuffix(_LORA[0]) for n in sorted(weights) if n.endswith(_LORA[0])]
        tables = [n.removesuffix(_TOKENS) for n in sorted(weights) if n.endswith(_TOKENS)]
        tokens = settings.get("trainable_token_indices") or {}
        rank = math.sqrt(settings["r"]) if settings.get("use_rslora") else settings["r"]
        return AdapterWeights(
            {n: (weights[n + _LORA[0]], weights[n + _LORA[1]]) for n in layers},
            {n: (tokens[n.rpartition(".")[2]], weights[n + _TOKENS]) for n in tables},
            float(settings["lora_alpha"] / rank),
        )


def merge_adapter(model: Any, folder: Path) -> Any:
    """Add the adapter in `folder` to the weights of `model`, in place; return it.

    LoRA's product (arXiv 2106.09685, equation 3) is computed in float32. Raises PastaError for an
    adapter that is broken, or does what Pasta's never do.
    """
    import torch

    adapter = read_adapter(folder)
    with _adapter_errors(folder), torch.no_grad():
        for layer, (down_RI, up_OR) in adapter.low_rank.items():
            weight = model.get_submodule(layer).weight.data
            weight += (up_OR.float() @ down_RI.float()) * adapter.scale
        for layer, (tokens, row_TI) in adapter.rows.items():
            table = model.get_submodule(layer).weight
            table.data.index_copy_(0, torch.tensor(tokens), row_TI.to(table))
    return model


def read_added(model: Any, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what the adapter adds to the linear layers of `model`, by their names.

    Each is down_RI and up_OR, whose product up @ down is to be added to the layer's weight. What
    trained tokens change in the output layer is of such a form, too: a rank for each of them.
    Raises PastaError as `merge_adapter` does.
    """
    import torch

    adapter = read_adapter(folder)
    with _adapter_errors(folder), torch.no_grad():
        added = {
            layer: (down_RI, up_OR.float() * adapter.scale)
            for layer, (down_RI, up_OR) in adapter.low_rank.items()
        }
        names = {module: name for name, module in model.named_modules()}
        head = model.get_output_embeddings()
        for layer, (tokens, row_TI) in adapter.rows.items():
            if model.get_submodule(layer).weight is head.weight:
                up_OT = torch.zeros(len(head.weight), len(tokens))
                up_OT[tokens, range(len(tokens))] = 1.0
                added[names[head]] = (row_TI.float() - head.weight[tokens].float(), up_OT)
        for layer, (down_RI, up_OR) in added.items():
            if (len(up_OR), down_RI.shape[1]) != tuple(model.get_submodule(layer).weight.shape):
                raise ValueError(f"{layer} has another shape")
    return added


@contextmanager
def _adapter_errors(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except PastaError:
        raise
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError,
            SafetensorError) as error:  # fmt: skip
        raise PastaError(f"the adapter in {folder} cannot be loaded: {error}") from error


def _unmerged(base: Path, adapter: Path | None, dtype: str) -> Loaded:
    """Load a model that knows its adapter's tokens, and has nothing else of the adapter yet."""
    if adapter is None:
        return _untrained(base, dtype)
    checkpoint = checkpoints.load(adapter)
    model, tokenizer = load_base(adapter if holds_weights(adapter) else base, dtype=dtype)
    add_missing_tokens(tokenizer, checkpoint.token_texts)
    warning = checkpoints.check_match(checkpoint, model, tokenizer)
    grow_vocabulary(model, checkpoint.control)
    return Loaded(model, tokenizer, checkpoint, eos_ids_of(model, tokenizer), warning)


def load_metadata(base: Path, adapter: Path | None) -> tuple[Loaded, int, int]:
    """Load all but the weights; return how many logits and positions the model has, too.

    Raises PastaError for a broken checkpoint or a foreign tokenizer. That it is served by whom it
    is thought to be cannot be told from here.
    """
    checkpoint = None if adapter is None else checkpoints.load(adapter)
    source = adapter if adapter is not None and holds_weights(adapter) else base
    tokenizer, config, generation = _load_configs(source)
    if checkpoint is None:
        control = choose_tokens(tokenizer)
        described = checkpoints.describe_config(config, base.name, norms_sha256="")
        checkpoint = replace(checkpoints.describe_on(described, tokenizer, control), joins=())
    else:
        add_missing_tokens(tokenizer, checkpoint.token_texts)
        ours = checkpoint.base
        checkpoints.check_base(
            checkpoint, checkpoints.describe_config(config, ours.name, ours.norms_sha256)
        )
        checkpoints.check_tokens(checkpoint, tokenizer)
    text = config.get_text_config()
    vocabulary_size = text.vocab_size
    if adapter is not None:  # a base model that is served as it is has no tokens added
        vocabulary_size = max(vocabulary_size, max(checkpoint.control.ids) + 1)
    loaded = Loaded(None, tokenizer, checkpoint, _listed_eos_ids(generation, tokenizer))
    return loaded, vocabulary_size, text.max_position_embeddings


def _load_configs(folder: Path) -> tuple[Any, Any, Any]:
    """Return tokenizer, configuration and generation settings of a model's folder."""
    from transformers import AutoConfig, GenerationConfig

    tokenizer = load_tokenizer(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        if (folder / "generation_config.json").is_file():
            return tokenizer, config, GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise PastaError(f"the settings in {folder} cannot be loaded: {error}") from error
    return tokenizer, config, config


def _untrained(base: Path, dtype: str) -> Loaded:
    """Load the base model alone. Its control tokens are there to be banned."""
    model, tokenizer = load_base(base, dtype=dtype)
    control = choose_tokens(tokenizer)
    checkpoint = checkpoints.describe(model, tokenizer, control, name=base.name)
    grow_vocabulary(model, control)
    return Loaded(model, tokenizer, replace(checkpoint, joins=()), eos_ids_of(model, tokenizer))


def is_whole(path: Path) -> bool:
    """Is it a base model and an adapter in one: a GGUF, or a folder as `export --to hf` writes?"""
    return path.suffix == ".gguf" or (
        (path / checkpoints.FILE_NAME).is_file() and holds_weights(path)
    )


def holds_weights(adapter: Path) -> bool:
    """Does the folder hold a whole model, and not only what an adapter changes?"""
    return not (adapter / "adapter_config.json").exists() and (adapter / "config.json").exists()


def eos_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end an answer of a loaded model."""
    return _listed_eos_ids(model.generation_config, tokenizer)


def _listed_eos_ids(settings: Any, tokenizer: Any) -> frozenset[int]:
    eos = settings.eos_token_id
    listed = eos if isinstance(eos, list) else [eos]
    return frozenset({tokenizer.eos_token_id, *listed} - {None})


def load_base(base: Path, *, dtype: str) -> tuple[Any, Any]:
    """Load a Hugging Face model and its tokenizer from a folder.

    dtype: a name of torch's, or "auto" for that of the files.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check_model_in(base)
    try:
        numbers = dtype if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=numbers)
        tokenizer = AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise PastaError(f"the model in {base} cannot be loaded: {error}") from error
    return model, tokenizer


def load_tokenizer(base: Path) -> Any:
    """Load the tokenizer of a model's folder alone, without its weights."""
    from transformers import AutoTokenizer

    _check_model_in(base)
    try:
        return AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError, KeyError) as error:
        raise PastaError(f"the tokenizer in {base} cannot be loaded: {error}") from error


def _check_model_in(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise PastaError(f"{folder} holds no model")
