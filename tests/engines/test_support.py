"""What fits this machine is known beforehand, and OpenMP's threads are given back."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pasta_decoding.engines import support
from pasta_decoding.errors import PastaError

SCRIPT = """
import os, time
import torch
from pasta_decoding.engines.support import release_openmp_threads

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    return torch.arange(1_000_000.0).exp2().isinf().sum().item()

torch.set_num_threads(2)
release_openmp_threads()  # without a team
alone = threads()
found = compute()
with_team = threads()
release_openmp_threads()
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


def test_memory_is_what_a_container_has_left(tmp_path: Path) -> None:
    stat = "inactive_file 50\nactive_file 25\nfile 99\n"
    for name, text in {"max": "1000", "current": "900", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert support.free_bytes(tmp_path) == 1000 - 900 + 75
    (tmp_path / "memory.max").write_text("max\n")
    assert support.free_bytes(tmp_path) > 1000, "without a limit, the machine's"


def test_a_cache_is_refused_with_the_tokens_that_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=10**9)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    support.refuse_large_cache(1000, 10**6)
    with pytest.raises(PastaError) as caught:
        support.refuse_large_cache(2000, 10**6)
    assert str(caught.value) == (
        "a cache of 2000 tokens takes 2.0 GB, and 1.0 GB of memory are free: "
        "at most 1000 tokens fit"
    )
