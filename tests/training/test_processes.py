"""Several processes do what one does: the same command under `accelerate launch`, and FSDP 2."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from pasta_decoding.cli import main
from pasta_decoding.data.lines import read_lines
from pasta_decoding.data.rows import question_of
from pasta_decoding.errors import PastaError
from pasta_decoding.models.catalog import BaseWithAdapter
from pasta_decoding.models.load import load_model
from pasta_decoding.training.config import PreferenceConfig, SftConfig
from pasta_decoding.training.preference import PreferenceRun
from pasta_decoding.training.run import identity
from tests.checkpoint import TinyCheckpoint, make_adapter, make_base
from tests.golden.golden import talkative
from tests.shapes import HUB_SHAPES
from tests.training.tiny_runs import CONFIG as TEN_STEPS
from tests.training.tiny_runs import ROWS, losses, train

LAUNCH = Path(__file__).parents[2] / "configs" / "accelerate" / "cpu.yaml"
CONFIG = replace(
    TEN_STEPS,
    data=("rows.jsonl",),
    eval_data=("rows.jsonl",),
    epochs=21,
    max_steps=None,
    warmup_steps=2,
    pack_tokens=110,
    packs_per_step=4,
    save_every_steps=10,
)


ASKED = [question_of(row.instruction) for row in ROWS[:3]]
PREFERENCE = PreferenceConfig(
    prompts=("rows.jsonl",),
    engine="torch",
    dtype="float32",
    rounds=2,
    limit=3,
    samples=8,
    quality="likelihood",
    objective="square",
    max_tokens=40,
    learning_rate=1e-3,
    pairs_per_step=2,
    bf16=False,
)


def adapters_of(checkpoint: TinyCheckpoint) -> dict[str, Any]:
    return dict.fromkeys(("policy", "baseline"), str(checkpoint.adapter))


Launched = tuple[subprocess.CompletedProcess[str], Path]


def launch(
    folder: Path, base: Path, config: SftConfig | PreferenceConfig
) -> subprocess.CompletedProcess[str]:
    """Run a stage in two processes; the run folder is `folder / "run"`."""
    rows = [{key: getattr(row, key) for key in ("id", "instruction", "response")} for row in ROWS]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH)]
    command = [*launcher, "--main_process_port", "0", "-m", "pasta_decoding", "train"]
    command.append("sft" if isinstance(config, SftConfig) else "preference")
    (folder / "run.yaml").write_text(json.dumps(identity(config)))
    where = ["--config", "run.yaml", "--model", str(base), "--out", "run"]
    return subprocess.run(
        [*command, *where], cwd=folder, capture_output=True, text=True, check=False
    )


def curve(out: Path) -> list[tuple[float, float, float]]:
    """The losses of training, and those of held-out rows, in the order in which they came."""
    names = ("loss", "text_loss", "control_loss")
    lines = [
        {name.removeprefix("eval_"): value for name, value in line.items()}
        for line in read_lines(out / "metrics.jsonl")
    ]
    return [(line[names[0]], line[names[1]], line[names[2]]) for line in lines]


def adapter_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def launched(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Return what two processes said, and the folder that holds their run. Shared: copy it."""
    folder = tmp_path_factory.mktemp("launched")
    process = launch(folder, tiny_checkpoint.base, CONFIG)
    assert process.returncode == 0, process.stderr
    return process, folder


