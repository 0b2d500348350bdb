"""What steps cost on a GPU: many requests and threads, prompts, the host's part, memory.

    python bench/gpu_step.py                                     # at most 6 minutes
    python bench/gpu_step.py --shape 1.5b --slots 256 --generate           # a minute

The weights are random, of the given shapes. `least_ms` is the least that a step can take: the
device reads the weights at the speed at which it copies memory. `64 x 4, 256 slots` is a step of 64
requests of four threads each, where the threads of a request share a prompt of 256 tokens. A line
with `generate` is of transformers' own loop on the same model, with a static cache: on a GPU it
compiles the step and replays CUDA graphs. Its time is of a step behind the prompt's; `first_s` is
what the first call took, which compiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch
from common import emit
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from pasta_decoding.answer.sampler import RowParams
from pasta_decoding.answer.settings import SamplingParams
from pasta_decoding.engines.base import Branch, Feed
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.scheduling.device_sampler import sample_tokens

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
TINY = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
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

THREADED = [(1, 8), (64, 4)]
"""Requests and the threads of each, in addition to `--rows` requests of one thread."""
STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES)[:2])
    parser.add_argument("--slots", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128], help="requests")
    parser.add_argument("--generate", type=int, nargs="*", default=[1, 32], help="its sequences")
    options = parser.parse_args()
    size = 2**30 if options.device == "cuda" else 2**24
    source, target = torch.zeros(2, size, dtype=torch.uint8, device=options.device)
    copied_ms = repeated(options.device, lambda: target.copy_(source))["least"]
    bytes_per_s = 2 * size / copied_ms * 1e3
    for shape in options.shape:
        kind, settings = SHAPES[shape]
        with torch.device(options.device):
            config = AutoConfig.for_model(kind, **settings)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        figures = measure(model, bytes_per_s, options)
        emit("gpu_step", shape=shape, copy_gb_s=round(bytes_per_s / 1e9), **figures)
        slots = options.slots[0]
        for sequences in options.generate:
            figures = generate_ms(model, sequences, slots)
            emit("gpu_step", shape=shape, generate=f"{sequences} x 1, {slots} slots", **figures)


def measure(model: Any, bytes_per_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of our engine; times are milliseconds.

    bytes_per_s: the speed at which the device reads and writes memory.
    """
    device = options.device
    loads = [*((requests, 1) for requests in options.rows), *THREADED]
    max_slots = max(options.slots)
    tokens = max(requests * (max_slots + threads * STEPS) for requests, threads in loads)
    engine = TorchEngine(model, cache_tokens=tokens + 4000)
    weights = model.parameters()
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    figures: dict[str, Any] = {"least_ms": round(1e3 * weight_bytes / bytes_per_s, 3)}
    for size in (256, 1500):
        figures[f"prompt {size}"] = repeated(device, lambda size=size: prompt(engine, size))
    for slots, (requests, threads) in product(options.slots, loads):
        load = f"{requests} x {threads}, {slots} slots"
        figures[load] = steps_ms(engine, requests, threads, slots)
    logits_FV = torch.randn(128, engine.vocabulary_size, device=device) * 3
    for name, params in SAMPLINGS.items():
        rows = [RowParams(params, (0, row, 0, 0)) for row in range(len(logits_FV))]
        figures[f"sample 128 rows, {name}"] = repeated(
            device, lambda rows=rows: sample_tokens(logits_FV, rows)
        )
    if device == "cuda":
        figures["memory_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    return figures


def prompt(engine: TorchEngine, size: int) -> None:
    branch = engine.open(reserved_tokens=size)
    engine.step_kept([Feed((branch,), (1,) * size, tuple(range(size)))])
    engine.close(branch)


def steps_ms(engine: TorchEngine, requests: int, threads: int, slots: int) -> dict[str, Any]:
    """Time steps of requests that have slots of their own, which their threads share.

    `host` is the time until the work of a step is queued.
    """
    roots = [engine.open(reserved_tokens=slots + threads * STEPS) for _ in range(requests)]
    engine.step_kept([Feed((roots[0],), (1,) * slots, tuple(range(slots)))])
    for root in roots[1:]:
        engine.copy(roots[0], root, slots)
    branches: list[Branch] = []
    for root in roots:
        branches += [root, *(engine.fork(root) for _ in range(threads - 1))]
    totals_ms = []
    hosts_ms = []
    for number in range(STEPS):
        feeds = [Feed((branch,), (1,), (slots + number,)) for branch in branches]
        wait(engine.model.device.type)
        began_s = time.perf_counter()
        logits_FV = engine.step_kept(feeds)
        hosts_ms.append(1e3 * (time.perf_counter() - began_s))
        logits_FV.argmax(1).tolist()
        totals_ms.append(1e3 * (time.perf_counter() - began_s))
    for branch in branches:
        engine.close(branch)
    return {**spread(totals_ms[2:]), "host": round(median(hosts_ms[2:]), 3)}


def generate_ms(model: Any, sequences: int, slots: int, tokens: int = 48) -> dict[str, Any]:
    """Time the tokens of transformers' own loop, the second time. The model is changed for it."""
    torch.compiler.reset()  # else a second number of sequences makes the graph's sizes variable
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None
    prompt_BT = torch.ones(sequences, slots, dtype=torch.long, device=model.device)
    clocks = Clock(), Clock()
    for clock in clocks:
        model.generate(
            prompt_BT,
            attention_mask=torch.ones_like(prompt_BT),
            max_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            streamer=clock,
        )
    first, second = (clock.times_ms for clock in clocks)
    gaps_ms = [after - before for before, after in pairwise(second[1:])]  # without the prompt's
    first_s = round((first[-1] - first[0]) / 1e3, 1)
    return {**spread(gaps_ms), "first_s": first_s, "compiled": hasattr(model, "_compiled_call")}


class Clock(BaseStreamer):
    """Records when the prompt began, and when each token came."""

    def __init__(self) -> None:
        self.times_ms: list[float] = []

    def put(self, _value: Tensor) -> None:
        self.times_ms.append(1e3 * time.perf_counter())

    def end(self) -> None:
        pass


def repeated(device: str, call: Callable[[], object]) -> dict[str, float]:
    times_ms = []
    for _ in range(5):
        wait(device)
        began_s = time.perf_counter()
        call()
        wait(device)
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    return spread(times_ms[2:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def spread(values: list[float]) -> dict[str, float]:
    return {"ms": round(median(values), 3), "least": round(min(values), 3)}


if __name__ == "__main__":
    main()
