"""Runs of stage 1 on a tiny model: ten steps over four rows, and what may happen on the way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pasta_decoding.data.lines import read_lines
from pasta_decoding.data.rows import Row
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.sft import train_sft
from tests.checkpoint import BASE_NAME

CONFIG = SftConfig(
    data=("four.jsonl",),
    base_name=BASE_NAME,
    epochs=20,
    learning_rate=2e-2,
    warmup_steps=1,
    lora_rank=8,
    max_tokens=256,
    pack_tokens=160,
    packs_per_step=2,
    max_steps=10,
    save_every_steps=5,
    bf16=False,
    try_prompts=0,
)


def chunk(topic: str, text: str) -> str:
    return f'<promise topic="{topic}" tokens="20"/><async>{text}</async>'


ROWS = [
    Row("1", "", "Two cities?", f"1. {chunk('Paris', 'Paris.')}\n2. {chunk('Rome', 'Rome.')}"),
    Row("2", "", "Two drinks?", f"1. {chunk('Tea', 'Tea.')}\n2. {chunk('Milk', 'Milk.')}"),
    Row("3", "", "Sum?", f"{chunk('Left', 'One.')} {chunk('Right', 'Two.')}<sync/> Three."),
    Row("4", "", "Hello?", "Hello."),
]


def train(
    base: Path, out: Path, config: SftConfig = CONFIG, rows: Sequence[Row] = ROWS, **settings: Any
) -> Path:
    return train_sft(config, rows, base=base, out=out, **settings)


def losses(out: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` says, without the clock."""
    lines = read_lines(out / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def behind_step(number: int, act: Callable[[torch.optim.AdamW], None]) -> Iterator[None]:
    """Let something happen behind the optimiser's step of that number."""
    step = torch.optim.AdamW.step
    steps = 0

    def acting(self: torch.optim.AdamW, *arguments: Any) -> Any:
        nonlocal steps
        loss = step(self, *arguments)
        steps += 1
        if steps == number:
            act(self)
        return loss

    with pytest.MonkeyPatch.context() as context:
        context.setattr(torch.optim.AdamW, "step", acting)
        yield


def die(_optimizer: torch.optim.AdamW) -> None:
    raise KeyboardInterrupt


def spoil(optimizer: torch.optim.AdamW) -> None:
    """Make one weight NaN."""
    optimizer.param_groups[0]["params"][0].data.view(-1)[0] = torch.nan
