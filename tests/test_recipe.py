"""Every command of docs/recipe.md, run as it stands, on tiny models of the shapes that it is for.

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
from pasta_decoding.models.pull import pull
from tests.chatserver import chat_server, in_turn
from tests.shapes import HUB_SHAPES
from tests.training.test_sft import ROWS

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"
CONFIGS = PAGE.parents[1] / "configs" / "accelerate"
MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"
ANNOTATED = "\n".join(
    f'{n}. <promise topic="{city}" tokens="10"/><async>{city}.</async>'
    for n, city in enumerate(("Paris", "Rome"), start=1)
)
SMALLER = {
    "train preference": "--samples 16 --baseline-samples 1 --rounds 1 --max-tokens 120 "
    "--engine torch --dtype float32 --pairs-per-step 1 --no-bf16",
    "train sft": "--max-steps 2 --max-length 256 --pack-tokens 256 --packs-per-step 2 --no-bf16",
    "run": "--max-tokens 24",
}


def commands() -> list[str]:
    """Return the page's commands, without the launcher and the program's name."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [re.sub(r"^(pasta|accelerate launch .* -m pasta_decoding) ", "", one) for one in lines]


def test_the_page_names_configurations_that_ship_and_takes_every_step() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"configs/accelerate/\S+\.yaml", text))
    assert named
    assert all((CONFIGS / Path(path).name).is_file() for path in named)
    taken = {*SMALLER, "export", "data build", "annotate --with structure", "annotate --with llm"}
    found = {step for step in taken for one in commands() if one.startswith(step)}
    assert found == taken
    assert len(commands()) == sum(one.startswith(tuple(taken)) for one in commands())


@pytest.mark.parametrize("shape", HUB_SHAPES)
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
    Path("evaluation.jsonl").write_text('{"instruction": "Three good habits?"}\n')
    pull(tmp_path / "cache", fetch=lambda *_: base)
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PASTA_ENDPOINT_KEY", "none")
    with chat_server(in_turn([ANNOTATED])) as endpoint:
        for command in commands():
            smaller = next((SMALLER[step] for step in SMALLER if command.startswith(step)), "")
            here = command.replace("http://localhost:8000/v1", endpoint.base_url)
            assert main(shlex.split(f"{here} {smaller}")) == 0, command
    check_rows(base, Path("runs/sft/adapter"))
    assert AutoConfig.from_pretrained("runs/llama-3-8b-pasta").model_type in (shape, "llama")


def check_rows(base: Path, adapter: Path) -> None:
    """The rows of the tags were trained, in and out, and the name of the base is the hub's."""
    loaded, (plain, _) = load_model(base, adapter), load_base(base, dtype="float32")
    assert loaded.checkpoint.base.name == MODEL
    ids = sorted(loaded.checkpoint.control.ids)
    for ours, theirs in (
        (loaded.model.get_input_embeddings(), plain.get_input_embeddings()),
        (loaded.model.get_output_embeddings(), plain.get_output_embeddings()),
    ):
        changed = (ours.weight != theirs.weight).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) <= set(ids)
        assert len(changed) > 3
