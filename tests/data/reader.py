"""A tiny random model as a reader, for the annotators that ask one."""

from __future__ import annotations

from functools import cache, partial

from pasta_decoding.data.annotate.reading import BaseReader
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.training.score import read_layouts
from tests.checkpoint import byte_tokenizer
from tests.tiny import tiny_llama


@cache
def tiny_reader(layers: tuple[int, ...] = ()) -> BaseReader:
    """Return a reader that knows one token a byte, and gives the states of `layers`."""
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocabulary=len(tokenizer), max_position_embeddings=4096)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    read = partial(read_layouts, model, layers=layers)
    return BaseReader(encode, lambda text: encode(f"{text}\n"), read, scheme_named("shared-max"))
