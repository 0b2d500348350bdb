"""A script for vLLM's Python: gives the processor the inputs of vLLM's second model runner."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcRequestState,
)
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_plugins


def by_slots(processor: type, config: Any, params: SamplingParams, size: int) -> list[int]:
    """Return the number of forbidden tokens in two rows: slot 3 has a guided request, 0 has not."""
    ids = torch.zeros(4, 8, dtype=torch.int32)
    prompt_len = np.full(4, 1, dtype=np.int32)
    states = LogitsProcRequestState(
        device=torch.device("cpu"),
        max_num_reqs=4,
        vocab_size=size,
        all_token_ids=SimpleNamespace(gpu=ids),
        prompt_len=SimpleNamespace(np=prompt_len),
        prefill_len=SimpleNamespace(np=prompt_len),
        total_len=None,
    )
    logits_processor = processor(config, states)
    assert not logits_processor.add_request(0, SamplingParams())
    assert logits_processor.add_request(3, params)
    logits_processor.apply_staged_writes()
    slots = np.array([0, 3])
    context = LogitsContext(
        expanded_idx_mapping=torch.tensor(slots),
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=slots,
        expanded_local_pos=torch.zeros(2),
        input_ids=torch.tensor([20, 20]),
        pos=torch.tensor([0, 0]),
        seq_lens_upper_bound_np=np.array([1, 1]),
    )
    return torch.isneginf(logits_processor.apply(torch.zeros(2, size), context)).sum(1).tolist()


def main() -> None:
    folder, guide = sys.argv[1:]
    config = SimpleNamespace(model_config=ModelConfig(model=folder, max_model_len=512))
    size = config.model_config.get_vocab_size()
    params = SamplingParams(extra_args={"pasta": guide})
    [processor] = [
        plugin
        for plugin in _load_v2_logitsprocs_plugins()
        if plugin.__name__ == "PastaLogitsProcessor"
    ]
    processor.validate_params(params)
    print(json.dumps(by_slots(processor, config, params, size)))  # noqa: T201


if __name__ == "__main__":
    main()
