"""A model's forward pass compiled ahead of time for this processor (AOTInductor).

One program serves every width and cache length: its products have packed weights and any number of
rows, and attention is an operator of ours, which alone sees the cells. The model stays unpatched:
while it is traced, its attention function is one that calls the operator.

Shapes: Q tokens of the pass, F of them with logits, V vocabulary, H heads, G kv heads, D head
width.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from pasta_decoding.engines.attention import Plan, PooledLayer, attend
from pasta_decoding.errors import PastaError

MAX_TOKENS = 512
"""Tokens of a compiled pass; the model itself computes wider ones."""

FORMAT = 2
"""Raised when the same model is compiled to something else."""

TRACED = "pasta_traced"

# Products by Inductor's C++ templates where the processor has AMX tiles, else by oneDNN's packed
# ones: each is twice as fast as the other there. No benchmark chooses (`max_autotune` with both): a
# busy machine misleads it, and it then took oneDNN's for four products of seven, a fifth of a step.
_TEMPLATES: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}
_ONEDNN: dict[str, Any] = {"cpp.enable_concat_linear": True}


def inductor_options() -> dict[str, Any]:
    """Return what Inductor is told on this processor."""
    return {"freezing": True, **(_TEMPLATES if torch.cpu._is_amx_tile_supported() else _ONEDNN)}


@dataclass(frozen=True, slots=True)
class Cells:
    """The cache that the running pass writes, and what it writes and sees there."""

    cache: Cache
    plan: Plan


# An operator gets tensors and numbers only, so what it works on waits here during the call.
_cells: ContextVar[Cells] = ContextVar("cells")

_LIBRARY: Any = torch.library.Library("pasta", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scaling, int? window)"
    " -> Tensor"
)


def _attend_cells(
    query_1HQD: Tensor,
    key_1GQD: Tensor,
    value_1GQD: Tensor,
    layer: int,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Write the pass's keys and values into a layer's cells and attend; return out_1QHD.

    Rows behind the last segment are padding: they are not written, and get zeros.
    """
    cells = _cells.get()
    own = cells.cache.layers[layer]
    assert isinstance(own, PooledLayer), "made by `pooled_cache`"
    keys, values = own.update(key_1GQD, value_1GQD)
    out_1HQD = attend(cells.plan, query_1HQD, keys, values, scaling, window)
    if padding := query_1HQD.shape[2] - out_1HQD.shape[2]:
        out_1HQD = pad(out_1HQD, (0, 0, 0, padding))
    return out_1HQD.transpose(1, 2).contiguous()


def _shape_only(query_1HQD: Tensor, _key: Tensor, value_1GQD: Tensor, *_rest: Any) -> Tensor:
    heads, queries = query_1HQD.shape[1:3]
    return query_1HQD.new_empty(1, queries, heads, value_1GQD.shape[-1])


_LIBRARY.impl("attend", _attend_cells, "CPU")
_LIBRARY.impl("attend", _shape_only, "Meta")


def _traced_attention(
    module: nn.Module,
    query_1HQD: Tensor,
    key_1GQD: Tensor,
    value_1GQD: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    scaling = query_1HQD.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    operator: Any = torch.ops.pasta.attend
    return operator(query_1HQD, key_1GQD, value_1GQD, layer, scaling, sliding_window), None


AttentionInterface.register(TRACED, _traced_attention)
AttentionMaskInterface.register(TRACED, sdpa_mask)


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


def compile_model(model: PreTrainedModel, target: Path, scratch: Path) -> None:
    """Compile a model that is on the CPU into the file `target` (.pt2); takes a minute or more.

    The weights go into it, packed for the processor, and so does torch's number of threads. All
    that is written on the way goes below `scratch`. Raises PastaError where that cannot be done.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.utils import fresh_cache

    check_compiler()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.no_grad())
        stack.enter_context(fresh_cache(dir=str(scratch), delete=False))
        try:
            aoti_compile_and_package(
                _exported(model), package_path=str(target), inductor_configs=inductor_options()
            )
        except Exception as error:
            raise PastaError(
                f"this model cannot be compiled: {_first_line(error)}",
                hint="Use --engine torch, which needs no compiler.",
            ) from error


def _exported(model: PreTrainedModel) -> torch.export.ExportedProgram:
    """Trace the pass with any number of tokens; the model is left as it was."""
    width, wanted = (torch.export.Dim(name, min=2, max=MAX_TOKENS) for name in ("width", "wanted"))
    ids_1Q, wanted_F = torch.zeros(1, 4, dtype=torch.long), torch.arange(3)
    attention = model.config._attn_implementation
    model.set_attn_implementation(TRACED)
    try:
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


@contextmanager
def _unpacked_and_removed() -> Iterator[None]:
    """Let torch unpack a program where it goes at once: what is mapped needs no name.

    Else each process that is killed leaves 330 MB in the temporary folder. Only the environment
    says where torch unpacks.
    """
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="pasta-compiled-") as folder:
        os.environ["TMPDIR"] = folder
        try:
            yield
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
            with _unpacked_and_removed():
                self._program: Callable[..., Tensor] = aoti_load_package(str(path))
        except Exception as error:
            raise PastaError(
                f"the compiled model in {path} cannot be loaded: {_first_line(error)}",
                hint="Make it again: pasta compile.",
            ) from error

    def __call__(
        self, ids: list[int], positions: list[int], wanted: list[int], cells: Cells
    ) -> Tensor:
        """Return float32 logits_FV. The program takes two tokens or more, and wants two or more."""
        padding = [0] * (2 - len(ids))
        spare = [0] * (2 - len(wanted))
        token = _cells.set(cells)
        try:
            logits_FV = self._program(
                torch.tensor([ids + padding]),
                torch.tensor([positions + padding]),
                torch.tensor(wanted + spare),
            )
        finally:
            _cells.reset(token)
        return logits_FV[: len(wanted)]
