"""The command `compile`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.files import cache_folder
from pasta_decoding.cli.options import Without, with_options

_COMPILED = EngineConfig(engine="compiled")
_FIXED = Without(
    {"engine", "join", "max_model_len", "cache_tokens", "device", "base_url", "api_key"}
)


@with_options
def compile_(loading: Annotated[EngineConfig, _FIXED] = _COMPILED) -> None:
    """Compile a checkpoint for this machine's processor, once: its answers take less time then."""
    from pasta_decoding.api.compiled import Compiled
    from pasta_decoding.api.opening import ENGINES, find

    checkpoint = find(loading, cache_folder())
    dtype = ENGINES["compiled"].dtype(checkpoint)
    assert dtype is not None, "it computes here"
    with ticking("compiling"):
        path = Compiled.of(checkpoint, dtype).make(cache_folder())
    typer.echo(path)


@contextmanager
def ticking(what: str) -> Iterator[None]:
    """Show on a terminal that something goes on, and for how long it has."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        progress.add_task(what, total=None)
        yield
