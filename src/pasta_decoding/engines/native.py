"""A decoder's layers by C++ code that is built once for a machine: a pass is one call of it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from pasta_decoding.engines.layers import AttentionMetadata
from pasta_decoding.engines.weights import Linear, ModelWeights, stored
from pasta_decoding.files import scratch, writable, written_whole
from pasta_decoding.gguf_file import GgufTensor

FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
HERE = Path(__file__).parent
PACKED = frozenset({Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K})
"""Formats whose weights stay in their blocks, and give the file's values exactly."""

_log = logging.getLogger(__name__)


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):  # see packed.h
    _fields_ = _fields((_POINTER, "rows"), (_NUMBER, "kind row_bytes outputs inputs"))

    def __init__(self, weight: GgufTensor) -> None:
        if weight.kind not in PACKED | {Kind.F32, Kind.BF16}:
            weight = stored(weight[:])
        self.held = held = np.ascontiguousarray(weight.rows())
        super().__init__(
            held.ctypes.data, int(weight.kind), held.strides[0], len(held), weight.shape[-1]
        )


class _Layer(ctypes.Structure):  # this and the next ones: see decoder.h
    _fields_ = _fields(
        (_POINTER, "qkv out gate_up down"),
        (_POINTER, "input_norm query_norm key_norm attention_norm mlp_input_norm mlp_norm"),
        (_POINTER, "keys values"),
        (_NUMBER, "kind"),
    )


class _Metadata(ctypes.Structure):
    _fields_ = _fields((_POINTER, "cos sin segments slots masks"), (_NUMBER, "count"))


class _Model(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "layers norm"),
        (_NUMBER, "count width heads kv_heads head_width slots"),
        (ctypes.c_float, "epsilon scaling"),
        (ctypes.c_bool, "gelu bfloat16"),
    )


class NativeLinear:
    """Linear layers of the same inputs as one, their outputs beside each other, packed."""

    def __init__(self, library: Any, parts: Sequence[Linear]) -> None:
        self._library, self._inputs = library, parts[0].weight.shape[-1]
        self._outputs = sum(part.weight.shape[0] for part in parts)
        dtype = torch.bfloat16 if parts[0].weight.kind in PACKED | {Kind.BF16} else torch.float32
        downs = [part.added[0] for part in parts if part.added is not None]
        self._down: NativeLinear | None = None
        if downs:
            self._down = NativeLinear(library, [Linear(stored(torch.cat(downs).to(dtype)))])
        self.pointer: int = library.pasta_linear(self._down.pointer if self._down else None)
        weakref.finalize(self, library.pasta_free, self.pointer)
        for part in parts:
            up_OR = None if part.added is None else part.added[1].float().contiguous()
            rank = 0 if up_OR is None else up_OR.shape[1]
            library.pasta_add(
                *(self.pointer, _Rows(part.weight), _address(up_OR), rank, _address(part.bias_O)),
                torch.get_num_threads(),
            )

    def __call__(self, input_QI: Tensor) -> Tensor:
        assert input_QI.shape[1] == self._inputs, "inputs of another width than the weights"
        rows_QI, out_QO = input_QI.contiguous(), input_QI.new_empty(len(input_QI), self._outputs)
        self._library.pasta_multiply(
            self.pointer, _address(rows_QI), _address(out_QO), len(rows_QI), torch.get_num_threads()
        )
        return out_QO


