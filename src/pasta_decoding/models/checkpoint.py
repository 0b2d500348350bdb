"""Control tokens of one checkpoint, and `pasta.json`, which records all that decoding must match.

A promise is PROMISE_OPEN, topic tokens, and one PROMISE_CLOSE per length bucket, so the closing
token carries the length. The tokens are taken from those a vocabulary has to spare, or added.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pasta_decoding.errors import PastaError

FORMAT_VERSION = 1
BUCKETS = (20, 30, 40, 50, 60, 80, 100, 150, 200, 300)
FILE_NAME = "pasta.json"
KNOWN_WEIGHTS: Mapping[str | None, str] = {
    "475211d76f6e15ca": "dequantised Q4_1, as `pasta pull` fetches it",
}
"""What copies of models are, by the digest of their embeddings."""
_EMBEDDING_STRIDE = 64
_KEYS = {"control": "binding"}
"""Fields that the file knows under another name."""

# Vocabularies name their spare tokens by these patterns (Gemma, Llama 3) or these names (SmolLM2).
_SPARE = re.compile(r"<unused\d+>|<\|reserved_special_token_\d+\|>")
_ADDED_PREFIX = "<|pasta_"
_BROKEN_HINT = "Point --adapter at a folder that `pasta train sft` wrote, or train it again."
_SMOLLM2_SPARE = frozenset(
    {
        "<repo_name>",
        "<reponame>",
        "<file_sep>",
        "<filename>",
        "<gh_stars>",
        "<issue_start>",
        "<issue_comment>",
        "<issue_closed>",
        "<jupyter_start>",
        "<jupyter_text>",
        "<jupyter_code>",
        "<jupyter_output>",
        "<jupyter_script>",
        "<empty_output>",
    }
)


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Which token id plays which part of a tag; every id once.

    promise_close: length bucket in tokens -> id, ascending.
    """

    promise_open: int
    promise_close: Mapping[int, int]
    async_open: int
    async_close: int
    sync: int

    @property
    def ids(self) -> frozenset[int]:
        """All control-token ids."""
        single = (self.promise_open, self.async_open, self.async_close, self.sync)
        return frozenset((*single, *self.promise_close.values()))

    def bucket(self, tokens: int) -> int:
        """Return the next larger length bucket; beyond the largest, the largest."""
        return next(
            (size for size in self.promise_close if size >= tokens), max(self.promise_close)
        )

    def is_near(self, promised: int, tokens: int) -> bool:
        """Does a chunk of `tokens` fall into the bucket `promised`, or into one next to it?"""
        sizes = sorted(self.promise_close)
        return abs(sizes.index(self.bucket(tokens)) - sizes.index(promised)) <= 1

    def promised(self, close: int) -> int:
        """Return the length that the closing token `close` carries."""
        return next(size for size, token in self.promise_close.items() if token == close)


@dataclass(frozen=True, slots=True)
class Base:
    """What tells one base model from another.

    norms_sha256: digest of all norm weights in bfloat16. Quantisers leave norms alone, so every
        copy of a model has the same digest, and a finetuned sibling another.
    embeddings_sha256: digest of some embeddings in bfloat16, which quantisers do round: it tells
        rounded copies from the full-precision one. None in records of before it was kept.
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

    joins: those that it was trained for; none of a model that does not know the language.
    topic: "required" or "none".
    token_texts: id -> the text of that token in the tokenizer, to notice a foreign vocabulary.
    """

    base: Base
    control: ControlTokens
    token_texts: Mapping[int, str]
    scheme: str = "shared-max"
    joins: tuple[str, ...] = ("kv",)
    topic: str = "required"
    format_version: int = FORMAT_VERSION


def bind(tokenizer: Any) -> ControlTokens:
    """Choose control tokens: spare ones of the vocabulary, else tokens added to `tokenizer`."""
    wanted = len(BUCKETS) + 4
    spare = sorted(
        token
        for text, token in tokenizer.get_vocab().items()
        if _SPARE.fullmatch(text) or text in _SMOLLM2_SPARE
    )
    if len(spare) < wanted:
        names = [f"{_ADDED_PREFIX}{n}|>" for n in range(wanted)]
        _add_tokens(tokenizer, names)
        spare = tokenizer.convert_tokens_to_ids(names)
    promise_open, async_open, async_close, sync, *closes = spare[:wanted]
    buckets = dict(zip(BUCKETS, closes, strict=True))
    return ControlTokens(promise_open, buckets, async_open, async_close, sync)


