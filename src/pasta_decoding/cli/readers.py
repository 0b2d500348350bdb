"""Models for the annotators that ask one: the base model that reads, the checkpoint that writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pasta_decoding.cli.files import base_folder

WRITER_CELLS = 32_768  # in the cache: several long responses at once

if TYPE_CHECKING:
    from pasta_decoding.data.annotate.head import Head
    from pasta_decoding.data.annotate.reading import Reader
    from pasta_decoding.data.annotate.writer import Checkpoint


def base_reader(model: Path | None, head: Head | None = None) -> Reader:
    """Return the base model as a reader; with a head it gives the states that the head wants."""
    from pasta_decoding.data.annotate.reading import Reader
    from pasta_decoding.data.score import read_layouts
    from pasta_decoding.lang.positions import scheme_named
    from pasta_decoding.models.loading import default_device, load_base, native_dtype
    from pasta_decoding.models.prompt import Message, PromptEncoder

    device = default_device()
    loaded, tokenizer = load_base(base_folder(model), dtype=native_dtype(device))
    loaded.to(device).eval()
    encoder = PromptEncoder(tokenizer)
    layers = head.layers if head else ()
    return Reader(
        encode=encoder.encode_text,
        encode_prompt=lambda instruction: encoder.encode([Message("user", instruction)]),
        read=partial(read_layouts, loaded, layers=layers),
        scheme=scheme_named("shared-max"),
        head=head,
    )


def checkpoint_writer(model: Path | None, adapter: str) -> Checkpoint:
    """Return base model and adapter on the torch engine, as a checkpoint that writes."""
    from pasta_decoding.data.annotate.writer import Checkpoint
    from pasta_decoding.engines.torch import TorchEngine
    from pasta_decoding.lang.positions import scheme_named
    from pasta_decoding.models.loading import (
        default_device,
        find_adapter,
        load_model,
        native_dtype,
    )
    from pasta_decoding.models.prompt import Message, PromptEncoder

    device = default_device()
    folder = find_adapter(adapter)
    loaded = load_model(base_folder(model), folder, dtype=native_dtype(device))
    loaded.model.to(device)
    binding, tokenizer = loaded.checkpoint.binding, loaded.tokenizer
    encoder = PromptEncoder(tokenizer, forbidden_ids=binding.ids)
    return Checkpoint(
        engine=TorchEngine(loaded.model, cells=WRITER_CELLS, fixed_shapes=False),
        binding=binding,
        scheme=scheme_named(loaded.checkpoint.scheme),
        encode=encoder.encode_text,
        encode_prompt=lambda instruction: encoder.encode([Message("user", instruction)]),
        decode=partial(tokenizer.decode, skip_special_tokens=True),
    )
