"""The engines that must keep the contract, each with an oracle that knows what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from pasta_decoding.engines.base import Engine
from pasta_decoding.engines.scripted import ScriptedEngine, shuffled
from pasta_decoding.engines.torch import TorchEngine
from tests.engines.oracle import Oracle, Recorder, by_script, dense
from tests.tiny import TINY_MODELS, VOCABULARY


@dataclass(frozen=True)
class Subject:
    """An engine under test and an oracle that must agree with it."""

    engine: Engine
    oracle: Oracle

    def record(self) -> Recorder:
        return Recorder(self.engine)


def scripted_subject() -> Subject:
    script = shuffled(VOCABULARY)
    engine = ScriptedEngine(script, VOCABULARY, max_positions=512, max_cells=4000, max_branches=50)
    return Subject(engine, by_script(script))


def torch_subject(name: str, device: str = "cpu") -> Subject:
    # Two models of one seed: the oracle's must not share the engine's attention function.
    return Subject(
        TorchEngine(nn.Module.to(TINY_MODELS[name](), device)), dense(TINY_MODELS[name]())
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "scripted": scripted_subject,
    "torch-llama": lambda: torch_subject("llama"),
    "torch-qwen2": lambda: torch_subject("qwen2"),
    "torch-qwen3": lambda: torch_subject("qwen3"),
    "torch-cuda": lambda: torch_subject("llama", "cuda"),
}
