"""Commands on models and files: `models`, `pull`, `export`."""

import os
import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.defaults import default_adapter
from pasta_decoding.api.opening import gguf_type, write_export
from pasta_decoding.cli.console import cache_folder, say
from pasta_decoding.cli.options import ModelOption, command
from pasta_decoding.errors import PastaError
from pasta_decoding.models.bases import BASES, cache_entries
from pasta_decoding.models.catalog import (
    find_adapter,
    known_base_of,
    model_beside,
    resolve,
    shipped_adapters,
)
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.load import load_model
from pasta_decoding.models.pull import pull as fetch

GGUF_WARNING = (
    "Other programs must never sample the control tokens, or parts of answers are missing. "
    "llama.cpp's commands obey the file since July 2026; others: see its general.description."
)


@command("pasta models", "pasta models --clean")
def models(
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove exports, which Pasta rewrites when needed.")
    ] = False,
) -> None:
    """List known base models, shipped adapters, and the files of the cache with their sizes."""
    cache = cache_folder()
    entries = sorted(cache_entries(cache), key=lambda entry: (-entry.size_bytes, entry.path))
    if clean:
        entries = [entry for entry in entries if entry.kind == "export"]
    else:
        for base in BASES.values():
            text = f"{base.name} ({base.hub}, {base.licence}; {base.memory_gb:g} GB of memory)"
            typer.echo(f"{base.disk_gb * 1000:9.1f} MB  base      {text}")
        for name in shipped_adapters():
            files = [path for path in find_adapter(name).rglob("*") if path.is_file()]
            size_bytes = sum(path.stat().st_size for path in files)
            typer.echo(f"{size_bytes / 1e6:9.1f} MB  adapter   {name}")
    for kind, path, size_bytes in entries:
        if clean and path.is_dir():
            shutil.rmtree(path)
        elif clean:
            path.unlink()
        typer.echo(f"{size_bytes / 1e6:9.1f} MB  {kind:8}  {path.relative_to(cache)}")
    total_mb = sum(entry.size_bytes for entry in entries) / 1e6
    say(f"{total_mb:.1f} MB {'freed' if clean else f'in {cache}'}")


@command("pasta pull", "pasta pull qwen2.5-coder-1.5b")
def pull(
    name: Annotated[str | None, typer.Argument(help=f"One of {', '.join(BASES)}.")] = None,
) -> None:
    """Download a known base model into the cache, once. Default: the default adapter's base."""
    cache = cache_folder()
    typer.echo(fetch(cache, name or known_base_of(default_adapter(cache, os.environ))))


@command(
    "pasta export balanced --out balanced.gguf --dtype Q8_0",
    "pasta export runs/mine/adapter --to hf --out mine",
)
def export(
    adapter: Annotated[str, typer.Argument(help="Name or folder of an adapter.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File (gguf) or folder (hf) to write.")],
    to: Annotated[
        Literal["gguf", "hf"], typer.Option(help="llama.cpp's file format, or Hugging Face's.")
    ] = "gguf",
    dtype: Annotated[
        str, typer.Option(help="Number format of a GGUF file, as in `pasta run`; auto is float16.")
    ] = "auto",
    model: ModelOption = None,
) -> None:
    """Write base model and adapter as one: a GGUF file, or a merged Hugging Face checkpoint."""
    file_type = gguf_type(EngineConfig(dtype=dtype).dtype)
    folder = find_adapter(adapter)
    source = resolve(str(folder), model_beside(str(folder), model), cache_folder())
    if to == "hf":
        loaded = load_model(source)
        if loaded.warning is not None:
            say(loaded.warning)
        export_hf(loaded, out, adapter=folder)
    elif out.is_dir():
        raise PastaError(f"{out} is a folder, not a file to write")
    else:
        write_export(source, out, file_type)
        say(GGUF_WARNING)
    typer.echo(out)
