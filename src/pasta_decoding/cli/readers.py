"""Models for the annotators that ask one: the base model that reads, the checkpoint that writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.cli.files import base_folder
from pasta_decoding.errors import PastaError

WRITER_CELLS = 32_768  # in the cache: several long responses at once

if TYPE_CHECKING:
    from pasta_decoding.data.annotate.head import Head
    from pasta_decoding.data.annotate.reading import Reader
    from pasta_decoding.data.annotate.writer import Checkpoint


def base_reader(
    model: Path | None,
    *,
    layers: Sequence[int] = (),
    find_head: Callable[[str], Head | None] = lambda _base: None,
) -> tuple[Reader, str]:
    """Return the base model as a reader, and its digest.

    layers:    whose states it gives; those of its head if it has one.
    find_head: the head for the model of a digest.
    """
    from pasta_decoding.data.annotate.reading import Reader
    from pasta_decoding.data.score import read_layouts
    from pasta_decoding.lang.positions import scheme_named
    from pasta_decoding.models.binding import describe_base
    from pasta_decoding.models.loading import default_device, load_base, native_dtype
    from pasta_decoding.models.prompt import Message, PromptEncoder

    device = default_device()
    loaded, tokenizer = load_base(base_folder(model), dtype=native_dtype(device))
    deepest = loaded.config.get_text_config().num_hidden_layers
    if layers and max(layers) > deepest:
        raise PastaError(f"the model has {deepest} layers", hint="Give --layers that it has.")
    base = describe_base(loaded, "").norms_sha256
    head = find_head(base)
    loaded.to(device).eval()
    encoder = PromptEncoder(tokenizer)
    reader = Reader(
        encode=encoder.encode_text,
        encode_prompt=lambda instruction: encoder.encode([Message("user", instruction)]),
        read=partial(read_layouts, loaded, layers=head.layers if head else layers),
        scheme=scheme_named("shared-max"),
        head=head,
    )
    return reader, base


def reader_with_head(model: Path | None, head: Path | None) -> tuple[Reader, dict[str, Any]]:
    """Return the base model with a reading head, and what tells both from others.

    The head is the one in the file, else the one that ships for this model, else there is none.
    """
    from pasta_decoding.data.annotate.head import load_head, shipped_head

    def find_head(base: str) -> Head | None:
        if head is None:
            return shipped_head(base)
        given = load_head(head)
        if given.base != base:
            raise PastaError(
                f"{head} was trained for another base model",
                hint="Train one for this model with `pasta train head`.",
            )
        return given

    reader, base = base_reader(model, find_head=find_head)
    return reader, {"base": base, "head": reader.head.digest if reader.head else None}


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
    if loaded.checkpoint.topic != "required":
        raise PastaError(f"{adapter} writes no topics", hint="Give an --adapter that does.")
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
