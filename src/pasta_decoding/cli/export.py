"""The command `export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import gguf_type, write_export
from pasta_decoding.cli.files import base_folder, say
from pasta_decoding.cli.options import Base
from pasta_decoding.errors import PastaError

GGUF_WARNING = (
    "Programs other than Pasta must never sample the control tokens, or parts of answers are "
    "missing. llama.cpp's own commands obey the file in that since July 2026; for others see its "
    "general.description."
)


class Target(StrEnum):
    """What `pasta export` writes."""

    gguf = "gguf"
    hf = "hf"


def export(
    adapter: Annotated[str, typer.Argument(help="Folder of an adapter, or a shipped one's name.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File (gguf) or folder (hf) to write.")],
    to: Annotated[Target, typer.Option(help="llama.cpp's file format, or Hugging Face's.")] = (
        Target.gguf
    ),
    dtype: Annotated[
        str, typer.Option(help="Number format of a GGUF, as of `pasta run`; auto is float16.")
    ] = "auto",
    model: Base = None,
) -> None:
    """Write base model and adapter as one: a GGUF file, or a merged Hugging Face checkpoint."""
    from pasta_decoding.models.export import export_hf
    from pasta_decoding.models.load import find_adapter, load_model

    file_type = gguf_type(EngineConfig(dtype=dtype).dtype)
    folder, base = find_adapter(adapter), base_folder(model)
    if to is Target.hf:
        loaded = load_model(base, folder)
        if loaded.warning is not None:
            say(loaded.warning)
        export_hf(loaded, out, adapter=folder)
    elif out.is_dir():
        raise PastaError(f"{out} is a folder", hint="Give -o the name of a file.")
    else:
        write_export(base, folder, out, file_type)
        say(GGUF_WARNING)
    typer.echo(out)