def describe_base(model: Any, name: str, weights: Mapping[str, Any] | None = None) -> Base:
    """Return the identity of a loaded base model (before an adapter is put on it).

    weights: its parameters, where `model` itself holds only a shard of them.
    """
    parameters = weights or dict(model.named_parameters())
    described = describe_config(model.config, name, _norm_digest(parameters.items()))
    return replace(described, embeddings_sha256=_embedding_digest(parameters))


def describe_config(config: Any, name: str, norms_sha256: str) -> Base:
    """Return the identity of a base model whose weights are known by this digest."""
    return Base(
        name=name,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        vocabulary_size=config.vocab_size,
        norms_sha256=norms_sha256,
    )


def describe(model: Any, tokenizer: Any, control: ControlTokens, *, name: str) -> Checkpoint:
    """Return the record to be saved beside an adapter trained on `model` with `control`."""
    return describe_on(describe_base(model, name), tokenizer, control)


def describe_on(base: Base, tokenizer: Any, control: ControlTokens) -> Checkpoint:
    """Return the same for a base model that was described before."""
    texts = {token: tokenizer.convert_ids_to_tokens(token) for token in sorted(control.ids)}
    return Checkpoint(base, control, texts)


def to_json(checkpoint: Checkpoint) -> str:
    """Return the text of `pasta.json`."""
    record = asdict(checkpoint)
    return (
        json.dumps({_KEYS.get(name, name): value for name, value in record.items()}, indent=2)
        + "\n"
    )


def save(checkpoint: Checkpoint, folder: Path) -> None:
    """Write `pasta.json` into `folder`, whole or not at all; who may read it may read the weights.

    Safetensors 0.8 writes those for their owner only (safetensors/safetensors issue 782).
    """
    target = folder / FILE_NAME
    partial = target.with_suffix(".json.partial")
    partial.write_text(to_json(checkpoint), encoding="utf-8")
    os.replace(partial, target)
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(target, weights)


def load(folder: Path) -> Checkpoint:
    """Read `pasta.json`. Raises PastaError if it is missing, broken or of another version."""
    path = folder / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        message = f"{folder} holds no {FILE_NAME}: not a Pasta adapter"
        raise PastaError(message, hint=_BROKEN_HINT) from None
    except (OSError, ValueError) as error:
        raise PastaError(f"{path} cannot be read: {error}", hint=_BROKEN_HINT) from error
    return from_json(text, str(path))


