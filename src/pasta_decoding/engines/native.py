"""A decoder's layers by C++ code that is built once for a machine: a pass is one call of it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
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
from gguf import GGMLQuantizationType as GgmlType
from torch import Tensor

from pasta_decoding.engines.layers import AttentionMetadata, Segment
from pasta_decoding.engines.weights import Linear, ModelWeights, stored
from pasta_decoding.errors import PastaError
from pasta_decoding.files import scratch, sha256, writable, write_text, written_whole
from pasta_decoding.gguf_file import GgufFile, GgufTensor

FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
HERE = Path(__file__).parent
PACKED = frozenset(
    {
        GgmlType.Q4_0,
        GgmlType.Q4_1,
        GgmlType.Q5_0,
        GgmlType.Q5_1,
        GgmlType.Q8_0,
        GgmlType.Q4_K,
        GgmlType.Q5_K,
        GgmlType.Q6_K,
    }
)
"""Formats whose weights stay in their blocks, and give the file's values exactly."""
_FLOATS = frozenset({GgmlType.F32, GgmlType.F16, GgmlType.BF16})

_log = logging.getLogger(__name__)


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


_POINTER = ctypes.c_void_p
_NUMBER = ctypes.c_int64


class FileMatrix(ctypes.Structure):
    """A matrix as a file has it: see matrix.h. Formats that are not held become float32."""

    _fields_ = _fields((_POINTER, "rows"), (_NUMBER, "type row_bytes outputs inputs"))

    def __init__(self, weight: GgufTensor) -> None:
        if weight.kind not in PACKED | _FLOATS:
            weight = stored(weight[:])
        rows_ON = np.ascontiguousarray(weight.rows())
        self._rows_ON = rows_ON  # the struct points to it
        outputs, row_bytes = rows_ON.shape
        super().__init__(
            rows_ON.ctypes.data, int(weight.kind), row_bytes, outputs, weight.shape[-1]
        )


class _Layer(ctypes.Structure):  # this and the next ones: see decoder.h
    _fields_ = _fields(
        (_POINTER, "qkv out gate_up down"),
        (_POINTER, "input_norm query_norm key_norm attention_norm mlp_input_norm mlp_norm"),
        (_POINTER, "keys values"),
        (_NUMBER, "attention_kind"),
    )


class _Metadata(ctypes.Structure):
    _fields_ = _fields((_POINTER, "cos sin segments slots masks"), (_NUMBER, "segment_count"))


class _Model(ctypes.Structure):
    _fields_ = _fields(
        (_POINTER, "layers norm"),
        (_NUMBER, "layer_count width heads kv_heads head_width slots"),
        (ctypes.c_float, "epsilon scaling"),
        (ctypes.c_bool, "is_gelu is_bfloat16"),
    )


STRUCT_BYTES = {
    "FileMatrix": ctypes.sizeof(FileMatrix),
    "Segment": ctypes.sizeof(_NUMBER) * len(Segment._fields),
    "Metadata": ctypes.sizeof(_Metadata),
    "Layer": ctypes.sizeof(_Layer),
    "Model": ctypes.sizeof(_Model),
}
"""Sizes of the structs that both sides know, in the order of `pasta_struct_bytes`."""


class NativeLinear:
    """Linear layers of the same inputs as one, their outputs beside each other, packed.

    Raises MemoryError if there is no memory for the packed weights, or for a call.
    """

    def __init__(self, operators: Any, parts: Sequence[Linear]) -> None:
        self._operators = operators
        self._inputs = parts[0].weight.shape[-1]
        self._outputs = sum(part.weight.shape[0] for part in parts)
        self._down = self._joined_down(parts)
        self.pointer: int = operators.pasta_new_linear(self._down and self._down.pointer)
        weakref.finalize(self, operators.pasta_free_linear, self.pointer)
        for part in parts:
            up_OR = None if part.added is None else part.added[1].float().contiguous()
            operators.pasta_add_part(
                self.pointer,
                FileMatrix(part.weight),
                _address(up_OR),
                0 if up_OR is None else up_OR.shape[1],
                _address(part.bias_O),
                torch.get_num_threads(),
            )

    def _joined_down(self, parts: Sequence[Linear]) -> NativeLinear | None:
        """Return the first matrices of all adapters as one layer, if there are any."""
        downs = [part.added[0] for part in parts if part.added is not None]
        if not downs:
            return None
        is_small = parts[0].weight.kind in PACKED | {GgmlType.BF16}
        down_RI = torch.cat(downs).to(torch.bfloat16 if is_small else torch.float32)
        return NativeLinear(self._operators, [Linear(stored(down_RI))])

    def __call__(self, input_QI: Tensor) -> Tensor:
        assert input_QI.shape[1] == self._inputs, "inputs of another width than the weights"
        input_QI = input_QI.contiguous()
        tokens = len(input_QI)
        out_QO = input_QI.new_empty(tokens, self._outputs)
        threads = torch.get_num_threads()
        self._operators.pasta_multiply(
            self.pointer, _address(input_QI), _address(out_QO), tokens, threads
        )
        return out_QO


