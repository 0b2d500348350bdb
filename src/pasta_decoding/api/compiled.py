"""Compiled checkpoints in the user's cache: found, or made."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from pasta_decoding.api.opening import Checkpoint
    from pasta_decoding.engines.compile_cache import Origin

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled checkpoint: its files, number format and processor threads (None: torch's)."""

    base: Path
    adapter: Path | None
    dtype: str
    threads: int | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: str) -> Self:
        """Return a checkpoint's in a number format."""
        return cls(checkpoint.base, checkpoint.adapter, dtype, checkpoint.config.threads)

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

    def ready(self, cache: Path) -> bool:
        """Is it there, for this machine? Checks all of it, and warns if it is of no use."""
        from pasta_decoding.engines.compile_cache import find, is_there

        if not is_there(cache / FOLDER, self.name):
            return False
        try:
            find(cache / FOLDER, self.name, self.origin)
        except PastaError as error:
            log.warning("%s. %s", error, error.hint)
            return False
        return True

    def make(self, cache: Path) -> Path:
        """Return its file in the user's cache, compiled now if it is not there."""
        from pasta_decoding.engines.compile_cache import find, make
        from pasta_decoding.engines.compiled import check_compiler, compile_model

        try:
            return find(cache / FOLDER, self.name, self.origin)
        except PastaError:
            check_compiler()

        def compile_to(target: Path, scratch: Path) -> None:
            log.info("compiling %s for this processor (once; it takes minutes)", self.name)
            compile_model(*self._model(), target, scratch)

        return make(cache / FOLDER, self.name, self.origin, compile_to, tell=log.info)

    def _model(self) -> tuple[PreTrainedModel, dict[str, nn.Module]]:
        """Load what is compiled, and what computes its layers where Inductor is slower."""
        import torch

        from pasta_decoding.engines.packed_linear import is_fast_here, packed_layers
        from pasta_decoding.models.adapter import merge_adapter
        from pasta_decoding.models.load import load_apart, load_model

        if self.dtype != "bfloat16" or not is_fast_here():
            return load_model(self.base, self.adapter, dtype=self.dtype).model, {}
        loaded, added = load_apart(self.base, self.adapter)
        model = loaded.model
        layers = packed_layers(model, added)
        if added and self.adapter is not None:
            merge_adapter(model, self.adapter)
        return model.to(torch.bfloat16), layers


FOLDER = "compiled"
"""Of the cache."""


def anything_compiled(cache: Path) -> bool:
    """Has this user compiled anything at all? Does not load torch, as asking for more does."""
    return any((cache / FOLDER).glob("*.json"))
