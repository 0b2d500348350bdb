"""Every command of docs/training.md and of the notebook, run on tiny models.

Only sizes are made smaller, by flags put behind the page's own. The launcher is left out:
tests/training/test_processes.py has it.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from pasta_decoding.cli import main
from pasta_decoding.lang.tree import read, strip
from pasta_decoding.models.catalog import BaseAlone, BaseWithAdapter
from pasta_decoding.models.load import load_base, load_model
from tests.chatserver import chat_server, in_turn
from tests.checkpoint import keep_base
from tests.docs.pages import ROOT, blocks, commands
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
    "train preference": f"--samples 8 --rounds 1 --max-tokens 80 --quality likelihood {ENGINE}",
    "train preference --pairs": "--max-tokens 80",
    "train sft": "--max-steps 2 --max-length 256 --pack-tokens 256 --packs-per-step 2",
    "eval generate": f"--max-tokens 24 --dtype float32 {ENGINE}",
}
SMALL_SFT = "sft:\n  bf16: false\n  try_prompts: 0\n"
SMALL_PREFERENCE = "preference:\n  bf16: false\n  pairs_per_step: 1\n  dtype: float32\n"


@pytest.mark.parametrize(
    "shape", [pytest.param(one, marks=[pytest.mark.slow] * (one != "llama3")) for one in HUB_SHAPES]
)
def test_every_command_works_on_a_tiny_model_of_that_shape(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = HUB_SHAPES[shape](tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(base))
    plain = {"source": "", "response": strip(read(ANNOTATED))}
    rows = [plain | {"id": row.id, "instruction": row.instruction} for row in ROWS]
    for name in ("prompts.jsonl", "responses.jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    [settings] = blocks(PAGE, "yaml")
    text = settings.text.replace("sft:\n", SMALL_SFT).replace("preference:\n", SMALL_PREFERENCE)
    Path("settings.yaml").write_text(text)
    pair = {"prompt": "Two?", "chosen": "Two.", "rejected": "No."}
    Path("pairs.jsonl").write_text(json.dumps(pair))
    Path("evaluation.jsonl").write_text('{"instruction": "Three good habits?"}\n')
    for name in ("smollm2-135m", "qwen2.5-coder-1.5b"):
        keep_base(base, tmp_path / "cache", name)
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PASTA_ENDPOINT_KEY", "none")
    with chat_server(in_turn([ANNOTATED])) as endpoint:
        for command in commands(PAGE):
            url = "http://localhost:8000/v1"
            run_smaller([one.replace(url, endpoint.base_url) for one in command])
    check_rows(base, Path("runs/sft/adapter"))
    assert AutoConfig.from_pretrained("served").model_type in (shape, "llama")


def run_smaller(command: list[str]) -> None:
    name = " ".join([*command[:2], *(one for one in command if one == "--pairs")])
    assert main([*command, *SMALLER.get(name, "").split()]) == 0, command


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"MODEL": HUB_SHAPES["llama3"](tmp_path / "hub"), "TOKENS": 24, "EPOCHS": 1}
    names: dict[str, Any] = {}
    for cell in json.loads((ROOT / "examples/teach_your_own.ipynb").read_text("utf-8"))["cells"]:
        lines = "".join(cell["source"] if cell["cell_type"] == "code" else []).split("\n")
        for command in (line for line in lines if line.startswith("!pasta ")):
            run_smaller(shlex.split(command.format(**names))[1:])
        exec("\n".join(line for line in lines if not line.startswith(("!", "%"))), names)
        names |= small if "PROMPTS" in names else {}
    assert names["answer"].text


def check_rows(base: Path, adapter: Path) -> None:
    """The rows of the tags were trained, in and out, and the name of the base is the hub's."""
    loaded, plain = load_model(BaseWithAdapter(base, adapter)), load_base(BaseAlone(base)).model
    assert loaded.checkpoint.base.name == MODEL
    ids = sorted(loaded.checkpoint.control.ids)
    for side in ("get_input_embeddings", "get_output_embeddings"):
        ours, theirs = (getattr(one, side)().weight for one in (loaded.model, plain))
        changed = (ours != theirs).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) <= set(ids)
        assert len(changed) > 3
