"""`pasta.json`: the settings of training that decoding must match, and the base model's identity.

A promise is PROMISE_OPEN, the tokens of its topic, and a PROMISE_CLOSE. There is a PROMISE_CLOSE
for each length, so this token carries the length. Control tokens are spare ones of the vocabulary,
or added to it.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import written_whole
from pasta_decoding.lang.control import ADDED_PREFIX, BUCKETS, PARTS, SPARE_NAME, ControlTokens

FORMAT_VERSION = 1
FILE_NAME = "pasta.json"
GGUF_KEY = "pasta.checkpoint"
"""The metadata key under which a GGUF file has the text of its `pasta.json`."""
_JSON_KEYS = {"control": "binding"}
"""Fields of `Checkpoint` that have another name in the file."""
_BIASES = ("promise_bias", "sync_bias")


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """What tells one base model from another.

    norms_sha256: digest of all norm weights in bfloat16. Quantisers leave norms alone, so every
        copy of a model has the same digest. A finetuned sibling has another one.
    embeddings_sha256: digest of some embeddings in bfloat16, which quantisers do round. None in
        older records.
    """

    name: str
    model_type: str
    hidden_size: int
    layers: int
    vocabulary_size: int
    norms_sha256: str
    embeddings_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`pasta.json`: everything that decoding must agree on with training.

    token_texts: the tokenizer's text of each control token, by id. Another vocabulary differs.
    scheme:    the position scheme (`lang.positions`).
    joins:     the joins that training prepared; empty for a model that does not know the language.
    topic:     "required" or "none".
    eagerness: added to the promise's logit while decoding, unless a request has its own.
    promise_bias, sync_bias: learned with the weights, and always added to these tags' logits. The
        file has them only if they are not 0: older versions, which would not add them, refuse it.
    """

    base: BaseIdentity
    control: ControlTokens
    token_texts: Mapping[int, str]
    scheme: str = "shared-max"
    joins: tuple[str, ...] = ("kv",)
    topic: str = "required"
    eagerness: float = 0.0
    promise_bias: float = 0.0
    sync_bias: float = 0.0
    format_version: int = FORMAT_VERSION


def choose_tokens(tokenizer: Any) -> ControlTokens:
    """Choose control tokens: spare ones of the vocabulary, else tokens added to `tokenizer`."""
    count = len(BUCKETS) + PARTS
    vocabulary = tokenizer.get_vocab()
    ids = sorted(token for text, token in vocabulary.items() if SPARE_NAME.fullmatch(text))
    if len(ids) < count:
        texts = [f"{ADDED_PREFIX}{index}|>" for index in range(count)]
        _add_tokens(tokenizer, texts)
        ids = tokenizer.convert_tokens_to_ids(texts)
    promise_open, async_open, async_close, sync, *closes = ids[:count]
    buckets = dict(zip(BUCKETS, closes, strict=True))
    return ControlTokens(promise_open, buckets, async_open, async_close, sync)


def add_missing_tokens(tokenizer: Any, token_texts: Mapping[int, str]) -> None:
    """Add the control tokens of an adapter that its base model's tokenizer does not have.

    token_texts: those of the adapter's checkpoint. Other texts than `choose_tokens` adds stay out.
    """
    vocabulary = tokenizer.get_vocab()
    missing = [text for _, text in sorted(token_texts.items()) if text not in vocabulary]
    if missing and all(text.startswith(ADDED_PREFIX) for text in missing):
        _add_tokens(tokenizer, missing)


