"""Which tokens play the tags, and `pasta.json`: what it records, and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pasta_decoding.errors import PastaError
from pasta_decoding.lang.control import BUCKETS, ControlTokens
from pasta_decoding.models.catalog import BaseAlone
from pasta_decoding.models.checkpoint import (
    FILE_NAME,
    BaseIdentity,
    Checkpoint,
    add_missing_tokens,
    check_match,
    choose_tokens,
    describe,
    read_checkpoint,
    write_checkpoint,
)
from pasta_decoding.models.load import load_base
from tests.checkpoint import byte_tokenizer
from tests.tiny import seeded, tiny_llama, tiny_qwen3

PARTS = len(BUCKETS) + 4
_JUPYTER = [f"<jupyter_{part}>" for part in ("start", "text", "code", "output", "script")]
_REPOSITORY = ["<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>"]
_ISSUE = [f"<issue_{part}>" for part in ("start", "comment", "closed")]
SMOLLM2 = [*_REPOSITORY, *_ISSUE, *_JUPYTER, "<empty_output>"]
LLAMA3 = [f"<|reserved_special_token_{n}|>" for n in range(20)]
GEMMA = [f"<unused{n}>" for n in range(99)]
CONTROL = ControlTokens(1, {20: 5, 50: 6}, 2, 3, 4)
CHECKPOINT = Checkpoint(
    BaseIdentity("some/base", "llama", 32, 2, 100, "0123456789abcdef"),
    CONTROL,
    {token: f"<unused{token}>" for token in range(1, 7)},
)


def texts_of(tokenizer: Any, control: ControlTokens) -> list[str]:
    return [tokenizer.convert_ids_to_tokens(token) for token in sorted(control.ids)]


# Choosing tokens


@pytest.mark.parametrize("spare", [SMOLLM2, LLAMA3, GEMMA])
def test_spare_tokens_of_the_vocabulary_are_used(spare: list[str]) -> None:
    tokenizer = byte_tokenizer(spare)
    size = len(tokenizer)
    control = choose_tokens(tokenizer)
    assert len(tokenizer) == size
    assert texts_of(tokenizer, control) == spare[:PARTS]
    assert tuple(control.promise_close) == BUCKETS
    assert len(control.ids) == PARTS


def test_with_too_few_to_spare_tokens_are_added_and_nothing_else_changes() -> None:
    tokenizer = byte_tokenizer(GEMMA[: PARTS - 1])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mine>"]})
    size = len(tokenizer)
    control = choose_tokens(tokenizer)
    assert sorted(control.ids) == list(range(size, size + PARTS))
    assert texts_of(tokenizer, control) == [f"<|pasta_{n}|>" for n in range(PARTS)]
    assert "<mine>" in tokenizer.all_special_tokens
    assert choose_tokens(tokenizer) == control


def test_added_tokens_are_given_to_a_fresh_tokenizer() -> None:
    trained = byte_tokenizer(())
    model = tiny_llama(vocabulary=len(trained))
    checkpoint = describe(model, trained, choose_tokens(trained), name="some/base")
    fresh = byte_tokenizer(())
    with pytest.raises(PastaError, match=r"^control token 258 is '<\|pasta_0\|>' in the adapter"):
        check_match(checkpoint, model, fresh)
    add_missing_tokens(fresh, checkpoint.token_texts)
    check_match(checkpoint, model, fresh)


def test_a_model_without_room_for_added_tokens_grows(tmp_path: Path) -> None:
    tiny_llama(vocabulary=258).save_pretrained(tmp_path)
    byte_tokenizer(()).save_pretrained(tmp_path)
    loaded = load_base(BaseAlone(tmp_path))
    last = max(loaded.checkpoint.control.ids)
    assert loaded.model(torch.tensor([[last]])).logits.shape[-1] == last + 1 == 258 + PARTS


# pasta.json


@pytest.mark.parametrize("topic", ["required", "none"])
def test_a_record_comes_back_as_it_was_saved(topic: str, tmp_path: Path) -> None:
    checkpoint = replace(CHECKPOINT, topic=topic, joins=("kv", "text"))
    write_checkpoint(checkpoint, tmp_path)
    assert read_checkpoint(tmp_path) == checkpoint
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def refusal(folder: Path) -> PastaError:
    with pytest.raises(PastaError) as caught:
        read_checkpoint(folder)
    return caught.value


def test_a_folder_without_a_record_is_no_adapter(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert str(refusal(folder)) == f"{folder} holds no pasta.json: not a Pasta adapter"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read: "),
        (b"\xff\xfe", "cannot be read: "),
        (b"[" * 100_000, "cannot be read: "),
        (b'{"format_version": 2}', "has format version 2; this Pasta reads 1"),
    ],
    ids=len,
)
def test_a_broken_or_foreign_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert str(refusal(tmp_path)).startswith(f"{tmp_path / FILE_NAME} {message}")


Change = Callable[[dict[str, Any]], object]
BREAKS: list[tuple[Change, str]] = [
    (lambda r: r.pop("binding"), "KeyError('binding')"),
    (lambda r: r["base"].pop("layers"), "TypeError"),
    (lambda r: r["binding"].update(promise_close={}), "the length buckets are []"),
    (lambda r: r["binding"].update(promise_close={"x": 5}), "ValueError"),
    (lambda r: r["binding"].update(promise_close=[5, 6]), "AttributeError"),
    (lambda r: r["binding"].update(sync=1), "two parts of a tag share one control"),
    (lambda r: r["binding"].update(sync="4"), "['4'] are no token ids"),
    (lambda r: r["binding"].update(sync=-4), "[-4] are no token ids"),
    (lambda r: r.update(topic="maybe"), "topic is 'maybe', not 'required' or"),
    (lambda r: r.update(scheme=[]), "[]] is not a text"),
    (lambda r: r.update(joins="kv"), "'kv' is not a list"),
    (lambda r: r.update(eagerness="much"), "eagerness is 'much', not a number"),
    (lambda r: r.update(sync_bias=float("nan")), "sync_bias is nan, not a number"),
    (lambda r: r["token_texts"].pop("1"), "token_texts does not tell the texts"),
    (lambda r: r["token_texts"].update({"1": None}), "one of [None, "),
    (lambda r: r.update(colour="red"), "unknown keys ['colour']"),
]


@pytest.mark.parametrize(("change", "reason"), BREAKS)
def test_a_malformed_record_is_refused_and_says_why(
    change: Change, reason: str, tmp_path: Path
) -> None:
    write_checkpoint(CHECKPOINT, tmp_path)
    path = tmp_path / FILE_NAME
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    error = refusal(tmp_path)
    assert str(error).startswith(f"{path} is incomplete or malformed: ")
    assert reason in str(error)


# Another model than the one it was trained on


def sibling() -> Any:
    model = tiny_llama(vocabulary=400)
    with torch.no_grad(), seeded(1):
        model.model.norm.weight.mul_(1.1)
    return model


def rounded() -> Any:
    """Round all matrices to a sixteenth, as a quantiser would; vectors stay as they are."""
    model = tiny_llama(vocabulary=400)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_((weight * 16).round() / 16)
    return model


def matched(model: Any, *special: str) -> str | None:
    """Check `model` where the adapter was trained on the plain tiny Llama."""
    ours = byte_tokenizer(GEMMA)
    checkpoint = describe(tiny_llama(vocabulary=400), ours, choose_tokens(ours), name="some/base")
    return check_match(checkpoint, model, byte_tokenizer([*special, *GEMMA]))


TRAINED = "the adapter was trained on some/base "


@pytest.mark.parametrize(
    ("model", "special", "message"),
    [
        (lambda: tiny_qwen3(vocabulary=400), [],
         TRAINED + "(model_type llama), but this model has model_type qwen3"),
        (lambda: tiny_llama(vocabulary=400, num_hidden_layers=1), [],
         TRAINED + "(layers 2), but this model has layers 1"),
        (sibling, [], TRAINED + "(norms_sha256 "),
        (lambda: tiny_llama(vocabulary=400), ["<other>"],
         "control token 258 is '<unused0>' in the adapter, '<other>' in the tokenizer"),
    ],
)  # fmt: skip
def test_another_base_or_vocabulary_is_refused_by_what_differs(
    model: Callable[[], Any], special: list[str], message: str
) -> None:
    with pytest.raises(PastaError) as caught:
        matched(model(), *special)
    assert str(caught.value).startswith(message)


def test_a_copy_that_is_rounded_otherwise_is_a_warning() -> None:
    model: Any = tiny_llama(vocabulary=400)
    assert matched(model.to(torch.bfloat16)) is None, "the digest's own precision"
    assert str(matched(rounded())).startswith(
        "the adapter was trained on a copy of some/base that is rounded otherwise"
    )
