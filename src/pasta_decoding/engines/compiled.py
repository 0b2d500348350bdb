"""A model's forward pass compiled ahead of time for this processor (AOTInductor).

One program serves every width and cache length: its products have packed weights and any number of
rows, and attention is an operator of ours, which alone sees the cells. The model stays unpatched:
while it is traced, its attention function is one that calls the operator, and where an operator of
ours is fastest, other layers stand in the place of its linear ones (packed_linear.py).

Shapes: Q tokens of the pass, F of them with logits, V vocabulary.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pasta_decoding.engines.attention import SlotLayer
from pasta_decoding.engines.cell_attention import TRACED, Seen, looking_at
from pasta_decoding.engines.kv_cache import Batch
from pasta_decoding.engines.operators import add_operators, load_operators
from pasta_decoding.engines.packed_linear import in_place_of
from pasta_decoding.engines.support import refuse_unsupported
from pasta_decoding.errors import PastaError

MAX_TOKENS = 512
"""Tokens of a compiled pass; the model itself computes wider ones."""

FORMAT = 4
"""Raised when the same model is compiled to something else."""

# Products that no operator of ours computes, by Inductor's C++ templates where the processor has
# AMX tiles, else by oneDNN's packed ones: each is twice as fast as the other there. No benchmark
# chooses (`max_autotune` with both): a busy machine misleads it, and it then took oneDNN's for four
# products of seven, a fifth of a step.
_TEMPLATES: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}
_ONEDNN: dict[str, Any] = {"cpp.enable_concat_linear": True}


def inductor_options() -> dict[str, Any]:
    """Return what Inductor is told on this processor."""
    return {"freezing": True, **(_TEMPLATES if torch.cpu._is_amx_tile_supported() else _ONEDNN)}


class _Pass(nn.Module):
    """What is compiled: ids and positions in, float32 logits of the wanted tokens out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("no_mask", torch.zeros(1, 1, 1, 1, dtype=model.dtype))

    def forward(self, ids_1Q: Tensor, positions_1Q: Tensor, wanted_F: Tensor) -> Tensor:
        """Return logits_FV."""
        output = self.model(
            input_ids=ids_1Q,
            position_ids=positions_1Q,
            attention_mask=self.no_mask,
            use_cache=False,
            logits_to_keep=wanted_F,
        )
        return output.logits[0].float()


def compile_model(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], target: Path, scratch: Path
) -> None:
    """Compile a model that is on the CPU into the file `target` (.pt2); takes a minute or more.

    The weights go into it, packed for the processor, and so does torch's number of threads. All
    that is written on the way goes below `scratch`. Raises PastaError where that cannot be done.

    layers: by their names, what computes in place of the model's own (`packed_layers`), if any.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.utils import fresh_cache

    refuse_unsupported(model)
    check_compiler()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(fresh_cache(dir=str(scratch), delete=False))
        try:
            aoti_compile_and_package(
                _exported(model, layers),
                package_path=str(target),
                inductor_configs=inductor_options(),
            )
            add_operators(target, scratch)
        except Exception as error:
            raise PastaError(
                f"this model cannot be compiled: {_first_line(error)}",
                hint="Use --engine torch, which needs no compiler.",
            ) from error


def _exported(
    model: PreTrainedModel, layers: Mapping[str, nn.Module]
) -> torch.export.ExportedProgram:
    """Trace the pass with any number of tokens; the model is left as it was."""
    width, wanted = (torch.export.Dim(name, min=2, max=MAX_TOKENS) for name in ("width", "wanted"))
    ids_1Q, wanted_F = torch.zeros(1, 4, dtype=torch.long), torch.arange(3)
    attention = model.config._attn_implementation
    model.set_attn_implementation(TRACED)
    try:
        with in_place_of(model, layers):
            return torch.export.export(
                _Pass(model.eval()),
                (ids_1Q, ids_1Q.clone(), wanted_F),
                dynamic_shapes=({1: width}, {1: width}, {0: wanted}),
                strict=False,
            )
    finally:
        model.set_attn_implementation(attention)


def check_compiler() -> None:
    """Raise PastaError if there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise PastaError(
            "no C++ compiler was found", hint="Install one, such as the package g++, or go without."
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_ENVIRONMENT = threading.Lock()


@contextmanager
def _unpacked_and_removed() -> Iterator[Path]:
    """Let torch unpack a program where it goes at once: what is mapped needs no name.

    Else each process that is killed leaves 330 MB in the temporary folder. Only the environment
    says where torch unpacks.
    """
    with _ENVIRONMENT, tempfile.TemporaryDirectory(prefix="pasta-compiled-") as folder:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


class CompiledPass:
    """A compiled program, loaded. It is code: load only what this user has compiled."""

    def __init__(self, path: Path) -> None:
        from torch._inductor import aoti_load_package

        try:
            with _unpacked_and_removed() as folder:
                load_operators(path, folder)
                self._program: Callable[..., Tensor] = aoti_load_package(str(path))
        except Exception as error:
            raise PastaError(
                f"the compiled model in {path} cannot be loaded: {_first_line(error)}",
                hint="Make it again: pasta compile.",
            ) from error

    def __call__(self, batch: Batch, layers: Sequence[SlotLayer], seen: Seen) -> Tensor:
        """Return float32 logits_FV. The program takes two tokens or more, and wants two or more."""
        padding = [0] * (2 - len(batch.ids))
        spare = [0] * (2 - len(batch.wanted))
        with looking_at(layers, seen):
            logits_FV = self._program(
                torch.tensor([batch.ids + padding]),
                torch.tensor([batch.positions + padding]),
                torch.tensor(batch.wanted + spare),
            )
        return logits_FV[: len(batch.wanted)]