def _add_tokens(tokenizer: Any, texts: list[str]) -> None:
    added = {"additional_special_tokens": texts}
    tokenizer.add_special_tokens(added, replace_extra_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ModelStub:
    """The config and the weights by name of a model that is not built, for `describe_base`.

    weights: tensors, or weights of a GGUF file; empty where there are none.
    """

    config: Any
    weights: Mapping[str, Any]

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        return self.weights.items()


def describe_base(model: Any, name: str) -> BaseIdentity:
    """Return the identity of a base model, before an adapter is put on it.

    The digest of embeddings is of each 64th row in the second quarter of the vocabulary, where no
    control token is. A model without weights has no digests.
    """
    config = model.config
    weights = dict(model.named_parameters())
    text = config.get_text_config()
    size = text.vocab_size
    norms = [weights[name][:] for name in sorted(weights) if name.endswith("norm.weight")]
    rows = [
        table[size // 4 : size // 2 : 64]
        for name, table in weights.items()
        if name.endswith("embed_tokens.weight")
    ]
    return BaseIdentity(
        name=name,
        model_type=config.model_type,
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary_size=size,
        norms_sha256=_digest(norms) if norms else "",
        embeddings_sha256=_digest(rows) if rows else None,
    )


def describe(model: Any, tokenizer: Any, control: ControlTokens, *, name: str) -> Checkpoint:
    """Return the record to be saved beside an adapter trained on `model` with `control`."""
    texts = {token: tokenizer.convert_ids_to_tokens(token) for token in sorted(control.ids)}
    return Checkpoint(describe_base(model, name), control, texts)


def describe_merged(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    """Return the record of a merged model, whose vocabulary may have grown by control tokens."""
    base = checkpoint.base
    if model.config.vocab_size == base.vocabulary_size:
        return checkpoint
    return replace(checkpoint, base=describe_base(model, base.name))


def to_json(checkpoint: Checkpoint) -> str:
    record = {_JSON_KEYS.get(name, name): value for name, value in asdict(checkpoint).items()}
    for name in _BIASES:
        if not record[name]:
            del record[name]
    return json.dumps(record, indent=2) + "\n"


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write `pasta.json` into `folder`, complete or not at all; give the weights its file mode.

    Safetensors 0.8 lets only the owner read weights (safetensors/safetensors issue 782).
    """
    target = folder / FILE_NAME
    with written_whole(target) as partial:
        partial.write_text(to_json(checkpoint), encoding="utf-8")
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(target, weights)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read `pasta.json`. Raises PastaError if it is missing, broken or of another version."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise PastaError(f"{folder} holds no {FILE_NAME}: not a Pasta adapter")
    with errors_as(f"{path} cannot be read", OSError, ValueError):
        text = path.read_text(encoding="utf-8")
    return from_json(text, str(path))


def from_json(text: str, source: str) -> Checkpoint:
    """Parse the text of a `pasta.json`; error messages name `source`.

    Raises PastaError as `read_checkpoint` does.
    """
    with errors_as(f"{source} cannot be read", ValueError, RecursionError):
        record = json.loads(text)
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        message = f"{source} has format version {version!r}; this Pasta reads {FORMAT_VERSION}"
        raise PastaError(message)
    try:
        return _checkpoint(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{source} is incomplete or malformed: {error!r}"
        raise PastaError(message) from error


def check_match(checkpoint: Checkpoint, model: Any, tokenizer: Any) -> str | None:
    """Compare `checkpoint` with a loaded model; raise PastaError for another model or vocabulary.

    Returns a warning if training saw a copy of the model that is rounded otherwise, else None.
    """
    trained = checkpoint.base
    loaded = describe_base(model, trained.name)
    for field in fields(BaseIdentity):
        expected = getattr(trained, field.name)
        actual = getattr(loaded, field.name)
        if actual not in (expected, "") and field.name != "embeddings_sha256":
            raise PastaError(
                f"the adapter was trained on {trained.name} ({field.name} {expected}), "
                f"but this model has {field.name} {actual}"
            )
    for token, text in checkpoint.token_texts.items():
        actual = tokenizer.convert_ids_to_tokens(token)
        if actual != text:
            raise PastaError(
                f"control token {token} is {text!r} in the adapter, {actual!r} in the tokenizer"
            )
    digests = (trained.embeddings_sha256, loaded.embeddings_sha256)
    if None in digests or digests[0] == digests[1]:
        return None
    return (
        f"the adapter was trained on a copy of {trained.name} that is rounded otherwise: its "
        "answers may differ from those that were measured"
    )


def _checkpoint(record: dict[str, Any]) -> Checkpoint:
    """Return a checked `Checkpoint`. Raises a built-in exception for a malformed value."""
    parts = dict(record["binding"])
    closes = {int(size): token for size, token in parts.pop("promise_close").items()}
    control = ControlTokens(promise_close=dict(sorted(closes.items())), **parts)
    texts = {int(token): text for token, text in record["token_texts"].items()}
    topic = record["topic"]
    joins = record["joins"]
    scheme = record["scheme"]
    eagerness = record.get("eagerness", 0.0)
    biases = {name: record.get(name, 0.0) for name in _BIASES}
    keys = {_JSON_KEYS.get(field.name, field.name) for field in fields(Checkpoint)}
    unknown_keys = sorted(set(record) - keys)
    tokens = [*parts.values(), *closes.values()]
    invalid_tokens = [token for token in tokens if type(token) is not int or token < 0]
    is_valid_eagerness = isinstance(eagerness, int | float) and -100 <= eagerness <= 100
    strings = [*texts.values(), *joins, scheme]
    rules = {
        f"unknown keys {unknown_keys}": not unknown_keys,
        f"{invalid_tokens} are no token ids": not invalid_tokens,
        f"the length buckets are {sorted(closes)}": min(closes, default=0) > 0,
        "two parts of a tag share one control token": control.distinct,
        "token_texts does not tell the texts of the control tokens": set(texts) == control.ids,
        f"topic is {topic!r}, not 'required' or 'none'": topic in ("required", "none"),
        f"{joins!r} is not a list": isinstance(joins, list),
        f"one of {strings} is not a text": all(isinstance(text, str) for text in strings),
        f"eagerness is {eagerness!r}, not a number from -100 to 100": is_valid_eagerness,
    }
    for name, bias in biases.items():
        is_number = isinstance(bias, int | float) and math.isfinite(bias)
        rules[f"{name} is {bias!r}, not a number"] = is_number
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(rule)
    base = BaseIdentity(**record["base"])
    return Checkpoint(base, control, texts, scheme, tuple(joins), topic, eagerness, **biases)


def _digest(tensors: Iterable[Any]) -> str:
    """Return 16 digits that depend on all numbers of the tensors in bfloat16."""
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        raw = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()[:16]
