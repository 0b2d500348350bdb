"""A decoder without a model: it answers each question with a text that the test gives."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from pasta_decoding.engines.base import FloatArray
from pasta_decoding.models.checkpoint import BaseIdentity, Checkpoint, choose_tokens
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.scheduling.decoder import LocalDecoder, decoder_over
from tests.checkpoint import END, byte_tokenizer
from tests.scripted import ScriptedEngine

Reply = Callable[[str], str]
"""Returns the complete answer to a question. A start of it that the prompt has is included."""


def puppet(
    reply: Reply, *, max_slots: int | None = None, max_positions: int = 4096
) -> LocalDecoder:
    """Return a decoder whose model writes what `reply` returns, one token a character."""
    tokenizer: Any = byte_tokenizer()
    control = choose_tokens(tokenizer)
    end = tokenizer.convert_tokens_to_ids(END)
    size = len(tokenizer)

    @cache
    def script(visible_ids: tuple[int, ...]) -> FloatArray:
        question, written = question_and_written(tokenizer.decode(list(visible_ids)))
        answer = reply(question)
        assert answer.startswith(written), f"{answer!r} was begun with {written!r}"
        next_char = answer[len(written) :][:1]
        ids = tokenizer.encode(next_char, add_special_tokens=False)
        logits_V = np.zeros(size, dtype=np.float32)
        logits_V[ids[0] if ids else end] = 10
        return logits_V

    engine = ScriptedEngine(script, size, max_positions=max_positions, max_slots=max_slots)
    texts = {token: tokenizer.convert_ids_to_tokens(token) for token in control.ids}
    checkpoint = Checkpoint(BaseIdentity("puppet", "none", 1, 1, size, "0"), control, texts)
    return decoder_over(engine, LoadedModel(None, tokenizer, checkpoint, frozenset({end})))


def question_and_written(text: str) -> tuple[str, str]:
    """Return the user's last question, and the part of its answer that is written."""
    before, _, written = text.rpartition("<|im_start|>assistant\n")
    question = before.rpartition("<|im_start|>user\n")[2].partition(END)[0]
    return question, written