@pytest.mark.slow
def test_two_processes_give_the_curve_and_the_adapter_of_one(
    tiny_checkpoint: TinyCheckpoint, launched: Launched, tmp_path: Path
) -> None:
    """The rows make three packs, and two processes do not share those that are held out evenly."""
    alone = tmp_path / "alone"
    train(tiny_checkpoint.base, alone, CONFIG, held_out=ROWS)
    process = launched[0]
    together = launched[1] / "run"
    assert len(curve(alone)) == 4 + 2  # every fifth step and the last one, and held-out rows
    for ours, theirs in zip(curve(alone), curve(together), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    torch.testing.assert_close(adapter_of(alone), adapter_of(together), atol=1e-2, rtol=2e-2)
    # Two worked, one wrote and spoke.
    (last, *_) = sorted(together.glob("checkpoint-*"), reverse=True)
    assert {path.name for path in last.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert process.stdout.splitlines().count("run/adapter") == 1
    assert process.stderr.count("finished: ") == 1
    steps = [line["step"] for line in read_lines(together / "metrics.jsonl")]
    assert steps == sorted(steps)


def test_no_process_goes_before_the_adapter_is_written(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one ends badly the launcher ends all."""
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    written = []
    meet = "wait_for_everyone"
    monkeypatch.setattr(PartialState, meet, lambda _state: written.append(adapter.exists()))
    train(tiny_checkpoint.base, tmp_path, replace(CONFIG, max_steps=1))
    assert written[-1]


def test_pairs_that_do_not_divide_over_the_processes_are_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    preference = replace(PREFERENCE, **adapters_of(tiny_checkpoint), pairs_per_step=1)
    with pytest.raises(PastaError, match=r"^pairs_per_step is 1, no multiple of the 2 processes$"):
        PreferenceRun(preference, tiny_checkpoint.base, tmp_path / "run", tmp_path).train(ASKED)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_of_several_processes_says_what_is_wrong_and_exits_with_2(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    process = launch(tmp_path, tiny_checkpoint.base, replace(CONFIG, packs_per_step=3))
    assert process.stderr.count("pasta: packs_per_step is 3, no multiple of the 2 processes\n") == 1
    assert "exitcode  : 2 " in process.stderr


@pytest.mark.slow
def test_two_processes_sample_score_and_train_in_stage_2_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share three prompts and three pairs, so that the last step has a place to fill."""
    base = talkative(make_base(tmp_path / "base"))
    checkpoint = TinyCheckpoint(base, make_adapter(base, tmp_path / "adapter"))
    process = launch(tmp_path, base, replace(PREFERENCE, **adapters_of(checkpoint)))
    assert (process.returncode, process.stdout) == (0, "run/adapter\n"), process.stderr
    monkeypatch.chdir(tmp_path)
    where = ["--config", "run.yaml", "--model", str(base), "--out", "alone"]
    assert main(["train", "preference", *where]) == 0
    alone = Path("alone/round-1")
    together = Path("run/round-1")
    samples = [
        [line for path in out.glob("samples*.jsonl") for line in read_lines(path)]
        for out in (alone, together)
    ]
    ours, theirs = (sorted(lines, key=itemgetter("prompt", "number")) for lines in samples)
    assert ours == theirs
    pairs, others = (read_lines(out / "pairs.jsonl") for out in (alone, together))
    assert (len(pairs), pairs) == (3, others)
    for our_line, their_line in zip(
        losses(alone / "train"), losses(together / "train"), strict=True
    ):
        names = ("loss", "sft", "gap")
        assert [our_line[name] for name in names] == pytest.approx(
            [their_line[n] for n in names], abs=1e-3
        )
    weights = (adapter_of(out) for out in (alone, together))
    torch.testing.assert_close(*weights, atol=1e-2, rtol=2e-2)


@pytest.mark.slow
def test_two_processes_go_on_from_a_checkpoint_of_their_own(
    tiny_checkpoint: TinyCheckpoint, launched: Launched, tmp_path: Path
) -> None:
    """All steps after the checkpoint are forgotten, as a kill would do, and done again."""
    out = Path(shutil.copytree(launched[1] / "run", tmp_path / "run"))
    whole_curve = curve(out)
    weights = adapter_of(out)
    last = max(out.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    (last / "trainer_state.json").write_text('{"global_step": ', encoding="utf-8")
    shutil.rmtree(out / "adapter")
    process = launch(tmp_path, tiny_checkpoint.base, CONFIG)
    assert process.returncode == 0, process.stderr
    assert curve(out) == whole_curve
    torch.testing.assert_close(adapter_of(out), weights, atol=0, rtol=0)


# FSDP 2 on two CPU processes, and the launcher's configurations


CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
WORKER = Path(__file__).with_name("sharded.py")
KINDS = {"cpu": "MULTI_GPU", "ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed_zero3": "DEEPSPEED"}


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
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    for base in bases:
        sharded, alone = (
            load_model(BaseWithAdapter(base, base.with_name(name))) for name in ("sharded", "alone")
        )
        ids = torch.arange(len(sharded.tokenizer))[None]
        with torch.inference_mode():
            ours = sharded.model(ids).logits
            theirs = alone.model(ids).logits
        torch.testing.assert_close(ours, theirs, atol=5e-2, rtol=1e-2)
