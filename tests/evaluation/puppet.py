"""A decoder without a model: it answers every question with the text that a test wants of it."""

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
"""From a question to its whole answer, what the prompt has begun of it included."""


def puppet(
    reply: Reply, *, max_slots: int | None = None, max_positions: int = 4096
) -> LocalDecoder:
    """Return a decoder whose model says what `reply` wants, one token a character."""
    tokenizer: Any = byte_tokenizer()  # its types are those of one text and of many
    control = choose_tokens(tokenizer)
    end = tokenizer.convert_tokens_to_ids(END)
    size = len(tokenizer)

    @cache
    def script(seen: tuple[int, ...]) -> FloatArray:
        question, written = asked_and_written(tokenizer.decode(list(seen)))
        whole = reply(question)
        assert whole.startswith(written), f"{whole!r} was begun with {written!r}"
        rest = tokenizer.encode(whole[len(written) :][:1], add_special_tokens=False)
        logits_V = np.zeros(size, dtype=np.float32)
        logits_V[rest[0] if rest else end] = 10
        return logits_V

    engine = ScriptedEngine(script, size, max_positions=max_positions, max_slots=max_slots)
    texts = {token: tokenizer.convert_ids_to_tokens(token) for token in control.ids}
    checkpoint = Checkpoint(BaseIdentity("puppet", "none", 1, 1, size, "0"), control, texts)
    return decoder_over(engine, LoadedModel(None, tokenizer, checkpoint, frozenset({end})))


def asked_and_written(text: str) -> tuple[str, str]:
    """Return the user's last question, and what there is of its answer."""
    before, _, written = text.rpartition("<|im_start|>assistant\n")
    question = before.rpartition("<|im_start|>user\n")[2].partition(END)[0]
    return question, written
