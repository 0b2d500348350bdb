"""The operators of the fast engine: C++ built once for a machine, or torch's own.

Shapes: Q tokens of the pass, N segments (the queries of one request), H heads, G kv heads, D head
width, S slots of the cache, I numbers of a row, O outputs of layers that read the same inputs.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from torch.nn import functional

from pasta_decoding.engines.packed import LayerStruct, LowRank, Matrix, Weights
from pasta_decoding.files import written_whole

FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
HERE = Path(__file__).parent
SOURCES = [HERE / f"{name}.cpp" for name in ("linear", "layers", "slots", "pack")]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A linear layer: its weights, an adapter's low-rank addition, its bias."""

    weights: Weights
    added: LowRank | None
    bias_O: Tensor | None

    def merged(self) -> Tensor:
        """Return weight_OI in float32, with what is added."""
        weight_OI = self.weights.dense()
        if self.added is not None:
            weight_OI += self.added[1].float() @ self.added[0].float()
        return weight_OI


Linear = Callable[[Tensor], Tensor]
"""From float32 input_QI to out_QO."""


class Operators:
    """What a decoder computes, in float32, by torch: the reference, and all without a compiler."""

    def linear(self, parts: Sequence[Part]) -> Linear:
        """Return layers of the same inputs as one, their outputs beside each other."""
        weight_OI = torch.cat([part.merged() for part in parts])
        bias_O = torch.cat(
            [torch.zeros(len(p.weights.rows)) if p.bias_O is None else p.bias_O for p in parts]
        )
        return lambda input_QI: functional.linear(input_QI, weight_OI, bias_O)

    def rms_norm(self, input_NI: Tensor, weight_I: Tensor, epsilon: float) -> Tensor:
        """Return the rows over the root of their mean squares, times the weight."""
        return functional.rms_norm(input_NI, weight_I.shape, weight_I, epsilon)

    def gated(self, gate_up_N2I: Tensor, gelu: bool) -> Tensor:
        """Return act(gate) * up."""
        gate, up = gate_up_N2I.chunk(2, dim=-1)
        act = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        return act * up

    def rotate_(self, heads_QHD: Tensor, cos_QD: Tensor, sin_QD: Tensor) -> None:
        """Rotate heads in place; cosine and sine have half their width."""
        x, y = heads_QHD.chunk(2, dim=-1)
        cos, sin = cos_QD[:, None], sin_QD[:, None]
        heads_QHD.copy_(torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1))

    def attend(
        self, query_QHD: Tensor, key_QGD: Tensor, value_QGD: Tensor, keys_GSD: Tensor,
        values_GSD: Tensor, table_N6: Tensor, masks: Tensor, scaling: float,
    ) -> Tensor:  # fmt: skip
        """Write keys and values into their slots; return attention's output, [Q, H, D]."""
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


