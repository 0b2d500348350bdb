"""Step time against the number of threads of one answer, and against the number of requests.

    python bench/width_cost.py --engines torch:bfloat16 llama:BF16
    python bench/width_cost.py --shape llama-3-8b --device cuda

Every thread of an answer sees the same slots; every request has slots of its own. The engines take
turns. `cost` is relative to one thread of the same engine. With `--shape` the torch engine has
random weights of that shape and steps of few sizes, which are CUDA graphs on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import arguments, decoder_named, emit, interleaved, seconds_of, spread

from pasta_decoding.engines.base import Branch, Engine, Feed

WIDTHS = (1, 2, 4, 8, 16, 32)
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--slots", type=int, default=256, help="tokens that a thread sees")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead of a checkpoint")
    options = parser.parse_args()
    engines = engines_of(options)
    kinds = {"threads": open_threads, "requests": open_requests}
    calls: dict[tuple[str, str, int], Callable[[], float]] = {
        (name, kind, width): partial(step, engine, opened, width, options.slots)
        for name, engine in engines.items()
        for kind, opened in kinds.items()
        for width in options.widths
    }
    values = interleaved(calls, options.repeats)
    for (name, kind, width), seconds in values.items():
        one = spread(values[name, "threads", options.widths[0]])["median"]
        found = spread(seconds)
        cost = round(found["median"] / one, 3)
        fields = {"engine": name, kind: width, "slots": options.slots}
        emit("width_cost", **fields, seconds=found, cost=cost)


def engines_of(options: argparse.Namespace) -> dict[str, Engine]:
    """Return the engines by name: those of a checkpoint, or one over random weights."""
    if options.shape is None:
        decoders = [decoder_named(name, options) for name in options.engines]
        return {decoder.engine.name: decoder.engine for decoder in decoders}
    from transformers import AutoModelForCausalLM, LlamaConfig

    from pasta_decoding.engines.torch import TorchEngine

    torch.manual_seed(0)
    with torch.device(options.device or "cpu"):
        config = LlamaConfig(**SHAPES[options.shape])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    engine = TorchEngine(model, cache_tokens=options.ctx, paged=True)
    return {f"{engine.name}, {options.shape}": engine}


def open_threads(engine: Engine, width: int, slots: int) -> list[Branch]:
    """Return `width` branches of one request that share `slots` tokens."""
    first = prompted(engine, slots, width)
    return [first, *(engine.fork(first) for _ in range(width - 1))]


def open_requests(engine: Engine, width: int, slots: int) -> list[Branch]:
    """Return the branches of `width` requests, each with `slots` tokens of its own."""
    return [prompted(engine, slots, 1) for _ in range(width)]


def prompted(engine: Engine, slots: int, more: int) -> Branch:
    """Return a new request's branch behind a prompt, with room for `more` tokens."""
    branch = engine.open(reserved_tokens=slots + more)
    engine.step([Feed((branch,), (1,) * slots, tuple(range(slots)), wants_logits=False)])
    return branch


def step(
    engine: Engine, opened: Callable[[Engine, int, int], list[Branch]], width: int, slots: int
) -> float:
    """Return the seconds of one step of `width` branches."""
    branches = opened(engine, width, slots)
    if torch.cuda.is_available():  # prompts want no logits, so nothing waited for their passes
        torch.cuda.synchronize()
    feeds = [Feed((branch,), (1,), (slots,)) for branch in branches]
    taken = seconds_of(lambda: engine.step(feeds))
    for branch in branches:
        engine.close(branch)
    return taken


if __name__ == "__main__":
    main()
