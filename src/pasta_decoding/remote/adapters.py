"""Adapters on running vLLM servers: loaded in vLLM's own format, and unloaded.

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
    """Within the block, servers of the base model serve an adapter under the name of `folder`.

    folder: holds the adapter in vLLM's format. The servers must see it; the block's end deletes it.

    Raises PastaError if a server cannot load adapters, or this one.
    """
    urls = [checked_url(base_url, default_path="/v1") for base_url in base_urls]

    def post(url: str, action: str, **fields: str) -> httpx.Response:
        return httpx.post(
            f"{url}/{action}_lora_adapter",
            json={"lora_name": folder.name, **fields},
            headers=headers(api_key),
            timeout=600,
        )

    try:
        rank = write_lora(base, adapter, folder)
        for url in urls:
            with errors_as(f"no server is ready: {url}", httpx.TransportError):
                reply = post(url, "load", lora_path=str(folder.resolve()))
            if reply.status_code != 200 and "already been loaded" not in reply.text:
                command = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora"
                raise PastaError(
                    f"{url} loads no adapters, or not this one: {excerpt(reply.text)}",
                    hint=f"{command} --max-lora-rank {rank}",
                )
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for url in urls:
            with suppress(httpx.TransportError):
                post(url, "unload")


def write_lora(base: Path, adapter: Path, folder: Path) -> int:
    """Write an adapter as plain LoRA, and return its rank.

    Trained token rows become LoRA on the embeddings, with a rank for each row. vLLM applies that
    for some families of models only, such as Llama and Qwen 3.
    """
    from safetensors.torch import save_file

    loaded = load_base(BaseWithAdapter(base, adapter), dtype="bfloat16")
    weights = dict(loaded.model.named_parameters())
    updates = read_layer_updates(weights, adapter)
    tensors = {}
    for layer, (down_RI, up_OR) in updates.items():
        if layer == EMBEDDINGS:  # vLLM looks up rows of A, so the factors change places
            factors = {"lora_embedding_A": up_OR.T, "lora_embedding_B": down_RI.T}
        else:
            factors = {"lora_A.weight": down_RI, "lora_B.weight": up_OR}
        for name, factor in factors.items():
            tensors[f"base_model.model.{layer}.{name}"] = factor.bfloat16().contiguous()
    rank = max(len(down_RI) for down_RI, _ in updates.values())
    layer_names = sorted({layer.rpartition(".")[2] for layer in updates})
    settings = {
        "r": rank,
        "lora_alpha": rank,  # a scale of 1: `up_OR` includes the adapter's own
        "target_modules": layer_names,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return rank
