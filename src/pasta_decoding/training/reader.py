"""The base model as the annotator `likelihood` asks it: a reader, with its trained head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.data.annotate.head import Head
    from pasta_decoding.data.annotate.reading import BaseReader


def base_reader(
    base_folder: Path,
    *,
    layers: Sequence[int] = (),
    find_head: Callable[[str], Head | None] = lambda _base: None,
) -> tuple[BaseReader, str]:
    """Return the base model as a reader, and its digest.

    layers:    whose states it gives; those of its head if it has one.
    find_head: the head for the model of a digest.
    """
    from pasta_decoding.data.annotate.reading import BaseReader
    from pasta_decoding.lang.positions import scheme_named
    from pasta_decoding.models.checkpoint import describe_base
    from pasta_decoding.models.load import default_device, load_base, native_dtype
    from pasta_decoding.models.prompt import Message, PromptEncoder
    from pasta_decoding.training.score import read_layouts

    device = default_device()
    loaded, tokenizer = load_base(base_folder, dtype=native_dtype(device))
    deepest = loaded.config.get_text_config().num_hidden_layers
    if layers and max(layers) > deepest:
        raise PastaError(f"the model has {deepest} layers", hint="Give --layers that it has.")
    base = describe_base(loaded, "").norms_sha256
    head = find_head(base)
    loaded.to(device).eval()
    encoder = PromptEncoder(tokenizer)
    reader = BaseReader(
        encode=encoder.encode_text,
        encode_prompt=lambda instruction: encoder.encode([Message("user", instruction)]),
        read=partial(read_layouts, loaded, layers=head.layers if head else layers),
        scheme=scheme_named("shared-max"),
        head=head,
    )
    return reader, base


def reader_with_head(base_folder: Path, head: Path | None) -> tuple[BaseReader, dict[str, Any]]:
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

    reader, base = base_reader(base_folder, find_head=find_head)
    return reader, {"base": base, "head": reader.head.digest if reader.head else None}
