"""Compiled checkpoints in the user's cache: found, or made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pasta_decoding.api.place import Place
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.engines.compile_cache import Origin
    from pasta_decoding.engines.compiled import CompiledPass


@dataclass(frozen=True, slots=True)
class Compiled:
    """What is compiled: a checkpoint in a number format, for so many threads (None: torch's)."""

    base: Path
    adapter: Path | None
    dtype: str
    threads: int | None

    @property
    def origin(self) -> Origin:
        """What it works with. Sets torch's threads, which hold for the whole process."""
        import torch

        from pasta_decoding.engines.compile_cache import this_origin
        from pasta_decoding.engines.compiled import FORMAT

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return this_origin(FORMAT)

    @property
    def name(self) -> str:
        """Its name in the cache."""
        from pasta_decoding.models.export import cached_name

        return cached_name(self.base, self.adapter, f"{self.dtype}-{self.origin.threads}")


def anything_compiled(cache: Path) -> bool:
    """Has this user compiled anything at all? Does not load torch, as asking for more does."""
    return any(_folder(cache).glob("*.json"))


def ready(wanted: Compiled, place: Place) -> bool:
    """Is it there, for this machine? If what is there is of no use, the user is told.

    Checks all of it, digest and owner included.
    """
    from pasta_decoding.engines.compile_cache import find, is_there

    if not is_there(_folder(place.cache), wanted.name):
        return False
    try:
        find(_folder(place.cache), wanted.name, wanted.origin)
    except PastaError as error:
        place.tell(f"{error}. {error.hint}")
        return False
    return True


def compiled_pass(wanted: Compiled, place: Place) -> CompiledPass:
    """Load a checkpoint's compiled pass; it is compiled now if it is not there."""
    from pasta_decoding.engines.compiled import CompiledPass

    return CompiledPass(compile_checkpoint(wanted, place))


def compile_checkpoint(wanted: Compiled, place: Place) -> Path:
    """Return a checkpoint's compiled pass in the user's cache, made now if it is not there."""
    from pasta_decoding.engines.compile_cache import find, make
    from pasta_decoding.engines.compiled import check_compiler, compile_model
    from pasta_decoding.models.loading import load_model

    folder, name = _folder(place.cache), wanted.name
    try:
        return find(folder, name, wanted.origin)
    except PastaError:
        check_compiler()

    def compile_to(target: Path, scratch: Path) -> None:
        place.tell(f"compiling {name} for this processor (once; it takes a minute or two)")
        model = load_model(wanted.base, wanted.adapter, dtype=wanted.dtype).model
        compile_model(model, target, scratch)

    return make(folder, name, wanted.origin, compile_to, tell=place.tell)


def _folder(cache: Path) -> Path:
    return cache / "compiled"