class NativeOperators(Operators):
    """The operators of a library that `build` has made, by their memory."""

    def __init__(self, path: Path) -> None:
        pointer, number, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._library: Any = ctypes.CDLL(str(path))
        for name, types in {
            "pasta_pack": (number, pointer, *3 * (number,), count),
            "pasta_free": (pointer,),
            "pasta_linear": (pointer, number, pointer, pointer, number, number, number, count),
            "pasta_rms_norm": (*3 * (pointer,), number, number, ctypes.c_float, count),
            "pasta_gated": (pointer, pointer, number, number, ctypes.c_bool, count),
            "pasta_rotate": (*3 * (pointer,), *4 * (number,), count),
            "pasta_attend": (*8 * (pointer,), *8 * (number,), ctypes.c_float, count, ctypes.c_bool),
        }.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, None
        self._library.pasta_pack.restype = pointer

    def linear(self, parts: Sequence[Part]) -> Linear:
        layers = (LayerStruct * len(parts))()
        held: list[object] = [layers]
        outputs = 0
        for layer, part in zip(layers, parts, strict=True):
            main = Matrix(self._library, part.weights)
            held.append(main)
            layer.main, layer.first = main.pointer, outputs
            if part.added is not None:
                dtype = torch.float32 if part.weights.kind is Kind.F32 else torch.bfloat16
                down, up = (Matrix(self._library, Weights.of(one.to(dtype))) for one in part.added)
                layer.down, layer.up = down.pointer, up.pointer
                held += down, up
            if part.bias_O is not None:
                held.append(part.bias_O)
                layer.bias = part.bias_O.data_ptr()
            outputs += main.outputs
        where, width = ctypes.addressof(layers), parts[0].weights.inputs

        def call(input_QI: Tensor, _held: object = held) -> Tensor:
            assert input_QI.shape[1] == width, "inputs of another width than the weights"
            rows_QI, out_QO = input_QI.contiguous(), input_QI.new_empty(input_QI.shape[0], outputs)
            self._library.pasta_linear(
                where, len(parts), rows_QI.data_ptr(), out_QO.data_ptr(), rows_QI.shape[0], width,
                outputs, torch.get_num_threads(),
            )  # fmt: skip
            return out_QO

        return call

    def rms_norm(self, input_NI: Tensor, weight_I: Tensor, epsilon: float) -> Tensor:
        rows_NI, width = input_NI.contiguous(), weight_I.shape[0]
        out_NI = torch.empty_like(rows_NI)
        self._library.pasta_rms_norm(
            rows_NI.data_ptr(), weight_I.data_ptr(), out_NI.data_ptr(), rows_NI.numel() // width,
            width, epsilon, torch.get_num_threads(),
        )  # fmt: skip
        return out_NI

    def gated(self, gate_up_N2I: Tensor, gelu: bool) -> Tensor:
        rows, width = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
        out_NI = gate_up_N2I.new_empty(rows, width)
        self._library.pasta_gated(
            gate_up_N2I.data_ptr(), out_NI.data_ptr(), rows, width, gelu, torch.get_num_threads()
        )
        return out_NI

    def rotate_(self, heads_QHD: Tensor, cos_QD: Tensor, sin_QD: Tensor) -> None:
        tokens, heads, width = heads_QHD.shape
        self._library.pasta_rotate(
            heads_QHD.data_ptr(), cos_QD.data_ptr(), sin_QD.data_ptr(), tokens, heads, width // 2,
            heads_QHD.stride(0), torch.get_num_threads(),
        )  # fmt: skip

    def attend(
        self, query_QHD: Tensor, key_QGD: Tensor, value_QGD: Tensor, keys_GSD: Tensor,
        values_GSD: Tensor, table_N6: Tensor, masks: Tensor, scaling: float,
    ) -> Tensor:  # fmt: skip
        out_QHD = torch.empty(query_QHD.shape)
        news = (query_QHD, key_QGD, value_QGD)
        all_of = (*news, keys_GSD, values_GSD, table_N6, masks, out_QHD)
        self._library.pasta_attend(
            *(tensor.data_ptr() for tensor in all_of), len(table_N6), query_QHD.shape[1],
            *keys_GSD.shape, *(new.stride(0) for new in news), scaling, torch.get_num_threads(),
            keys_GSD.dtype == torch.bfloat16,
        )  # fmt: skip
        return out_QHD


def find_compiler() -> str | None:
    """Return a C++ compiler; None if there is none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@cache
def operators() -> NativeOperators | None:
    """Return the C++ operators, built now if this machine has none yet; None without a compiler."""
    if (compiler := find_compiler()) is None:
        _log.warning("steps take several times as long: there is no C++ compiler (install g++)")
        return None
    try:
        return NativeOperators(_built(compiler, Path.home() / ".cache" / "pasta-decoding"))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = next(iter(said.strip().splitlines()), "")
        _log.warning("steps take several times as long: no operators could be built (%s)", reason)
        return None


def _built(compiler: str, folder: Path) -> Path:
    """Return the library for these sources, this compiler and this processor: found, or built."""
    runtime = next(Path(torch.__file__).parent.glob("lib/lib*omp*.so*"), None)
    # Two OpenMP runtimes in a process would spin against each other, so it is linked to torch's;
    # `--as-needed` leaves out the compiler's own.
    linked = ["-Wl,--as-needed", str(runtime)] if runtime else []
    command = [compiler, *FLAGS, *map(str, SOURCES), *linked]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = [path.read_bytes() for path in (*SOURCES, *HERE.glob("*.h"))]
    settings = " ".join([*FLAGS, *linked, _processor()]).encode()
    digest = hashlib.sha256(b"\0".join([version, settings, *sources])).hexdigest()[:16]
    path = folder / "operators" / f"{digest}.so"
    if not path.exists():
        _log.info("building the operators of the fast engine (once for this machine)")
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            subprocess.run(
                [*command, "-o", str(partial)], capture_output=True, text=True, check=True
            )
    return path


def _processor() -> str:
    """Return the processor's features, as far as the system names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return " ".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