class NativeLayers:
    """Does as `TorchLayers`, with weights as they are, and adapters beside them."""

    def __init__(self, library: Any, weights: ModelWeights, slots_2LGSD: Tensor) -> None:
        config, (_, count, kv_heads, slots, head_width) = weights.config, slots_2LGSD.shape
        self._library, self._kinds = library, sorted(set(weights.kinds))
        self._layers = (_Layer * count)()
        self._norm_I = weights.norm("model.norm")
        self._held: list[object] = [slots_2LGSD]  # what the structs point to
        for number, layer in enumerate(weights.layers()):
            own = self._layers[number]
            own.kind = self._kinds.index(weights.kinds[number])
            own.keys, own.values = map(_address, slots_2LGSD[:, number])
            linear = {name: NativeLinear(library, parts) for name, parts in layer.linear.items()}
            for name, one in linear.items():
                setattr(own, name, one.pointer)
            for name, norm_I in layer.norms.items():
                setattr(own, name, _address(norm_I))
            self._held += linear, layer.norms
        self._model = _Model(
            ctypes.addressof(self._layers), _address(self._norm_I), count, config.hidden_size,
            config.num_attention_heads, kv_heads, head_width, slots, config.rms_norm_eps,
            weights.scaling, weights.is_gemma, slots_2LGSD.dtype == torch.bfloat16,
        )  # fmt: skip
        self.head = NativeLinear(library, [weights.linear("lm_head")])

    def __call__(self, hidden_QI: Tensor, kinds: Mapping[str, AttentionMetadata]) -> Tensor:
        hidden_QI = hidden_QI.contiguous()
        ordered = [kinds[kind] for kind in self._kinds]
        structs = [_Metadata(*map(_address, one), len(one.table_N5)) for one in ordered]
        metadata = (_Metadata * len(structs))(*structs)
        self._library.pasta_pass(
            self._model, metadata, _address(hidden_QI), len(hidden_QI), torch.get_num_threads()
        )
        return hidden_QI


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def find_compiler() -> str | None:
    """Return a C++ compiler; None if there is none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@cache
def library(folder: Path) -> Any:
    """Return the C++ code, built now unless `folder` holds it; None if it cannot be built."""
    if (compiler := find_compiler()) is None:
        _log.warning("the engine fast is slow here: there is no C++ compiler (install g++)")
        return None
    try:
        found = _loaded(compiler, folder)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = next(iter(said.strip().splitlines()), "")
        _log.warning("the engine fast is slow here: no operators could be built (%s)", reason)
        return None
    rows, count = ctypes.POINTER(_Rows), ctypes.c_int
    for name, types in {
        "pasta_linear": (_POINTER,),
        "pasta_free": (_POINTER,),
        "pasta_add": (_POINTER, rows, _POINTER, _NUMBER, _POINTER, count),
        "pasta_multiply": (_POINTER, _POINTER, _POINTER, _NUMBER, count),
        "pasta_pass": (ctypes.POINTER(_Model), _POINTER, _POINTER, _NUMBER, count),
    }.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, None
    found.pasta_linear.restype = _POINTER
    return found


def _loaded(compiler: str, folder: Path) -> ctypes.CDLL:
    """Load the library from `folder`, or from elsewhere if nothing may be run there."""
    path = _built(compiler, folder)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("what is built cannot be run there: %s", error)
        return ctypes.CDLL(str(_built(compiler, Path(scratch().name))))


def _built(compiler: str, folder: Path) -> Path:
    """Return the library for these sources, this compiler and this processor: found, or built."""
    runtime = next(Path(torch.__file__).parent.glob("lib/lib*omp*.so*"), None)
    # Two OpenMP runtimes in a process would spin against each other, so it is linked to torch's;
    # `--as-needed` leaves out the compiler's own.
    linked = ["-Wl,--as-needed", str(runtime)] if runtime else []
    # What the compiler defines names itself and all that it may use of this processor.
    macros = [compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    defined = subprocess.run(macros, capture_output=True, text=True, check=True).stdout.encode()
    sources = sorted(HERE.glob("*.cpp"))
    texts = [path.read_bytes() for path in (*sources, *sorted(HERE.glob("*.h")))]
    settings = " ".join([*FLAGS, *linked]).encode()
    digest = hashlib.sha256(b"\0".join([settings, defined, *texts])).hexdigest()[:16]
    path = folder / f"{digest}.so"
    if not path.exists():
        path = writable(folder, "the operators of the fast engine") / path.name
        _log.info("building the operators of the fast engine (once for this machine)")
        with written_whole(path) as partial:
            command = [compiler, *FLAGS, *map(str, sources), *linked, "-o", str(partial)]
            subprocess.run(command, capture_output=True, text=True, check=True)
    return path
