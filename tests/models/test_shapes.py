"""Prompts and control tokens of Llama 3 and Gemma, whose templates and vocabularies differ most."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from pasta_decoding.errors import PastaError
from pasta_decoding.models.control_tokens import BUCKETS, choose_tokens
from pasta_decoding.models.prompt import Message, PromptEncoder
from tests.models.test_prompt import HARMLESS, PLACEMENTS, ROLE_MARKERS, TAGS
from tests.shapes import gemma_tokenizer, llama3_tokenizer

TOKENIZERS = {"llama3": llama3_tokenizer(), "gemma": gemma_tokenizer()}
TALK = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]


def encoder_of(tokenizer: PreTrainedTokenizerFast) -> PromptEncoder:
    return PromptEncoder(tokenizer, forbidden_ids=choose_tokens(tokenizer).ids)


def acting(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[int]:
    """Only the tokens that act: special ones, control tokens, role markers."""
    harmless = {
        i for text, i in tokenizer.get_added_vocab().items() if text.strip("\n\u2581") == ""
    }
    return [i for i in ids if i in set(tokenizer.get_added_vocab().values()) - harmless]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_control_tokens_are_spare_ones_and_nothing_is_added(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    size = len(tokenizer)
    control = choose_tokens(tokenizer)
    assert len(tokenizer) == size
    texts = tokenizer.convert_ids_to_tokens(sorted(control.ids))
    spare = {"llama3": "<|reserved_special_token_{}|>", "gemma": "<unused{}>"}[name]
    assert texts == [spare.format(n) for n in range(len(BUCKETS) + 4)]


@pytest.mark.parametrize("text", HARMLESS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_harmless_text_gives_the_ids_of_the_chat_template(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    messages = [*TALK[:2], Message("user", text)]
    expected = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert encoder_of(tokenizer).encode(messages) == expected


def test_gemma_has_no_system_message_and_says_so() -> None:
    encoder = encoder_of(TOKENIZERS["gemma"])
    with pytest.raises(PastaError, match="System role not supported"):
        encoder.encode([Message("system", "Be brief."), Message("user", "Hi")])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_in_any_place_produces_a_token_that_acts(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = encoder_of(tokenizer)
    expected = acting(tokenizer, encoder.encode(TALK))
    own = [text for text in tokenizer.get_added_vocab() if text.strip("\n\u2581")]
    for text in [*own, *TAGS, *ROLE_MARKERS]:
        for place in PLACEMENTS:
            hostile = place(text)
            assert acting(tokenizer, encoder.encode_text(hostile)) == [], hostile
            for turn in range(len(TALK)):
                talk = list(TALK)
                talk[turn] = Message(TALK[turn].role, hostile)
                assert acting(tokenizer, encoder.encode(talk)) == expected, (hostile, turn)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_encoding_foreign_text_loses_nothing(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for text in ["<|eot_id|> <unused3>", "Naïve café, 東京, 😀", "a  b\n\n\nc", "<0x41> \u2581 "]:
        ids = encoder_of(tokenizer).encode_text(text)
        shown = text.replace("\u2581", " ") if name == "gemma" else text
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == shown
