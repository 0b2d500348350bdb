"""The operators of compiled passes: C++, compiled into each program's archive."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

SOURCES = [Path(__file__).with_name(name) for name in ("attention.cpp", "packed_linear.cpp")]
ENTRY = "data/pasta/operators.so"
"""Where they lie in a compiled program's archive, below its one folder."""

LIBRARY: Any = torch.library.Library("pasta", "DEF")  # type: ignore[no-untyped-call]
"""Who has an operator defines it here; the C++ implements it."""


def add_operators(program: Path, scratch: Path) -> None:
    """Compile the operators for this processor and put them into a compiled program's archive."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchOptions(
        vec_isa=pick_vec_isa(),
        include_pytorch=True,
        warning_all=False,
        extra_flags=["-ftree-loop-vectorize"],
    )
    builder = CppBuilder("operators", [str(source) for source in SOURCES], options, str(scratch))
    builder.build()
    with zipfile.ZipFile(program, "a") as archive:
        archive.write(builder.get_target_file_path(), _entry(archive))


def load_operators(program: Path, folder: Path) -> None:
    """Load a compiled program's operators, unpacked into `folder`; once a process is enough."""
    if hasattr(torch.ops.pasta, "see"):
        return
    with zipfile.ZipFile(program) as archive:
        operators: Any = torch.ops
        operators.load_library(archive.extract(_entry(archive), folder))


def _entry(archive: zipfile.ZipFile) -> str:
    return f"{archive.namelist()[0].partition('/')[0]}/{ENTRY}"
