"""Where the compiled models are, and how they get there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pasta_decoding.cli.files import cache_folder, say
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.engines.compile_cache import Origin
    from pasta_decoding.engines.compiled import CompiledPass


def compiled_pass(
    base: Path, adapter: Path | None, dtype: str, threads: int | None
) -> CompiledPass:
    """Load a checkpoint's compiled pass; it is compiled now if it is not there."""
    from pasta_decoding.engines.compiled import CompiledPass

    return CompiledPass(compile_checkpoint(base, adapter, dtype, threads))


def ready(base: Path, adapter: Path | None, dtype: str, threads: int | None) -> bool:
    """Is a checkpoint compiled for this machine? If what is there is of no use, the user is told.

    Checks all of it, digest and owner included.
    """
    from pasta_decoding.engines.compile_cache import find, is_there

    name = compiled_name(base, adapter, dtype, threads)
    if not is_there(_folder(), name):
        return False
    try:
        find(_folder(), name, _origin(threads))
    except PastaError as error:
        say(f"{error}. {error.hint}")
        return False
    return True


def compile_checkpoint(base: Path, adapter: Path | None, dtype: str, threads: int | None) -> Path:
    """Return a checkpoint's compiled pass in the user's cache, made now if it is not there."""
    from pasta_decoding.engines.compile_cache import find, make
    from pasta_decoding.engines.compiled import check_compiler, compile_model
    from pasta_decoding.models.loading import load_model

    name, origin = compiled_name(base, adapter, dtype, threads), _origin(threads)
    try:
        return find(_folder(), name, origin)
    except PastaError:
        check_compiler()

    def compile_to(target: Path, scratch: Path) -> None:
        say(f"compiling {name} for this processor (once; it takes a minute or two)")
        with ticking("compiling"):
            compile_model(load_model(base, adapter, dtype=dtype).model, target, scratch)

    return make(_folder(), name, origin, compile_to, tell=say)


def compiled_name(base: Path, adapter: Path | None, dtype: str, threads: int | None) -> str:
    """Return what a compiled checkpoint is called."""
    from pasta_decoding.models.export import cached_name

    return cached_name(base, adapter, f"{dtype}-{_origin(threads).threads}")


def _folder() -> Path:
    return cache_folder() / "compiled"


def _origin(threads: int | None) -> Origin:
    import torch

    from pasta_decoding.engines.compile_cache import this_origin
    from pasta_decoding.engines.compiled import FORMAT

    if threads is not None:
        torch.set_num_threads(threads)
    return this_origin(FORMAT)


@contextmanager
def ticking(what: str) -> Iterator[None]:
    """Show on a terminal that something goes on, and for how long it has."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield
