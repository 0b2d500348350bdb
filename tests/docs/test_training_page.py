"""Every command of docs/training.md, run as it stands, on tiny models of the shapes that it names.

Only sizes are made smaller, by flags put behind the page's own. The launcher is left out:
tests/training/test_processes.py has it.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from transformers import AutoConfig

from pasta_decoding.cli import main
from pasta_decoding.lang.tree import read, strip
from pasta_decoding.models.load import load_base, load_model
from tests.chatserver import chat_server, in_turn
from tests.checkpoint import keep_base
from tests.docs.pages import ROOT, blocks, commands, text_of
from tests.shapes import HUB_SHAPES
from tests.training.tiny_runs import ROWS

PAGE = "docs/training.md"
MODEL = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
ANNOTATED = "\n".join(
    f'{n}. <promise topic="{city}" tokens="10"/><async>{city}.</async>'
    for n, city in enumerate(("Paris", "Rome"), start=1)
)
ENGINE = "--engine torch"
SMALLER = {
    "train preference": f"--samples 8 --rounds 1 --max-tokens 80 {ENGINE}",
    "train sft": "--max-steps 2 --max-length 256 --pack-tokens 256 --packs-per-step 2",
    "eval generate": f"--max-tokens 24 --dtype float32 {ENGINE}",
}
SMALL = {
    "sft": "  bf16: false\n  try_prompts: 0\n",
    "preference": "  bf16: false\n  pairs_per_step: 1\n  dtype: float32\n",
}


def test_the_page_names_configurations_that_ship() -> None:
    named = set(re.findall(r"configs/accelerate/\S+\.yaml", text_of(PAGE)))
    assert named
    assert all((ROOT / path).is_file() for path in named)


@pytest.mark.parametrize(
    "shape",
    [pytest.param(one, marks=[pytest.mark.slow] * (one != "llama3")) for one in HUB_SHAPES],
)
def test_every_command_works_on_a_tiny_model_of_that_shape(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = HUB_SHAPES[shape](tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(base))
    rows = [
        {"id": row.id, "source": "", "instruction": row.instruction, "response": plain}
        for row, plain in zip(ROWS, [strip(read(ANNOTATED))] * len(ROWS), strict=True)
    ]
    for name in ("prompts.jsonl", "responses.jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    [settings] = blocks(PAGE, "yaml")
    text = settings.text
    for stage, smaller in SMALL.items():
        text = text.replace(f"{stage}:\n", f"{stage}:\n{smaller}")
    Path("settings.yaml").write_text(text)
    Path("evaluation.jsonl").write_text('{"instruction": "Three good habits?"}\n')
    for name in ("smollm2-135m", "qwen2.5-coder-1.5b"):
        keep_base(base, tmp_path / "cache", name)
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PASTA_ENDPOINT_KEY", "none")
    with chat_server(in_turn([ANNOTATED])) as endpoint:
        for command in commands(PAGE):
            smaller = next((SMALLER[step] for step in SMALLER if step == " ".join(command[:2])), "")
            here = [one.replace("http://localhost:8000/v1", endpoint.base_url) for one in command]
            assert main([*here, *shlex.split(smaller)]) == 0, command
    check_rows(base, Path("runs/sft/adapter"))
    assert AutoConfig.from_pretrained("served").model_type in (shape, "llama")


def check_rows(base: Path, adapter: Path) -> None:
    """The rows of the tags were trained, in and out, and the name of the base is the hub's."""
    loaded, plain = load_model(base, adapter), load_base(base).model
    assert loaded.checkpoint.base.name == MODEL
    ids = sorted(loaded.checkpoint.control.ids)
    for ours, theirs in (
        (loaded.model.get_input_embeddings(), plain.get_input_embeddings()),
        (loaded.model.get_output_embeddings(), plain.get_output_embeddings()),
    ):
        changed = (ours.weight != theirs.weight).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) <= set(ids)
        assert len(changed) > 3
