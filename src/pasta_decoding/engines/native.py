"""The operators of the fast engine: C++ built once for a machine, or torch's own.

Shapes: Q tokens of the pass, N segments (the queries of one request), H heads, G kv heads, D head
width, S slots of the cache, I numbers of a row.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

SOURCES = [Path(__file__).with_name(name) for name in ("linear.cpp", "layers.cpp", "slots.cpp")]
SCHEMAS = (
    "linear(Tensor input, Tensor weights, Tensor? scales, int outputs, Tensor? down, Tensor? up)"
    " -> Tensor",
    "rms_norm(Tensor input, Tensor weight, float epsilon) -> Tensor",
    "gated(Tensor gate_up, bool gelu) -> Tensor",
    "rotate_(Tensor(a!) heads, Tensor cos, Tensor sin) -> ()",
    "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values,"
    " Tensor table, Tensor masks, float scaling) -> Tensor",
)
_LIBRARY: Any = torch.library.Library("pasta_fast", "DEF")  # type: ignore[no-untyped-call]
for _schema in SCHEMAS:
    _LIBRARY.define(_schema)

_log = logging.getLogger(__name__)


class Operators(Protocol):
    """What a decoder computes besides its linear layers, all in float32."""

    def rms_norm(self, input_NI: Tensor, weight_I: Tensor, epsilon: float) -> Tensor:
        """Return the rows over the root of their mean squares, times the weight."""
        ...

    def gated(self, gate_up_N2I: Tensor, gelu: bool) -> Tensor:
        """Return act(gate) * up."""
        ...

    def rotate_(self, heads_QHD: Tensor, cos_QD: Tensor, sin_QD: Tensor) -> None:
        """Rotate heads in place; cosine and sine have half their width."""
        ...

    def attend(
        self, query_QHD: Tensor, key_QGD: Tensor, value_QGD: Tensor, keys_GSD: Tensor,
        values_GSD: Tensor, table_N6: Tensor, masks: Tensor, scaling: float,
    ) -> Tensor:  # fmt: skip
        """Write keys and values into their slots; return what the queries attend to, [Q, H, D]."""
        ...


class TorchOperators:
    """The same by torch: the reference, and what computes without a compiler."""

    def rms_norm(self, input_NI: Tensor, weight_I: Tensor, epsilon: float) -> Tensor:
        return functional.rms_norm(input_NI, weight_I.shape, weight_I, epsilon)

    def gated(self, gate_up_N2I: Tensor, gelu: bool) -> Tensor:
        gate, up = gate_up_N2I.chunk(2, dim=-1)
        act = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        return act * up

    def rotate_(self, heads_QHD: Tensor, cos_QD: Tensor, sin_QD: Tensor) -> None:
        x, y = heads_QHD.chunk(2, dim=-1)
        cos, sin = cos_QD[:, None], sin_QD[:, None]
        heads_QHD.copy_(torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1))

    def attend(
        self, query_QHD: Tensor, key_QGD: Tensor, value_QGD: Tensor, keys_GSD: Tensor,
        values_GSD: Tensor, table_N6: Tensor, masks: Tensor, scaling: float,
    ) -> Tensor:  # fmt: skip
        out_QHD = torch.empty_like(query_QHD)
        for first, queries, written, seen, end, mask in table_N6.tolist():
            own, slots = slice(first, first + queries), slice(written, written + queries)
            keys_GSD[:, slots], values_GSD[:, slots] = (
                new[own].transpose(0, 1).to(keys_GSD.dtype) for new in (key_QGD, value_QGD)
            )
            seen_GKD, values_GKD = keys_GSD[:, seen:end].float(), values_GSD[:, seen:end].float()
            size = queries * (end - seen)
            out_1HQD = functional.scaled_dot_product_attention(
                query_QHD[own].transpose(0, 1)[None],
                seen_GKD[None],
                values_GKD[None],
                attn_mask=None if mask < 0 else masks[mask : mask + size].view(queries, -1).bool(),
                is_causal=mask < 0 and queries > 1,
                scale=scaling,
                enable_gqa=True,
            )
            out_QHD[own] = out_1HQD[0].transpose(0, 1)
        return out_QHD


@cache
def operators() -> Operators | None:
    """Return the C++ operators, built now if this machine has none yet; None without a compiler."""
    from torch.utils import cpp_extension

    level = torch.backends.cpu.get_cpu_capability()
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    able = sorted(name for name, value in capabilities.items() if value is True)
    digest = hashlib.sha256(" ".join([torch.__version__, level, *able]).encode())
    name = f"pasta_{digest.hexdigest()[:12]}"
    if not any(Path(cpp_extension.get_default_build_root()).glob(f"*/{name}/{name}.so")):
        _log.info("building the operators of the fast engine (once for this machine)")
    flags = ["-O3", "-march=native", "-fopenmp", f"-DCPU_CAPABILITY={level}"]
    try:
        cpp_extension.load(
            name,
            [str(source) for source in SOURCES],
            extra_cflags=[*flags, f"-DCPU_CAPABILITY_{level}"],
            extra_ldflags=["-fopenmp"],
            is_python_module=False,
        )
    except (OSError, RuntimeError) as error:
        _log.warning("steps are slower: the operators cannot be built (%s)", _first_line(error))
        return None
    found: Any = torch.ops.pasta_fast
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
