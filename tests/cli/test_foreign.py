"""Models of other people: a broken file is one line and status 2, and a left-over is ignored."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pasta_decoding.data.lines import locked
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Pasta

Change = Callable[[Path], object]
QUESTION = ["run", "Hello", "--engine", "torch", "--max-tokens", "8"]
LOAD = "cannot be loaded"
DOWN = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
NORM = "model.norm.weight"
MLP = "model.layers.0.mlp.up_proj.weight"


def settings(name: str = "config.json", **changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def text(name: str, contents: str) -> Change:
    return lambda folder: (folder / name).write_text(contents)


def weights(change: Callable[[dict[str, torch.Tensor]], object], of: str = "model") -> Change:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / f"{of}.safetensors")
        change(tensors)
        save_file(tensors, folder / f"{of}.safetensors", metadata={"format": "pt"})

    return rewrite


QUANTISED: dict[str, dict[str, object]] = {
    "bitsandbytes": {"load_in_4bit": True},
    "gptq": {"bits": 4, "group_size": 128},
    "awq": {"bits": 4, "group_size": 128},
    "compressed-tensors": {"format": "pack-quantized"},
}
MODELS: list[tuple[Change, str]] = [
    *(
        (settings(quantization_config={"quant_method": method, **parameters}), LOAD)
        for method, parameters in QUANTISED.items()
    ),
    (settings(auto_map={"AutoConfig": "x.Config"}, model_type="x"), LOAD),
    (settings(num_attention_heads=0), LOAD),
    (settings(hidden_size="x"), LOAD),
    (text("config.json", "[]"), LOAD),
    (text("tokenizer_config.json", "[]"), LOAD),
    (text("tokenizer.json", "{}"), LOAD),
    (settings("tokenizer_config.json", model_max_length="x"), LOAD),
    (text("generation_config.json", "[]"), LOAD),
    (settings(num_hidden_layers=1), "it has no place for model.layers.1"),
    (weights(lambda tensors: tensors.pop(NORM)), "it misses model.norm.weight"),
    (weights(lambda tensors: tensors.update({MLP: tensors[MLP][:3].clone()})), LOAD),
    (weights(lambda tensors: tensors[NORM].fill_(torch.nan)), f"not finite, in {NORM}"),
    (text("generation_config.json", '{"eos_token_id": "x"}'), "end answers with 'x'"),
    (text("generation_config.json", '{"eos_token_id": [1, 99999]}'), "end answers with 99999"),
    (text("chat_template.jinja", "{{ messages + 1 }}"), "refuses this conversation"),
    (text("chat_template.jinja", "{{ 'x' * 10**10 }}"), "takes gigabytes"),
    (text("chat_template.jinja", "{% for i in range(10**9) %}{% endfor %}"), "refuses this"),
]
ADAPTERS: list[tuple[Change, str]] = [
    (settings("adapter_config.json", lora_alpha=float("nan")), "numbers that are not finite"),
    (settings("adapter_config.json", r=0), LOAD),
    (weights(lambda tensors: tensors[DOWN].fill_(torch.inf), "adapter_model"), "A.weight has num"),
    (settings("adapter_config.json", r=3), "has another rank than 3"),
    (text("adapter_config.json", "[]"), LOAD),
    (text("adapter_model.safetensors", "garbage"), LOAD),
]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [*(("model", *case) for case in MODELS), *(("adapter", *case) for case in ADAPTERS)],
)
def test_a_broken_model_or_adapter_is_one_line(
    part: str,
    change: Change,
    message: str,
    pasta: Pasta,
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
) -> None:
    sound_parts = {"model": tiny_checkpoint.base, "adapter": tiny_checkpoint.adapter}
    broken = shutil.copytree(sound_parts[part], tmp_path / part)
    change(broken)
    where = {"model": sound_parts["model"], "adapter": "none", part: broken}
    outcome = pasta(*QUESTION, "--adapter", where["adapter"], "--model", where["model"])
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err.splitlines()[-1]


def test_what_is_no_model_is_told_and_old_weights_and_a_window_of_no_meaning_are_read(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    for name, message in {
        tiny_checkpoint.adapter: "holds an adapter, not a model: name it with --adapter",
        "org/name@main": "is neither a folder nor a name on the hub, OWNER/NAME",
    }.items():
        outcome = pasta(*QUESTION, "--adapter", "none", "--model", name)
        assert (outcome.status, message in outcome.err) == (2, True)
    base = shutil.copytree(tiny_checkpoint.base, tmp_path / "base")
    plain = pasta(*QUESTION, "--adapter", "none", "--model", base).out
    settings(sliding_window=4)(base)
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    assert pasta(*QUESTION, "--adapter", "none", "--model", base).out == plain
    settings("generation_config.json", do_sample=False, top_p=0.9, pad_token_id=-1)(base)
    out = ["--to", "hf", "--out", tmp_path / "out"]
    assert pasta("export", tiny_checkpoint.adapter, "--model", base, *out).status == 0


def test_an_output_that_cannot_hold_a_character_shows_its_code_and_one_of_several_processes_leaves(
    tmp_path: Path,
) -> None:
    """It takes no interpreter down: threads of the others' connections could abort it."""
    (tmp_path / "\u20ac.txt").write_text("<sync/>")
    script = "import atexit, runpy; atexit.register(print, 'torn down'); "
    script += "runpy.run_module('pasta_decoding')"
    process = subprocess.run(
        [sys.executable, "-c", script, "lint", "\u20ac.txt"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "latin-1", "WORLD_SIZE": "2"},
        capture_output=True,
        check=False,
    )
    assert (process.returncode, process.stdout[:11]) == (1, b"\\u20ac.txt:")
    assert b"torn down" not in process.stdout


@pytest.mark.usefixtures("tiny_cache")
def test_two_runs_do_not_write_into_one_folder(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (rows := tmp_path / "rows.jsonl").write_text('{"instruction": "Hello", "response": "Hi."}\n')
    where = ["--model", tiny_checkpoint.base, "--out", tmp_path / "out"]
    out = tmp_path / "out"
    adapter = tiny_checkpoint.adapter
    preference = ["--policy", adapter, "--baseline", adapter, "--objective", "rejection"]
    preference += ["--quality", "likelihood"]
    with locked(out):
        for command in (
            ["eval", "generate", "--prompts", rows, "--method", "sequential=none"],
            ["train", "sft", "--data", rows],
            ["train", "preference", "--prompts", rows, *preference],
        ):
            outcome = pasta(*command, *where)
            assert (outcome.status, outcome.out) == (2, "")
            assert outcome.err.splitlines()[-1] == f"pasta: another process writes into {out}"
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "out"}
