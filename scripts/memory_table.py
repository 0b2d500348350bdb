"""Print the table of docs/scaling.md: gigabytes that each GPU needs, model by model.

    python scripts/memory_table.py

No weights are needed: shapes are enough, and those of three well-known models are written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from transformers import LlamaConfig

from scripts.memory import Need, estimate, measure

TOKENS = 4096
GPUS = (1, 8, 64)
RANK = 16
SHAPES = {
    "1B (Llama 3.2 1B)": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "8B (Llama 3 8B)": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "70B (Llama 3 70B)": LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
}


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"


def cells(need: Need) -> list[str]:
    states = need.weights + need.gradients + need.optimiser
    return [gigabytes(size) for size in (states, need.total - states, need.total)]


def lines() -> Iterator[str]:
    yield (
        "| model | trained | activations | GPUs | weights, gradients, optimiser "
        "| copies, activations, mask | GB on each GPU |"
    )
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    for (name, config), rank in product(SHAPES.items(), (RANK, 0)):
        model = measure(config, tokens=TOKENS, lora_rank=rank)
        trained = f"LoRA, rank {rank}" if rank else "all weights"
        for gpus, recompute in product(GPUS, (False, True)):
            need = estimate(model, gpus=gpus, recompute=recompute)
            row = [name, trained, "recomputed" if recompute else "kept", str(gpus), *cells(need)]
            yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    for line in lines():
        print(line)