def from_json(text: str, source: str) -> Checkpoint:
    """Read the text of a `pasta.json` found in `source`. Raises PastaError as `load` does."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PastaError(f"{source} cannot be read: {error}", hint=_BROKEN_HINT) from error
    version = record.get("format_version") if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        message = f"{source} has format version {version!r}; this Pasta reads {FORMAT_VERSION}"
        raise PastaError(message, hint="Install the Pasta version that wrote it.")
    try:
        return _checkpoint(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{source} is incomplete or malformed: {error!r}"
        raise PastaError(message, hint=_BROKEN_HINT) from error


def check_match(checkpoint: Checkpoint, model: Any, tokenizer: Any) -> str | None:
    """Return a warning if `checkpoint` was trained on this model, but on other weights of it.

    Raises PastaError, naming the difference, unless it was trained on this model at all.
    """
    theirs = describe_base(model, checkpoint.base.name)
    check_base(checkpoint, theirs)
    check_tokens(checkpoint, tokenizer)
    return _other_weights(checkpoint.base, theirs)


def _other_weights(ours: Base, theirs: Base) -> str | None:
    trained, loaded = ours.embeddings_sha256, theirs.embeddings_sha256
    if None in (trained, loaded) or trained == loaded:
        return None
    return (
        f"the adapter was trained on a copy of {ours.name} that is rounded otherwise: on "
        f"{KNOWN_WEIGHTS.get(trained, trained)}, not {KNOWN_WEIGHTS.get(loaded, loaded)}; "
        "its answers may differ from those that were measured"
    )


def check_base(checkpoint: Checkpoint, theirs: Base) -> None:
    """Raise PastaError unless `checkpoint` was trained on the base model `theirs`."""
    ours = checkpoint.base
    for field in fields(Base):
        if field.name == "embeddings_sha256":
            continue
        want, have = getattr(ours, field.name), getattr(theirs, field.name)
        if want != have:
            raise PastaError(
                f"the adapter was trained on {ours.name} ({field.name} {want}), "
                f"but this model has {field.name} {have}",
                hint=f"Use it with {ours.name}, or train an adapter for this model.",
            )


def check_tokens(checkpoint: Checkpoint, tokenizer: Any) -> None:
    """Raise PastaError unless the control tokens of `checkpoint` are those of `tokenizer`."""
    for token, text in checkpoint.token_texts.items():
        have_text = tokenizer.convert_ids_to_tokens(token)
        if have_text != text:
            raise PastaError(
                f"control token {token} is {text!r} in the adapter, {have_text!r} in the tokenizer",
                hint="Use the tokenizer of the model that the adapter was trained on.",
            )


def add_missing_tokens(tokenizer: Any, checkpoint: Checkpoint) -> None:
    """Give `tokenizer` the control tokens that `bind` had to add when the adapter was trained."""
    known = tokenizer.get_vocab()
    missing = [text for _, text in sorted(checkpoint.token_texts.items()) if text not in known]
    if missing and all(text.startswith(_ADDED_PREFIX) for text in missing):
        _add_tokens(tokenizer, missing)


def grow_vocabulary(model: Any, control: ControlTokens) -> None:
    """Make room for added control tokens in the embeddings, if they have none to spare."""
    wanted = max(control.ids) + 1
    if wanted > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(wanted)


def _add_tokens(tokenizer: Any, texts: list[str]) -> None:
    added = {"additional_special_tokens": texts}
    tokenizer.add_special_tokens(added, replace_extra_special_tokens=False)


def _checkpoint(record: dict[str, Any]) -> Checkpoint:
    unknown = set(record) - {_KEYS.get(field.name, field.name) for field in fields(Checkpoint)}
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    parts = dict(record["binding"])
    closes = parts.pop("promise_close")
    buckets = {int(size): _token(token) for size, token in sorted(closes.items(), key=_as_int)}
    single = {key: _token(token) for key, token in parts.items()}
    control = ControlTokens(promise_close=buckets, **single)
    if min(buckets, default=0) <= 0:
        raise ValueError(f"the length buckets are {list(buckets)}")
    if len(control.ids) != len(buckets) + 4:
        raise ValueError("two parts of a tag share one control token")
    if record["topic"] not in ("required", "none"):
        raise ValueError(f"topic is {record['topic']!r}, not 'required' or 'none'")
    texts = {int(token): _text(text) for token, text in record["token_texts"].items()}
    if set(texts) != control.ids:
        raise ValueError("token_texts does not tell the texts of the control tokens")
    return Checkpoint(
        base=Base(**record["base"]),
        control=control,
        token_texts=texts,
        scheme=_text(record["scheme"]),
        joins=tuple(_text(join) for join in _list(record["joins"])),
        topic=record["topic"],
    )


def _as_int(item: tuple[str, object]) -> int:
    return int(item[0])


def _token(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a token id")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def _embedding_digest(parameters: Mapping[str, Any]) -> str | None:
    """Hash some rows of the table's second quarter, where no control token is, in bfloat16."""
    import torch

    tables = [one for name, one in parameters.items() if name.endswith("embed_tokens.weight")]
    if not tables:
        return None
    size = tables[0].shape[0]
    rows = tables[0].detach()[size // 4 : size // 2 : _EMBEDDING_STRIDE]
    raw = rows.to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


def _norm_digest(parameters: Iterable[tuple[str, Any]]) -> str:
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(parameters, key=lambda named: named[0]):
        if name.endswith("norm.weight"):
            raw = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
            digest.update(raw.numpy().tobytes())
    return digest.hexdigest()[:16]
