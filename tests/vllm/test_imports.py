"""What a server of vLLM has to load for the processor."""

from __future__ import annotations

import subprocess
import sys


def test_the_processor_brings_nothing_that_reads_models() -> None:
    """All of it but the class that vLLM sees, which imports vLLM."""
    heavy = ("transformers", "tokenizers", "safetensors", "gguf", "peft", "httpx2", "typer")
    rooms = ("engines", "remote", "data", "api", "training", "evaluation", "server", "cli")
    banned = [
        *heavy,
        *(f"pasta_decoding.{room}" for room in rooms),
        "pasta_decoding.models.load",
    ]
    code = (
        "import sys, pasta_decoding.vllm.batch;"
        f"print([name for name in {banned!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout.strip() == b"[]"
