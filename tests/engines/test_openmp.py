"""OpenMP's teams: given back when asked, so that a process has one alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, time
import torch
from pasta_decoding.engines.openmp import release_team

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    return torch.arange(1_000_000.0).exp2().isinf().sum().item()

torch.set_num_threads(2)
release_team()  # without a team
alone = threads()
found = compute()
with_team = threads()
release_team()
for _ in range(100):  # the kernel takes a moment to forget one
    if threads() == alone:
        break
    time.sleep(0.05)
print(with_team - alone, threads() - alone, compute() == found)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux does")
def test_a_team_is_given_back_and_made_anew() -> None:
    """In a process of its own, whose teams have two threads."""
    clean = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=clean, check=True
    )
    assert done.stdout.split() == ["1", "0", "True"]
