"""Which engine a command decodes with, and the options that say so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pasta_decoding.cli.files import base_folder, cache_folder, say
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.loading import DEFAULT_ADAPTER

if TYPE_CHECKING:
    from pasta_decoding.remote.decoder import RemoteDecoder
    from pasta_decoding.runtime.decoder import Decoder
    from pasta_decoding.runtime.local import LocalDecoder

Told = TypeVar("Told", bound="Decoder")
REMOTE_OPTIONS = frozenset({"base_url", "remote_key"})
"""Of no use to commands that need an engine in this process."""


class EngineName(StrEnum):
    """What computes the model."""

    auto = "auto"
    torch = "torch"
    llama = "llama"
    remote = "remote"


class Dtype(StrEnum):
    """Number formats of the torch engine; float32 is the reference."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class FileType(StrEnum):
    """Number formats of a GGUF file."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q6_K = "Q6_K"
    Q5_K_M = "Q5_K_M"
    Q4_K_M = "Q4_K_M"
    Q4_0 = "Q4_0"


Adapter = Annotated[
    str,
    typer.Option(
        help="Folder of an adapter, or the name of a shipped one; `none` for the base model alone, "
        "which writes sequentially."
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the base model, or its name on the hub; the embedded one if left out. Or a "
        "GGUF file that `pasta export` wrote, adapter and all."
    ),
]
Engine = Annotated[
    EngineName,
    typer.Option(
        help="auto takes torch on a GPU and where llama is not installed or cannot run the model; "
        "remote asks the servers of --base-url, which hold the merged checkpoint."
    ),
]
BaseUrls = Annotated[
    list[str] | None,
    typer.Option(
        help="remote: a server of OpenAI-style completions, such as http://localhost:8000/v1. May "
        "be repeated: replicas of one model."
    ),
]
RemoteKey = Annotated[
    str | None,
    typer.Option(
        envvar="PASTA_REMOTE_KEY",
        help="remote: the key that the servers ask for.",
        show_envvar=True,
    ),
]
Join = Annotated[
    Joining | None,
    typer.Option(
        help="How the main thread comes to see finished chunks: kv joins their keys, text reads "
        "them again. Else as the checkpoint was trained."
    ),
]
Precision = Annotated[
    Dtype,
    typer.Option(help="torch: of weights and cache; auto takes bfloat16 where it is native."),
]
Quant = Annotated[
    FileType,
    typer.Option(
        help="llama: number format of the weights. Fewer bits are faster, and small models lose "
        "the thread with them; those with a K are for larger models."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="torch: cpu, cuda, cuda:1, ...; a GPU is taken where there is one."),
]
Context = Annotated[int, typer.Option("--ctx", min=64, help="Tokens that the cache holds.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Processor threads; all cores if left out.")
]


@dataclass(frozen=True, slots=True)
class Loading:
    """Which checkpoint, on which engine: the options of every command that loads a model."""

    adapter: Adapter = DEFAULT_ADAPTER
    model: Model = None
    engine: Engine = EngineName.auto
    join: Join = None
    dtype: Precision = Dtype.auto
    quant: Quant = FileType.F16
    context: Context = 8192
    threads: Threads = None
    device: Device = None
    base_url: BaseUrls = None
    remote_key: RemoteKey = None

    def decoder(self) -> LocalDecoder | RemoteDecoder:
        """Load the checkpoint onto the engine, or find the servers that have it."""
        if self.engine is not EngineName.remote:
            if self.base_url:
                raise PastaError("--base-url is for servers", hint="Give --engine remote, too.")
            return self.local_decoder()
        return _told(self._remote(), Joining.text)

    def local_decoder(self) -> LocalDecoder:
        """Load base model and adapter onto the engine."""
        decoder = self._load()
        return _told(decoder, decoder.joining)

    def _remote(self) -> RemoteDecoder:
        from pasta_decoding.remote.decoder import remote_decoder

        if self.model is not None and self.model.suffix == ".gguf":
            raise PastaError(
                "the remote engine needs the tokenizer's files",
                hint="Give --model the folder that is served, or leave it out.",
            )
        base, folder = self.folders()
        named = [self.adapter, *([] if self.model is None else [str(self.model)])]
        return remote_decoder(
            base,
            folder,
            self.base_url or [],
            names=[*named, *(Path(name).name for name in named)],
            api_key=self.remote_key,
            joining=self.join,
        )

    def _load(self) -> LocalDecoder:
        if self.engine is EngineName.remote:
            raise PastaError(
                "this command decodes in this process, not on servers",
                hint="Leave out --engine remote.",
            )
        from pasta_decoding.models.loading import default_device
        from pasta_decoding.runtime.local import llama_decoder, torch_decoder

        size: Any = {"cells": self.context, "threads": self.threads, "joining": self.join}
        if self.model is not None and self.model.suffix == ".gguf":
            refuse_beside_gguf(self.adapter, self.engine)
            return llama_decoder(self.model, **size)
        base, folder = self.folders()
        engine, number_format = self.computing(base, folder)
        if engine is EngineName.llama:
            return llama_decoder(exported(base, folder, self.quant), **size)
        device = self.device or default_device()
        return torch_decoder(base, folder, dtype=number_format, device=device, **size)

    def folders(self) -> tuple[Path, Path | None]:
        """Return where the weights of the model are, and the adapter's folder if there is one."""
        from pasta_decoding.models.loading import NO_ADAPTER, find_adapter, holds_weights

        if self.adapter == NO_ADAPTER:
            return base_folder(self.model), None
        folder = find_adapter(self.adapter)
        return folder if holds_weights(folder) else base_folder(self.model), folder

    def computing(self, weights: Path, adapter: Path | None) -> tuple[EngineName, str]:
        """Return the engine that will be taken for these weights, and its number format."""
        from pasta_decoding.models.loading import default_device, native_dtype

        device = self.device or default_device()
        may_be_llama = self.engine is EngineName.auto and device == "cpu"
        if self.engine is EngineName.llama or (may_be_llama and llama_can_run(weights, adapter)):
            return EngineName.llama, self.quant.value
        dtype = native_dtype(device) if self.dtype is Dtype.auto else self.dtype.value
        return EngineName.torch, dtype


