"""A tokenizer from its files does what the Hugging Face tokenizer that wrote them does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pasta_decoding.errors import PastaError
from pasta_decoding.models.control_tokens import choose_tokens
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.models.tokenizer import FileTokenizer
from pasta_decoding.runtime.vocabulary import vocabulary_of
from tests.checkpoint import byte_tokenizer

TEXTS = [
    "",
    "It's 7 <|im_end|>\n\n  x",
    "Naïve café, 東京, 😀",
    " 2024. one\n\n10. two",
    "\x00\x7f",
]
CONVERSATION = [{"role": "user", "content": 'a "b" <c>'}, {"role": "assistant", "content": "d"}]
TEMPLATES = {
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "json": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "trained on": "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n"
    "{% endfor %}",
    "named tokens": "{{ bos_token }}|{{ eos_token }}|{{ tools is none }}|{{ documents is none }}",
    "dated": "{{ strftime_now('%Y') }}{% if add_generation_prompt %}go{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
}


def from_files(tokenizer: PreTrainedTokenizerBase, folder: Path) -> FileTokenizer:
    tokenizer.save_pretrained(folder)
    files = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    return FileTokenizer(files, "here.gguf")


@pytest.fixture(params=["tiny", "default"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if request.param == "tiny":
        return byte_tokenizer()
    found: PreTrainedTokenizerBase = request.getfixturevalue("default_tokenizer")
    return found


def test_texts_become_the_same_ids_and_ids_the_same_texts(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    own = from_files(tokenizer, tmp_path)
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert own.encode(text, add_special_tokens=special) == ids
            for skip in (False, True):
                whole = tokenizer.decode(ids, skip_special_tokens=skip)
                assert own.decode(ids, skip_special_tokens=skip) == whole


def test_the_runtime_sees_the_same_vocabulary_and_prompts(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    control = choose_tokens(tokenizer)
    own = from_files(tokenizer, tmp_path)
    size = len(tokenizer) + 3
    assert own.eos_token_id == tokenizer.eos_token_id
    mine, theirs = (
        vocabulary_of(one, control, size, frozenset({2}), 2) for one in (own, tokenizer)
    )
    assert mine.texts == theirs.texts
    assert mine.decode([5, 40, 41]) == theirs.decode([5, 40, 41])
    messages = [Message("system", "Be kind."), Message("user", "Why?\n<|im_end|>")]
    ids = [
        PromptEncoder(one, forbidden_ids=control.ids).encode(messages) for one in (own, tokenizer)
    ]
    assert ids[0] == ids[1]
    for token in sorted(control.ids):
        assert own.convert_ids_to_tokens(token) == tokenizer.convert_ids_to_tokens(token)
    assert own.convert_ids_to_tokens(10**9) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(name: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = TEMPLATES[name]
    own = from_files(tokenizer, tmp_path)
    for prompting in (False, True):
        rendered = tokenizer.apply_chat_template(
            CONVERSATION, tokenize=False, add_generation_prompt=prompting
        )
        assert (
            own.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=prompting)
            == rendered
        )


def test_a_template_may_refuse_and_may_not_leave_its_sandbox(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    for source in (
        "{{ raise_exception('no system') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ):
        tokenizer.chat_template = source
        own = from_files(tokenizer, tmp_path)
        with pytest.raises(TemplateError):
            own.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
        with pytest.raises(PastaError, match=r"chat template of here\.gguf refuses"):
            PromptEncoder(own).encode([Message("user", "Hello")])


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": "{{ eos_token }}", "eos_token": {"content": "E", "special": True}},
        {
            "chat_template": [
                {"name": "other", "template": "no"},
                {"name": "default", "template": "{{ eos_token }}"},
            ],
            "eos_token": "E",
        },
    ],
)
def test_older_settings_hold_the_template_and_say_more_of_a_token(
    settings: dict[str, object],
) -> None:
    vocabulary = byte_tokenizer().backend_tokenizer.to_str()
    files = {"tokenizer.json": vocabulary, "tokenizer_config.json": json.dumps(settings)}
    own = FileTokenizer(files, "old.gguf")
    rendered = own.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=False)
    assert rendered == "E"


def test_a_saved_cut_and_padding_are_not_applied() -> None:
    backend = byte_tokenizer().backend_tokenizer
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(FileTokenizer({"tokenizer.json": backend.to_str()}, "x").encode("four")) == 4


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": "{}"}, {"tokenizer.json": "no json"}])
def test_files_that_are_no_tokenizer_are_refused(files: dict[str, str]) -> None:
    with pytest.raises(PastaError, match=r"the tokenizer in x\.gguf cannot be read"):
        FileTokenizer(files, "x.gguf")


def test_a_tokenizer_without_a_template_has_none(tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
    tokenizer.chat_template = None
    assert from_files(tokenizer, tmp_path).chat_template is None
