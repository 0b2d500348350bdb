"""Adapters on vLLM servers that run: put there in the form that vLLM reads, and taken away.

https://docs.vllm.ai/en/latest/features/lora/
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2 as httpx

from pasta_decoding.errors import PastaError, checked_url, errors_as, excerpt
from pasta_decoding.models.adapter import EMBEDDINGS, read_layer_updates
from pasta_decoding.models.catalog import BaseWithAdapter
from pasta_decoding.models.load import load_base
from pasta_decoding.remote.client import headers


@contextmanager
def served_adapter(
    base: Path, adapter: Path, folder: Path, base_urls: Sequence[str], *, api_key: str | None
) -> Iterator[None]:
    """Let servers of the base model hold an adapter, under the name of `folder`, in the block.

    folder: for vLLM's form of the adapter; servers must see it, and it goes with the block.

    Raises PastaError for a server that takes no adapters, or not this one.
    """
    urls = [checked_url(one, alone="/v1") for one in base_urls]

    def post(url: str, action: str, **more: str) -> httpx.Response:
        body, key = {"lora_name": folder.name, **more}, headers(api_key)
        return httpx.post(f"{url}/{action}_lora_adapter", json=body, headers=key, timeout=600)

    try:
        rank = write_lora(base, adapter, folder)
        for url in urls:
            with errors_as(f"no server is ready: {url}", httpx.TransportError):
                reply = post(url, "load", lora_path=str(folder.resolve()))
            if reply.status_code != 200 and "already been loaded" not in reply.text:
                start = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora"
                raise PastaError(
                    f"{url} loads no adapters, or not this one: {excerpt(reply.text)}",
                    hint=f"{start} --max-lora-rank {rank}",
                )
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for url in urls:
            with suppress(httpx.TransportError):
                post(url, "unload")


def write_lora(base: Path, adapter: Path, folder: Path) -> int:
    """Write an adapter as LoRA alone, a rank for each trained token row; return the rank.

    vLLM has LoRA on embeddings for some families only, such as Llama and Qwen 3.
    """
    from safetensors.torch import save_file

    loaded = load_base(BaseWithAdapter(base, adapter), dtype="bfloat16")
    weights = dict(loaded.model.named_parameters())
    added, tensors = read_layer_updates(weights, adapter), {}
    for layer, (down_RI, up_OR) in added.items():
        pair = {"lora_A.weight": down_RI, "lora_B.weight": up_OR}
        if layer == EMBEDDINGS:  # which look rows up, and multiply nothing
            pair = {"lora_embedding_A": up_OR.T, "lora_embedding_B": down_RI.T}
        for part, one in pair.items():
            tensors[f"base_model.model.{layer}.{part}"] = one.bfloat16().contiguous()
    rank = max(len(down_RI) for down_RI, _ in added.values())
    layers = sorted({layer.rpartition(".")[2] for layer in added})
    settings = {"r": rank, "lora_alpha": rank, "target_modules": layers}  # the scale is in `up_OR`
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return rank