class NativeLayers:
    """Does as `TorchLayers`, with weights as they are, and adapters beside them.

    Raises MemoryError if there is no memory for the packed weights, or for a pass.
    """

    def __init__(self, operators: Any, weights: ModelWeights, slots_2LGSD: Tensor) -> None:
        config = weights.config
        _, layer_count, kv_heads, slots, head_width = slots_2LGSD.shape
        self._operators = operators
        self._kinds = sorted(set(weights.kinds))
        self._layers = (_Layer * layer_count)()
        self._norm_I = weights.norm("model.norm")
        self._owners: list[object] = [slots_2LGSD]  # of the memory that structs point to
        for number, layer in enumerate(weights.layers()):
            struct = self._layers[number]
            struct.attention_kind = self._kinds.index(weights.kinds[number])
            keys_GSD, values_GSD = slots_2LGSD[:, number]
            struct.keys = _address(keys_GSD)
            struct.values = _address(values_GSD)
            for name, parts in layer.linear.items():
                linear = NativeLinear(operators, parts)
                self._owners.append(linear)
                setattr(struct, name, linear.pointer)
            for name, norm_I in layer.norms.items():
                self._owners.append(norm_I)
                setattr(struct, name, _address(norm_I))
        self._model = _Model(
            layers=ctypes.addressof(self._layers),
            norm=_address(self._norm_I),
            layer_count=layer_count,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_width=head_width,
            slots=slots,
            epsilon=config.rms_norm_eps,
            scaling=weights.scaling,
            is_gelu=weights.is_gemma,
            is_bfloat16=slots_2LGSD.dtype == torch.bfloat16,
        )
        self.head = NativeLinear(operators, [weights.linear("lm_head")])

    def __call__(self, hidden_QI: Tensor, kinds: Mapping[str, AttentionMetadata]) -> Tensor:
        hidden_QI = hidden_QI.contiguous()
        ordered = [kinds[kind] for kind in self._kinds]
        structs = (_Metadata * len(ordered))()
        for struct, metadata in zip(structs, ordered, strict=True):
            struct.cos = _address(metadata.cos_QP)
            struct.sin = _address(metadata.sin_QP)
            struct.segments = _address(metadata.segments_N5)
            struct.slots = _address(metadata.slots)
            struct.masks = _address(metadata.masks)
            struct.segment_count = len(metadata.segments_N5)
        threads = torch.get_num_threads()
        self._operators.pasta_run_layers(
            self._model, structs, _address(hidden_QI), len(hidden_QI), threads
        )
        return hidden_QI


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def held_bytes(file: GgufFile) -> int:
    """Return how much memory the weights of a file take once they are packed."""
    return sum(map(_packed_bytes, _matrices(file)))


def is_mostly_packed(file: GgufFile) -> bool:
    """Do most weights take no more memory than in the file, or little more?"""
    weights = sum(math.prod(matrix.shape) for matrix in _matrices(file))
    packed_weights = sum(
        math.prod(matrix.shape) for matrix in _matrices(file) if matrix.kind in PACKED | _FLOATS
    )
    return 2 * packed_weights >= weights


def _matrices(file: GgufFile) -> list[GgufTensor]:
    """Return what is packed: all matrices, except embeddings that are not the head as well."""
    unpacked = "token_embd.weight" if "output.weight" in file.tensors else None
    return [
        tensor
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and name != unpacked
    ]


def _packed_bytes(matrix: GgufTensor) -> int:
    weights = math.prod(matrix.shape)
    if matrix.kind not in PACKED | _FLOATS:
        return 4 * weights
    if matrix.kind in (GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q5_K):
        return matrix.bytes_ON.nbytes + weights // 8  # five bits are packed as six
    return matrix.bytes_ON.nbytes


