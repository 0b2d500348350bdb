"""What steps cost on a GPU: many requests, prompts, the host's part, memory.

    python bench/gpu_step.py            # an 8B and a 1.5B shape, at most 6 minutes
    python bench/gpu_step.py --quick    # the 1.5B shape alone, a minute

The weights are random, of the given shapes. Beside each time stands the least that a step can take:
the seconds in which the device reads the weights, at the speed at which it copies memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import emit
from transformers import AutoConfig, AutoModelForCausalLM
from width_cost import SHAPES as LLAMAS

from pasta_decoding.engines.base import Feed
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.runtime.device_sampler import sampled_rows
from pasta_decoding.runtime.request import SamplingParams
from pasta_decoding.runtime.sampler import RowParams

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-1.5b": (
        "qwen2",
        {
            "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960,
            "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
            "max_position_embeddings": 32_768, "tie_word_embeddings": True,
        },
    ),
    **{name: ("llama", settings) for name, settings in LLAMAS.items()},
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=1),
    "top_p": SamplingParams(temperature=1, top_p=0.95),
    "top_k": SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the 1.5B shape alone, fewer rows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, nargs="+")
    options = parser.parse_args()
    shapes = options.shape or list(SHAPES)[: 1 if options.quick else 2]
    speed = copy_speed(options.device)
    for shape in shapes:
        figures = measure(shape, options.device, speed, quick=options.quick)
        emit("gpu_step", shape=shape, copy_gb_s=round(speed / 1e9), **figures)


def measure(shape: str, device: str, speed: float, *, quick: bool) -> dict[str, Any]:
    """Return the figures of one shape; times are milliseconds."""
    kind, settings = SHAPES[shape]
    with torch.device(device):
        config = AutoConfig.for_model(kind, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rows = [1, 8, 32, 128] if quick else ROWS
    slots = [256] if quick else [256, 1024]
    engine = TorchEngine(model, cache_tokens=(max(rows) + 2) * (max(slots) + 40) + 4000)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    found: dict[str, Any] = {"least_ms": round(1e3 * weights / speed, 3)}
    for size in (256, 1500):
        found[f"prompt {size}"] = spread([prompt_ms(engine, size) for _ in range(4)][1:])
    for held in slots:
        for width in rows:
            found[f"{width} rows, {held} slots"] = steps_ms(engine, width, held)
    logits_FV = torch.randn(max(rows[:-1]), engine.vocabulary_size, device=device) * 3
    for name, params in SAMPLINGS.items():
        drawn = [RowParams(params, (0, row, 0, 0)) for row in range(len(logits_FV))]
        taken = [timed(device, lambda drawn=drawn: sampled_rows(logits_FV, drawn)) for _ in "12345"]
        found[f"sample {len(logits_FV)} rows, {name}"] = spread(taken[2:])
    if torch.device(device).type == "cuda":
        found["memory_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    return found


def prompt_ms(engine: TorchEngine, size: int) -> float:
    branch = engine.open(reserved_tokens=size)
    feed = Feed((branch,), (1,) * size, tuple(range(size)))
    taken = timed(engine.model.device.type, lambda: engine.step_kept([feed]))
    engine.close(branch)
    return taken


def steps_ms(engine: TorchEngine, width: int, held: int, steps: int = 12) -> dict[str, Any]:
    """Steps of requests that hold slots of their own: all of it, and the host's part.

    The host's part ends when everything is queued; the rest is spent waiting for the device.
    """
    device, branches = engine.model.device.type, []
    for number in range(width):
        branches.append(engine.open(reserved_tokens=held + steps))
        if number:
            engine.copy(branches[0], branches[number], held)
            continue
        engine.step_kept([Feed((branches[0],), (1,) * held, tuple(range(held)))])
    totals, hosts = [], []
    for number in range(steps):
        feeds = [Feed((branch,), (1,), (held + number,)) for branch in branches]
        wait(device)
        began_s = time.perf_counter()
        logits_FV = engine.step_kept(feeds)
        hosts.append(1e3 * (time.perf_counter() - began_s))
        logits_FV.argmax(1).tolist()
        totals.append(1e3 * (time.perf_counter() - began_s))
    for branch in branches:
        engine.close(branch)
    return {**spread(totals[2:]), "host": round(median(hosts[2:]), 3)}


def timed(device: str, call: Callable[[], object]) -> float:
    wait(device)
    began_s = time.perf_counter()
    call()
    wait(device)
    return 1e3 * (time.perf_counter() - began_s)


def wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def spread(values: list[float]) -> dict[str, Any]:
    return {"ms": round(median(values), 3), "least": round(min(values), 3)}


def copy_speed(device: str) -> float:
    """Bytes that a copy reads and writes in a second."""
    size = 2**30 if torch.device(device).type == "cuda" else 2**24
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = min(timed(device, lambda: target.copy_(source)) for _ in range(8)) / 1e3
    return 2 * size / seconds


if __name__ == "__main__":
    main()
