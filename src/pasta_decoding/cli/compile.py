"""The command `compile`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pasta_decoding.api.settings import Dtype, EngineName
from pasta_decoding.cli.engine import Adapter, Loading, Model, Precision, Threads
from pasta_decoding.cli.files import place


def compile_(
    adapter: Adapter = None,
    model: Model = None,
    dtype: Precision = Dtype.auto,
    threads: Threads = None,
) -> None:
    """Compile a checkpoint for this machine's processor, once: its answers take less time then."""
    from pasta_decoding.api.compiled import Compiled, compile_checkpoint

    loading = Loading(adapter, model, EngineName.compiled, dtype=dtype, threads=threads)
    base, folder = loading.folders()
    _, number_format = loading.computing(base, folder)
    with ticking("compiling"):
        path = compile_checkpoint(Compiled(base, folder, number_format, threads), place())
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
