"""What is loaded, and where to: the settings of `pasta.load` and of every command that decodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.loading import DEFAULT_ADAPTER, is_whole


class EngineName(StrEnum):
    """What computes the model."""

    auto = "auto"
    compiled = "compiled"
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


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Which checkpoint, on which engine. Its defaults and options are everybody's.

    adapter:  None takes the default one, or that for text joins where servers decode. It or
              `model` may name a whole model instead; the other is None, then.
    engine:   auto takes servers where `base_url` names some, else the best of this machine.
    """

    adapter: Annotated[
        str | None,
        Option(
            help="Folder of an adapter, or the name of a shipped one; balanced if left out. "
            "`none` takes the base model alone, which writes sequentially.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        Path | None,
        Option(
            help="Folder of the base model, or its name on the hub; the default one if left out. "
            "Or a whole model, adapter and all: a GGUF or a merged folder that `pasta export` "
            "wrote."
        ),
    ] = None
    engine: Annotated[
        EngineName,
        Option(
            help="auto takes, on a CPU, compiled where `pasta compile` made it, else llama where "
            "it is installed and can run the model, else torch; on a GPU torch. remote asks the "
            "servers of --base-url, which hold the merged checkpoint."
        ),
    ] = EngineName.auto
    join: Annotated[
        Joining | None,
        Option(
            help="How the main thread comes to see finished chunks: kv joins their keys, text "
            "reads them again. Else as the checkpoint was trained."
        ),
    ] = None
    dtype: Annotated[
        Dtype,
        Option(help="torch: of weights and cache; auto takes bfloat16 where it is native."),
    ] = Dtype.auto
    quant: Annotated[
        FileType,
        Option(
            help="llama: number format of the weights. Fewer bits are faster, and small models "
            "lose the thread with them; those with a K are for larger models."
        ),
    ] = FileType.F16
    context: Annotated[int, Option("--ctx", min=64, help="Tokens that the cache holds.")] = (
        DEFAULT_CACHE_TOKENS
    )
    threads: Annotated[
        int | None, Option(min=1, help="Processor threads; all cores if left out.")
    ] = None
    device: Annotated[
        str | None, Option(help="torch: cpu, cuda, cuda:1, ...; a GPU is taken where there is one.")
    ] = None
    base_url: Annotated[
        tuple[str, ...],
        Option(
            help="remote: a server of OpenAI-style completions, such as http://localhost:8000/v1. "
            "May be repeated: replicas of one model."
        ),
    ] = ()
    remote_key: Annotated[
        str | None,
        Option(
            envvar="PASTA_REMOTE_KEY",
            help="remote: the key that the servers ask for.",
            show_envvar=True,
        ),
    ] = None

    def of(self, adapter: str) -> LoadSettings:
        """Return the same for another adapter, or for a whole model in its place."""
        return replace(self, adapter=adapter, model=None if is_whole(Path(adapter)) else self.model)

    @property
    def is_remote(self) -> bool:
        """Do servers decode?"""
        named = self.engine is EngineName.auto and bool(self.base_url)
        return named or self.engine is EngineName.remote

    @property
    def adapter_name(self) -> str:
        """The adapter that is meant, where no whole model is named."""
        return self.adapter or DEFAULT_ADAPTER

    @property
    def whole(self) -> Path | None:
        """The whole model that is named, if one is. Raises PastaError if more is named beside it.

        A name on the hub is not looked into.
        """
        named = [Path(name) for name in (self.model, self.adapter) if name is not None]
        found = next(filter(is_whole, named), None)
        if found is not None and len(named) > 1:
            raise beside_whole(found)
        return found


def beside_whole(whole: Path) -> PastaError:
    """Return the error for an adapter or a base model named beside a whole model."""
    return PastaError(
        f"{whole} is a whole model, adapter and all",
        hint="Name it as --model or as --adapter, and leave the other out.",
    )
