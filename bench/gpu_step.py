"""What steps cost on a GPU: many requests, prompts, the host's part, memory.

    python bench/gpu_step.py                                     # at most 6 minutes
    python bench/gpu_step.py --shape 1.5b --slots 256 --rows 1 8 32 128    # a minute

The weights are random, of the given shapes. Beside each time stands the least that a step can take:
the seconds in which the device reads the weights, at the speed at which it copies memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import torch
from common import emit
from transformers import AutoConfig, AutoModelForCausalLM

from pasta_decoding.engines.base import Feed
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.runtime.device_sampler import sampled_rows
from pasta_decoding.runtime.request import SamplingParams
from pasta_decoding.runtime.sampler import RowParams

QWEN = {
    "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "max_position_embeddings": 32_768, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "1.5b": ("qwen2", QWEN),
    "llama-3-8b": ("llama", LLAMA),
    "tiny": ("llama", TINY),
}
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
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES)[:2])
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[2**power for power in range(9)])
    options = parser.parse_args()
    size = 2**30 if options.device == "cuda" else 2**24
    source, target = torch.zeros(2, size, dtype=torch.uint8, device=options.device)
    copied_ms = repeated(options.device, lambda: target.copy_(source))["least"]
    speed = 2 * size / copied_ms * 1e3
    for shape in options.shape:
        figures = measure(shape, options.device, speed, options.slots, options.rows)
        emit("gpu_step", shape=shape, copy_gb_s=round(speed / 1e9), **figures)


def measure(
    shape: str, device: str, speed: float, slots: list[int], rows: list[int]
) -> dict[str, Any]:
    """Return the figures of one shape; times are milliseconds."""
    kind, settings = SHAPES[shape]
    with torch.device(device):
        config = AutoConfig.for_model(kind, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    engine = TorchEngine(model, cache_tokens=(max(rows) + 2) * (max(slots) + 40) + 4000)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    found: dict[str, Any] = {"least_ms": round(1e3 * weights / speed, 3)}
    for size in (256, 1500):
        found[f"prompt {size}"] = repeated(device, lambda size=size: prompt(engine, size))
    for held, width in product(slots, rows):
        found[f"{width} rows, {held} slots"] = steps_ms(engine, width, held)
    logits_FV = torch.randn(128, engine.vocabulary_size, device=device) * 3
    for name, params in SAMPLINGS.items():
        drawn = [RowParams(params, (0, row, 0, 0)) for row in range(len(logits_FV))]
        found[f"sample 128 rows, {name}"] = repeated(
            device, lambda drawn=drawn: sampled_rows(logits_FV, drawn)
        )
    if device == "cuda":
        found["memory_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    return found


def prompt(engine: TorchEngine, size: int) -> None:
    branch = engine.open(reserved_tokens=size)
    engine.step_kept([Feed((branch,), (1,) * size, tuple(range(size)))])
    engine.close(branch)


def steps_ms(engine: TorchEngine, width: int, held: int, steps: int = 12) -> dict[str, Any]:
    """Steps of requests that hold slots of their own, and the host's part: until all is queued."""
    first, *others = [engine.open(reserved_tokens=held + steps) for _ in range(width)]
    engine.step_kept([Feed((first,), (1,) * held, tuple(range(held)))])
    for branch in others:
        engine.copy(first, branch, held)
    totals, hosts = [], []
    for number in range(steps):
        feeds = [Feed((branch,), (1,), (held + number,)) for branch in (first, *others)]
        wait(engine.model.device.type)
        began_s = time.perf_counter()
        logits_FV = engine.step_kept(feeds)
        hosts.append(1e3 * (time.perf_counter() - began_s))
        logits_FV.argmax(1).tolist()
        totals.append(1e3 * (time.perf_counter() - began_s))
    for branch in (first, *others):
        engine.close(branch)
    return {**spread(totals[2:]), "host": round(median(hosts[2:]), 3)}


def repeated(device: str, call: Callable[[], object]) -> dict[str, float]:
    taken = []
    for _ in range(5):
        wait(device)
        began_s = time.perf_counter()
        call()
        wait(device)
        taken.append(1e3 * (time.perf_counter() - began_s))
    return spread(taken[2:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def spread(values: list[float]) -> dict[str, float]:
    return {"ms": round(median(values), 3), "least": round(min(values), 3)}


if __name__ == "__main__":
    main()
