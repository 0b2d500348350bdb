"""What is loaded, and where to: the settings of `pasta.load` and of every command that decodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pasta_decoding.engines import DEFAULT_CELLS
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.loading import DEFAULT_ADAPTER, TEXT_ADAPTER, is_whole


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
    """Which checkpoint, on which engine. Its defaults are everybody's.

    adapter:  folder of an adapter, or a shipped one's name; "none" for the base model alone. None
              takes the default one, or that for text joins where servers decode.
    model:    folder of the base model, or its name on the hub; None: the embedded one.
              Either may name a whole model in its place: a GGUF that `pasta export` wrote, or a
              folder with weights and `pasta.json`. The other is None, then.
    engine:   auto takes servers where `base_url` names some, else the best of this machine.
    join:     None: as the checkpoint was trained.
    dtype:    of the torch engine's weights and cache.
    quant:    number format of the llama engine's weights.
    context:  tokens that the cache holds.
    threads:  processor threads; None: all cores.
    device:   of the torch engine; None: a GPU where there is one.
    base_url: servers of OpenAI-style completions, replicas of one model.
    remote_key: the key that these ask for.
    """

    adapter: str | None = None
    model: Path | None = None
    engine: EngineName = EngineName.auto
    join: Joining | None = None
    dtype: Dtype = Dtype.auto
    quant: FileType = FileType.F16
    context: int = DEFAULT_CELLS
    threads: int | None = None
    device: str | None = None
    base_url: tuple[str, ...] = ()
    remote_key: str | None = None

    @property
    def is_remote(self) -> bool:
        """Do servers decode?"""
        named = self.engine is EngineName.auto and bool(self.base_url)
        return named or self.engine is EngineName.remote

    @property
    def adapter_name(self) -> str:
        """The adapter that is meant, where no whole model is named."""
        if self.adapter is not None:
            return self.adapter
        return TEXT_ADAPTER if self.is_remote else DEFAULT_ADAPTER

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