def _told(decoder: Told, joining: Joining) -> Told:
    """Return the same, after a warning where a checkpoint is used as it was not trained to be."""
    if not decoder.trained:
        say(f"the checkpoint was not trained for the join {joining}: expect worse text")
    if decoder.warning is not None:
        say(decoder.warning)
    return decoder


def with_loading(
    command: Callable[..., None], *, without: Collection[str] = ()
) -> Callable[..., None]:
    """Give a command the options of `Loading`, but for some, in place of its `loading`."""
    own = inspect.signature(command, eval_str=True).parameters
    every = inspect.signature(Loading, eval_str=True).parameters
    options = {name: option for name, option in every.items() if name not in without}

    @wraps(command)
    def call(**values: Any) -> None:
        loading = Loading(**{name: values.pop(name) for name in options})
        command(**values, loading=loading)

    shown = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in own.items()
        for parameter in (options.values() if name == "loading" else [one])
    ]
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return call


def refuse_beside_gguf(adapter: str, engine: EngineName) -> None:
    """Refuse what a GGUF file, adapter and all, leaves no choice about."""
    if engine is EngineName.torch:
        raise PastaError(
            "the torch engine does not read GGUF files",
            hint="Leave --engine out, or give --model a Hugging Face folder.",
        )
    if adapter != DEFAULT_ADAPTER:
        raise PastaError(
            "a GGUF file holds its adapter already", hint="Leave out --adapter, or the GGUF file."
        )


def llama_can_run(weights: Path, adapter: Path | None) -> bool:
    """Is llama.cpp installed, has it a translation of the model, and the adapter's positions?"""
    from pasta_decoding.engines.llamacpp import library
    from pasta_decoding.lang.positions import scheme_named
    from pasta_decoding.models import checkpoint as checkpoints
    from pasta_decoding.models.gguf import has_translation

    try:
        library()
        known = adapter is None or scheme_named(checkpoints.load(adapter).scheme).consecutive
        return known and has_translation(weights)
    except PastaError:  # a broken checkpoint is told by whoever loads it
        return False


def exported(base: Path, adapter: Path | None, file_type: FileType) -> Path:
    """Return the checkpoint as a GGUF in the user's cache, made now if it is not there."""
    from pasta_decoding.engines.llamacpp import library
    from pasta_decoding.models.export import cached_name

    library()  # its absence is told before the work
    path = cache_folder() / "gguf" / cached_name(base, adapter, file_type.value)
    if not path.exists():
        say(f"writing {path} (once)")
        write_export(base, adapter, path, file_type)
    return path


def write_export(base: Path, adapter: Path | None, path: Path, file_type: FileType) -> None:
    """Write a checkpoint as one GGUF file."""
    from pasta_decoding.engines.llamacpp import library, quantize
    from pasta_decoding.models.export import export_gguf
    from pasta_decoding.models.gguf import FLOAT_TYPES
    from pasta_decoding.models.loading import load_model

    if file_type.value not in FLOAT_TYPES:
        library()  # its absence is told before the work
    loaded = load_model(base, adapter)
    if loaded.warning is not None:
        say(loaded.warning)
    export_gguf(loaded, path, file_type.value, quantize=quantize, progress=True)


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
    file_type: Annotated[FileType, typer.Option("--type", help="Number format of a GGUF.")] = (
        FileType.F16
    ),
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the base model, or its name on the hub; else the embedded one."
        ),
    ] = None,
) -> None:
    """Write base model and adapter as one: a GGUF file, or a merged Hugging Face checkpoint."""
    from pasta_decoding.models.export import export_hf
    from pasta_decoding.models.loading import find_adapter, load_model

    folder, base = find_adapter(adapter), base_folder(model)
    if to is Target.hf:
        loaded = load_model(base, folder)
        if loaded.warning is not None:
            say(loaded.warning)
        export_hf(loaded, out)
    elif out.is_dir():
        raise PastaError(f"{out} is a folder", hint="Give -o the name of a file.")
    else:
        write_export(base, folder, out, file_type)
        say(GGUF_WARNING)
    typer.echo(out)
