"""Which engine a command decodes with, and the options that say so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.api.opening import (
    choose_engine,
    folders,
    open_decoder,
    open_local,
    write_export,
)
from pasta_decoding.api.settings import Dtype, EngineName, FileType, LoadSettings
from pasta_decoding.cli.files import base_folder, place, say
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining

if TYPE_CHECKING:
    from pasta_decoding.api.model import Model as LoadedModel
    from pasta_decoding.remote.decoder import RemoteDecoder
    from pasta_decoding.runtime.local import LocalDecoder


Adapter = Annotated[
    str | None,
    typer.Option(
        help="Folder of an adapter, or the name of a shipped one; balanced if left out, and "
        "balanced-text on servers. `none` takes the base model alone, which writes sequentially.",
        show_default=False,
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the base model, or its name on the hub; the embedded one if left out. Or a "
        "whole model, adapter and all: a GGUF or a merged folder that `pasta export` wrote."
    ),
]
Engine = Annotated[
    EngineName,
    typer.Option(
        help="auto takes, on a CPU, compiled where `pasta compile` made it, else llama where it is "
        "installed and can run the model, else torch; on a GPU torch. remote asks the servers of "
        "--base-url, which hold the merged checkpoint."
    ),
]


def local_engine(name: str) -> EngineName:
    """Read the engine of a command that cannot decode on servers."""
    if name not in LOCAL_ENGINES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(LOCAL_ENGINES)}.")
    return EngineName(name)


LOCAL_ENGINES = [name.value for name in EngineName if name is not EngineName.remote]
LocalEngine = Annotated[
    EngineName,
    typer.Option(
        parser=local_engine,
        metavar=f"[{'|'.join(LOCAL_ENGINES)}]",
        help="auto takes torch on a GPU and where llama is not installed or cannot run the model.",
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


_DEFAULT = LoadSettings()


@dataclass(frozen=True, slots=True)
class Loading:
    """Which checkpoint, on which engine: the options of every command that loads a model."""

    adapter: Adapter = _DEFAULT.adapter
    model: Model = _DEFAULT.model
    engine: Engine = _DEFAULT.engine
    join: Join = _DEFAULT.join
    dtype: Precision = _DEFAULT.dtype
    quant: Quant = _DEFAULT.quant
    context: Context = _DEFAULT.context
    threads: Threads = _DEFAULT.threads
    device: Device = _DEFAULT.device
    base_url: BaseUrls = None
    remote_key: RemoteKey = _DEFAULT.remote_key

    @property
    def settings(self) -> LoadSettings:
        """The same for the front door."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return LoadSettings(**values | {"base_url": tuple(self.base_url or ())})

    def open(self) -> LoadedModel:
        """Load the checkpoint onto the engine, or find the servers that have it."""
        from pasta_decoding.api.model import Model

        return Model(self.decoder())

    def decoder(self) -> LocalDecoder | RemoteDecoder:
        """Return what is underneath a model, for who measures steps."""
        return open_decoder(self.settings, place())

    def local_decoder(self) -> LocalDecoder:
        """Return the same on an engine in this process; PastaError for servers."""
        return open_local(self.settings, place())

    def of(self, adapter: str) -> Loading:
        """Return the same for another adapter, or for a whole model in its place."""
        from pasta_decoding.models.loading import is_whole

        model = None if is_whole(Path(adapter)) else self.model
        return replace(self, adapter=adapter, model=model)

    def folders(self) -> tuple[Path, Path | None]:
        """Return where the weights of the model are, and the adapter's folder if there is one."""
        return folders(self.settings, place())

    def computing(self, weights: Path, adapter: Path | None) -> tuple[EngineName, str]:
        """Return the engine that will be taken for these weights, and its number format."""
        return choose_engine(self.settings, weights, adapter, place())


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
        write_export(base, folder, out, file_type, say)
        say(GGUF_WARNING)
    typer.echo(out)
