"""Compiled checkpoints in the user's cache: found, or made."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pasta_decoding.api.place import Place
from pasta_decoding.errors import PastaError
from pasta_decoding.models.load import NO_ADAPTER

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

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

    @property
    def command(self) -> list[str]:
        """The command that compiles it, at low priority."""
        program = [sys.executable, "-m", "pasta_decoding", "compile", "--dtype", self.dtype]
        program += ["--model", str(self.base), "--threads", str(self.origin.threads)]
        if self.adapter != self.base:  # of a whole model they are the same
            program += ["--adapter", NO_ADAPTER if self.adapter is None else str(self.adapter)]
        return ["nice", "-n", "19", *program]


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

    folder, name = _folder(place.cache), wanted.name
    try:
        return find(folder, name, wanted.origin)
    except PastaError:
        check_compiler()

    def compile_to(target: Path, scratch: Path) -> None:
        place.tell(f"compiling {name} for this processor (once; it takes a minute or two)")
        compile_model(*_model(wanted), target, scratch)

    return make(folder, name, wanted.origin, compile_to, tell=place.tell)


def _model(wanted: Compiled) -> tuple[PreTrainedModel, dict[str, nn.Module]]:
    """Load what is compiled, and what computes its layers where Inductor's products are slower."""
    import torch

    from pasta_decoding.engines.packed_linear import is_fast_here, packed_layers
    from pasta_decoding.models.load import load_apart, load_model, merge_adapter

    if wanted.dtype != "bfloat16" or not is_fast_here():
        return load_model(wanted.base, wanted.adapter, dtype=wanted.dtype).model, {}
    model, added = load_apart(wanted.base, wanted.adapter)
    layers = packed_layers(model, added)
    if added and wanted.adapter is not None:
        merge_adapter(model, wanted.adapter)
    return model.to(torch.bfloat16), layers


@contextmanager
def compiled_meanwhile(
    wanted: Compiled, place: Place, take: Callable[[CompiledPass], None]
) -> Iterator[None]:
    """Compile in a process of its own, at low priority; `take` gets the program, in a thread.

    It ends with the context, whether it is done or not. What goes wrong is told, and no more.
    """
    ended = threading.Event()
    process = subprocess.Popen(
        wanted.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )

    def wait() -> None:
        _, complaint = process.communicate()
        if ended.is_set():
            return
        try:
            if process.returncode:
                raise PastaError(complaint.rpartition("pasta: ")[2].strip() or "it was ended early")
            take(compiled_pass(wanted, place))
            place.tell("compiled: from now on steps take less time")
        except PastaError as error:
            place.tell(f"not compiled, so steps stay as they are: {error}")

    waiting = threading.Thread(target=wait, name="pasta-compile", daemon=True)
    waiting.start()
    try:
        yield
    finally:
        ended.set()
        process.terminate()
        waiting.join()


def _folder(cache: Path) -> Path:
    return cache / "compiled"
