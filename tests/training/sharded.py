"""Run by two processes: LoRA and control-token rows under FSDP 2 against the same without it.

accelerate takes FSDP for GPUs only, so its own preparation is called here on the CPU, over gloo.
Arguments: the folders of base models, beside which the trained ones are written.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed import barrier, get_rank, init_process_group
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from pasta_decoding.models.catalog import BaseAlone
from pasta_decoding.models.load import load_base
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.lora import add_lora, recompute_activations, save, shard_tied_together


def main(base: Path) -> None:
    loaded = load_base(BaseAlone(base))
    control = loaded.checkpoint.control
    ids = torch.tensor([[*sorted(control.ids), 1, 2, 3]])
    alone = add_lora(loaded.model, control, SftConfig(lora_rank=4))
    expected_losses = steps(alone, ids)
    model = load_base(BaseAlone(base)).model
    recompute_activations(model)
    sharded = add_lora(model, control, SftConfig(lora_rank=4))
    shard_tied_together(sharded)
    sharded = prepared(sharded)
    sharded_losses = steps(sharded, ids)
    torch.testing.assert_close(sharded_losses, expected_losses, atol=1e-5, rtol=1e-5)
    # As Accelerator.get_state_dict does.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(sharded, options=options)
    if get_rank() == 0:
        save(replace(loaded, model=sharded), base.with_name("sharded"), weights=weights)
        save(replace(loaded, model=alone), base.with_name("alone"))
    barrier()  # the one that writes is not left alone


def steps(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the losses of five steps; both processes see the same, so nothing is averaged away."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def prepared(model: Any) -> Any:
    """Shard `model` as the launcher's config file has it done."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        mixed_precision="no",
        is_main_process=get_rank() == 0,
    )
    return fsdp2_prepare_model(accelerator, model)


if __name__ == "__main__":
    init_process_group("gloo")
    for folder in sys.argv[1:]:
        main(Path(folder))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Gloo's threads may still hold tensors (pytorch/pytorch#179291)
