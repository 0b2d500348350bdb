"""FSDP 2 on two CPU processes, and the launcher's configurations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from pasta_decoding.models.load import load_model
from tests.shapes import HUB_SHAPES

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
WORKER = Path(__file__).with_name("sharded.py")
KINDS = {
    "cpu": "MULTI_GPU",
    "ddp": "MULTI_GPU",
    "fsdp": "FSDP",
    "deepspeed_zero3": "DEEPSPEED",
}


def test_every_configuration_that_ships_is_read_by_the_launcher() -> None:
    """Accelerate refuses keys that it does not know."""
    assert {path.stem for path in CONFIGS.iterdir()} == set(KINDS)
    for name, kind in KINDS.items():
        config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
        assert str(config.distributed_type).endswith(kind)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sharded_models_train_and_save_what_whole_ones_do(tmp_path: Path) -> None:
    """Llama 3's head is its own, Gemma's is tied; the worker compares the losses."""
    bases = [make(tmp_path / shape / "base") for shape, make in HUB_SHAPES.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", str(WORKER), *map(str, bases)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for base in bases:
        sharded, alone = (load_model(base, base.with_name(one)) for one in ("sharded", "alone"))
        ids = torch.arange(len(sharded.tokenizer))[None]
        with torch.inference_mode():
            ours, theirs = sharded.model(ids).logits, alone.model(ids).logits
        torch.testing.assert_close(ours, theirs, atol=5e-2, rtol=1e-2)