def find_compiler() -> str | None:
    """Return a C++ compiler; None if there is none."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@cache
def load_operators(folder: Path) -> Any:
    """Return the C++ code, built now unless `folder` holds it; None if it cannot be built.

    Raises PastaError if the code that was found has structs of other sizes than this file.
    """
    if (compiler := find_compiler()) is None:
        _log.warning("the engine fast is slow here: there is no C++ compiler (install g++)")
        return None
    try:
        operators = _load(compiler, folder)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        reason = next(iter(output.strip().splitlines()), "")
        _log.warning("the engine fast is slow here: no operators could be built (%s)", reason)
        return None
    _check_structs(operators)
    _declare_functions(operators)
    return operators


def _load(compiler: str, folder: Path) -> ctypes.CDLL:
    """Load the library from `folder`, or from a scratch folder if `folder` forbids execution."""
    path = _build(compiler, folder)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("what is built cannot be run there: %s", error)
        return ctypes.CDLL(str(_build(compiler, Path(scratch().name))))


def _build(compiler: str, folder: Path) -> Path:
    """Return the library for these sources, this compiler and this processor, built if need be."""
    runtime = next(Path(torch.__file__).parent.glob("lib/lib*omp*.so*"), None)
    # Two OpenMP runtimes in a process would spin against each other, so it is linked to torch's;
    # `--as-needed` leaves out the compiler's own.
    link_options = ["-Wl,--as-needed", str(runtime)] if runtime else []
    # The macros that a compiler defines name it, and all that it may use of this processor.
    print_macros = [compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(print_macros, capture_output=True, text=True, check=True).stdout
    sources = sorted(HERE.glob("*.cpp"))
    headers = sorted(HERE.glob("*.h"))
    settings = " ".join([*FLAGS, *link_options])
    texts = [path.read_bytes() for path in (*sources, *headers)]
    key = b"\0".join([settings.encode(), macros.encode(), *texts])
    path = folder / f"{hashlib.sha256(key).hexdigest()[:16]}.so"
    if not _is_whole(path):
        path = writable(folder, "the operators of the fast engine") / path.name
        _log.info("building the operators of the fast engine (once for this machine)")
        with written_whole(path) as partial:
            command = [compiler, *FLAGS, *map(str, sources), *link_options, "-o", str(partial)]
            subprocess.run(command, capture_output=True, text=True, check=True)
        write_text(_digest_file(path), sha256(path))
    return path


def _is_whole(library: Path) -> bool:
    """Is the library as it was built? One that a power loss cut short would end the process."""
    try:
        return _digest_file(library).read_bytes() == sha256(library).encode()
    except OSError:  # not there
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _check_structs(operators: ctypes.CDLL) -> None:
    """Raise PastaError if a struct has another size in the C++ code than here."""
    sizes = (_NUMBER * len(STRUCT_BYTES)).in_dll(operators, "pasta_struct_bytes")
    for (name, expected_bytes), built_bytes in zip(STRUCT_BYTES.items(), sizes, strict=True):
        if built_bytes != expected_bytes:
            raise PastaError(
                f"the operators of the fast engine do not fit this version of Pasta: {name} takes "
                f"{built_bytes} bytes there, {expected_bytes} here",
                hint=f"delete {operators._name}: it is built again",
            )


def _declare_functions(operators: ctypes.CDLL) -> None:
    """Give the library's functions their types, and let a failed allocation raise MemoryError."""
    threads = ctypes.c_int
    matrix = ctypes.POINTER(FileMatrix)
    model = ctypes.POINTER(_Model)
    for name, types in {
        "pasta_add_part": (_POINTER, matrix, _POINTER, _NUMBER, _POINTER, threads),
        "pasta_multiply": (_POINTER, _POINTER, _POINTER, _NUMBER, threads),
        "pasta_run_layers": (model, _POINTER, _POINTER, _NUMBER, threads),
    }.items():
        function = getattr(operators, name)
        function.argtypes = types
        function.restype = ctypes.c_int
        function.errcheck = _check_status
    operators.pasta_new_linear.argtypes = (_POINTER,)
    operators.pasta_new_linear.restype = _POINTER
    operators.pasta_new_linear.errcheck = _check_pointer
    operators.pasta_free_linear.argtypes = (_POINTER,)
    operators.pasta_free_linear.restype = None


def _check_status(status: int, _function: Any, _arguments: Any) -> None:
    if status:
        raise MemoryError("the operators of the fast engine got no memory")


def _check_pointer(pointer: Any, _function: Any, _arguments: Any) -> Any:
    if pointer is None:
        raise MemoryError("the operators of the fast engine got no memory")
    return pointer
