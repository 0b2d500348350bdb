"""Annotated answers replayed on a model of 7 or 8 billion parameters, batch 1: the paper's setting.

    python bench/gpu_replay.py --shapes llama-3-8b gemma-7b --limit 100

The weights are random, since speed does not depend on their values. Steps have fixed shapes and are
CUDA graphs on a GPU; a bare step is such a graph alone. With `--layers inductor` what a layer does
beside attention is compiled, and recorded by the same graphs; both kinds are timed in turns.
`--device cpu --shapes tiny` runs the same code anywhere. Prompts and tokens are those of the
default model's tokenizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from answers import SAMPLE, chosen_rows, replay, report
from common import emit, interleaved, seconds_of, spread
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, LlamaConfig
from width_cost import WIDTHS, bare_step, step

from pasta_decoding.cli.files import cache_folder
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.evaluation.bare import BareCall, BareTimes
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.bases import model_dir
from pasta_decoding.models.control_tokens import add_missing_tokens
from pasta_decoding.models.load import DEFAULT_ADAPTER, Loaded, find_adapter
from pasta_decoding.runtime.local import decoder_over

SHAPES = {
    "llama-3-8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    ),
    "gemma-7b": GemmaConfig(
        vocab_size=256_000,
        hidden_size=3072,
        intermediate_size=24_576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        max_position_embeddings=8192,
    ),
    "tiny": LlamaConfig(
        vocab_size=50_000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama-3-8b", "gemma-7b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path, help="folder whose tokenizer is used")
    parser.add_argument("--adapter", default=DEFAULT_ADAPTER, help="whose control tokens are used")
    parser.add_argument("--answers", type=Path, default=SAMPLE)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--cells", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--layers", nargs="+", choices=["eager", "inductor"], default=["eager", "inductor"]
    )
    options = parser.parse_args()
    for shape in options.shapes:
        measure(shape, options)


def measure(shape: str, options: argparse.Namespace) -> None:
    """Report the width cost and the replays of one shape, with each kind of layers."""
    engines = {kind: random_engine(shape, options, kind) for kind in options.layers}
    where = {"shape": shape, "device": device_name(options.device)}
    for width in WIDTHS:  # the round that warms up captures the graph
        calls: dict[tuple[str, str], Callable[[], float]] = {}
        for kind, engine in engines.items():
            calls[kind, "ours"] = partial(step, engine, width, 240)
            calls[kind, "bare"] = partial(bare_step, fixed_call(engine), width, 240)
        values = interleaved(calls, options.repeats)
        for kind, engine in engines.items():
            emit(
                "gpu_replay",
                layers=kind,
                width=width,
                padded_to=engine.fixed_pass(width, 240 + width),
                seconds=spread(values[kind, "ours"]),
                bare_seconds=spread(values[kind, "bare"]),
                **where,
            )
    for kind, engine in engines.items():
        replay_all(engine, options, {"layers": kind, **where})


def replay_all(engine: TorchEngine, options: argparse.Namespace, where: dict[str, str]) -> None:
    """Report the replays of annotated answers on one engine."""
    base = options.model or model_dir(cache_folder())
    tokenizer = AutoTokenizer.from_pretrained(base)
    checkpoint = checkpoints.load(find_adapter(options.adapter))
    add_missing_tokens(tokenizer, checkpoint.token_texts)
    ends = frozenset({tokenizer.eos_token_id})
    decoder = decoder_over(engine, Loaded(None, tokenizer, checkpoint, ends))
    rows = chosen_rows(options.answers, options.limit)
    for row in rows:  # captures every graph that the answers need
        replay(decoder, row, lambda *_: 0.0, options.max_tokens)
    times = BareTimes(fixed_call(engine))
    found = [timed for row in rows if (timed := replay(decoder, row, times, options.max_tokens))]
    report(decoder.engine.name, options.answers.name, found, {}, benchmark="gpu_replay", **where)


def random_engine(shape: str, options: argparse.Namespace, layers: str) -> TorchEngine:
    """Return an engine over a model of this shape with the same random weights in bfloat16."""
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16)
    if layers == "inductor":
        compile_layers(model)
    return TorchEngine(model, cache_tokens=options.cells, fixed_shapes=True)


def compile_layers(model: Any) -> None:
    """Compile norms and feed-forward of every layer, one program a width.

    Attention stays as it is, since it alone sees the cells; so no program depends on them.
    """
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:
        for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            part.compile(dynamic=False)


def fixed_call(engine: TorchEngine) -> BareCall:
    """Return the bare pass of fixed shapes, and wait until it is done."""

    def call(width: int, cells: int, repeats: int) -> list[float]:
        def run() -> None:
            engine.fixed_pass(width, cells + width)
            if engine.model.device.type == "cuda":
                torch.cuda.synchronize()

        return [seconds_of(run) for _ in range(repeats)]

    return call


def device_name(device: str) -> str:
    """Return what the device calls itself."""
    return torch.cuda.get_device_name() if device == "cuda" else device


if __name__ == "__main__":
    main()
