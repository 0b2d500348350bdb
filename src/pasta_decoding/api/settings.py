"""What is loaded, and where to: the settings of `pasta.load` and of every command that decodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pasta_decoding.engines import DEFAULT_CELLS
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.loading import DEFAULT_ADAPTER


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

    adapter:  folder of an adapter, or a shipped one's name; "none" for the base model alone.
    model:    folder of the base model, its name on the hub, or a GGUF; None: the embedded one.
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

    adapter: str = DEFAULT_ADAPTER
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
    def is_gguf(self) -> bool:
        """Is the model one file, adapter and all?"""
        return self.model is not None and self.model.suffix == ".gguf"
