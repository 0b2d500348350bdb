"""Stage 1 on a tiny model: it learns, it resumes bit-equal, and what it writes can be loaded."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.data.rows import Row
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.measures import tokens_per_step
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.catalog import BaseAlone, BaseWithAdapter, WholeModel
from pasta_decoding.models.checkpoint import read_checkpoint
from pasta_decoding.models.load import load_base, load_model
from pasta_decoding.models.template import Message
from pasta_decoding.training.sft import trial_line
from tests.checkpoint import BASE_NAME, TinyCheckpoint, make_adapter, make_base, torch_decoder
from tests.tiny import SHAPE
from tests.training.tiny_runs import CONFIG, ROWS, behind_step, chunk, die, files, losses, train


def test_a_finished_run_has_learnt_and_holds_settings_metrics_and_the_adapter(
    finished: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    first, last = losses(finished)
    assert (first["step"], last["step"]) == (5, 10)
    assert last["text_loss"] < first["text_loss"] - 1.5
    assert last["control_loss"] < first["control_loss"] - 1.5
    settings = json.loads((finished / "config.json").read_text(encoding="utf-8"))
    assert settings["learning_rate"] == CONFIG.learning_rate
    expected = {"adapter_config.json", "adapter_model.safetensors", "pasta.json"}
    assert set(files(finished / "adapter")) == expected
    # The adapter names its base, and no folder of this machine.
    written = (finished / "adapter" / "adapter_config.json").read_text(encoding="utf-8")
    assert json.loads(written)["base_model_name_or_path"] == BASE_NAME
    assert str(tiny_checkpoint.base) not in written
    # Each checkpoint can be decoded with.
    loaded = load_model(BaseWithAdapter(tiny_checkpoint.base, finished / "checkpoint-5"))
    assert loaded.checkpoint == read_checkpoint(finished / "adapter")


def test_a_killed_run_goes_on_to_the_same_losses_and_the_same_adapter(
    tiny_checkpoint: TinyCheckpoint, finished: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt), behind_step(7, die):
        train(tiny_checkpoint.base, tmp_path)
    assert [line["step"] for line in losses(tmp_path)] == [5]
    assert not (tmp_path / "adapter").exists()
    # A checkpoint that was cut off while it was written is no checkpoint.
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"global_step": 1')
    # Lines that were logged after the checkpoint are logged again; the last one broke off.
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        metrics.write('{"step": 6, "loss": 9.0}\n{"step": 1')
    train(tiny_checkpoint.base, tmp_path)
    assert losses(tmp_path) == losses(finished)
    assert files(tmp_path / "adapter") == files(finished / "adapter")


def test_a_run_goes_on_with_its_own_settings_rows_and_base_model_only(
    tiny_checkpoint: TinyCheckpoint, finished: Path, tmp_path: Path
) -> None:
    base = tiny_checkpoint.base
    other = make_base(tmp_path / "other", seed=1)
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    rows = [*ROWS[:-1], replace(ROWS[-1], response="Goodbye.")]
    with pytest.raises(PastaError, match=r"settings: rows \(\w+ -> \w+\)"):
        train(base, out, rows=rows)
    with pytest.raises(PastaError) as caught:
        train(base, out, replace(CONFIG, learning_rate=1e-3))
    assert str(caught.value) == (
        f"{out} was begun with other settings: learning_rate (0.02 -> 0.001)"
    )
    assert caught.value.hint == "Choose another --out, or repeat its settings to resume it."
    train(base, out)
    shutil.rmtree(out / "adapter")
    with pytest.raises(PastaError, match="was begun with other settings: base "):
        train(other, out)
    train(base, out)
    assert files(out / "adapter") == files(finished / "adapter")


def test_all_weights_can_be_trained_and_what_is_saved_is_a_whole_model(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    all_weights = replace(CONFIG, lora_rank=0, learning_rate=3e-3, max_steps=2)
    train(tiny_checkpoint.base, tmp_path, all_weights)
    loaded = load_model(WholeModel(tmp_path / "adapter"))
    base = load_base(BaseAlone(tiny_checkpoint.base)).model
    assert loaded.checkpoint.base.name == BASE_NAME
    assert loaded.checkpoint.base.norms_sha256 != checkpoints.describe_base(base, "").norms_sha256
    assert (tmp_path / "adapter" / "tokenizer.json").is_file()
    ours = loaded.model.state_dict()
    theirs = base.state_dict()
    assert all(not torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_training_cannot_go_on_from_is_refused_before_there_is_a_run(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint.base
    stranger = make_adapter(make_base(tmp_path / "other", seed=1), tmp_path / "stranger")
    whole_model = Path(shutil.copytree(base, tmp_path / "whole_model"))
    shutil.copy(tiny_checkpoint.adapter / "pasta.json", whole_model)
    moving = Path(shutil.copytree(base, tmp_path / "moving"))
    ropes = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    AutoConfig.from_pretrained(base, rope_parameters=ropes).save_pretrained(moving)
    neox = Path(shutil.copytree(base, tmp_path / "neox"))
    kind = SHAPE | {"vocab_size": 280}
    config = AutoConfig.for_model("gpt_neox", **kind)
    AutoModelForCausalLM.from_config(config).save_pretrained(neox)
    wrong: list[tuple[Path, dict[str, Any], str]] = [
        (base, {"start": stranger, "lora_rank": 2}, "was trained on .*norms_sha256"),
        (base, {"start": whole_model, "lora_rank": 2}, "holds a whole model, not an adapter"),
        (base, {"start": tiny_checkpoint.adapter, "lora_rank": 3}, "2: give --lora-rank 2$"),
        (base, {"start": whole_model, "lora_rank": 0}, "no adapter to go on from"),
        (base, {"scheme": "spiral"}, "^no position scheme 'spiral'; known are shared-max,"),
        (base, {"load_in_4bit": True}, "^load_in_4bit needs a GPU and bitsandbytes$"),
        (base, {"lora_targets": ("q_proj", "wrong")}, "^llama has no layers 'wrong' for LoRA$"),
        (neox, {}, "^gpt_neox cannot be trained with LoRA: .*'embed_tokens'"),
        (moving, {}, r"its rotary positions \(dynamic\) change with the length$"),
    ]
    for model, changes, message in wrong:
        with pytest.raises(PastaError, match=message):
            train(model, tmp_path / "out", replace(CONFIG, **changes))
    with pytest.raises(PastaError, match=r"^no row to train on: give --data$"):
        train(base, tmp_path / "out", rows=[])
    assert not (tmp_path / "out").exists()


def test_activations_computed_again_give_the_same_losses(
    tiny_checkpoint: TinyCheckpoint, finished: Path, tmp_path: Path
) -> None:
    train(tiny_checkpoint.base, tmp_path, replace(CONFIG, gradient_checkpointing=True))
    assert losses(tmp_path) == losses(finished)


def test_four_rows_are_enough_for_an_answer_with_more_than_one_token_a_step(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    base = tiny_checkpoint.base
    config = replace(
        CONFIG, epochs=80, max_steps=80, pack_tokens=256, save_every_steps=80, try_prompts=3
    )
    texts = [
        (chunk("A", f"{word} " * 12 + "."), chunk("B", f"{word} " * 9 + ".")) for word in "abcd"
    ]
    rows = [Row(str(n), "", f"{n}?", " ".join(both)) for n, both in enumerate(texts)]
    decoder = torch_decoder(base, train(base, tmp_path, config, rows))
    greedy = SamplingParams(temperature=0.0)
    answer = decoder.answer(decoder.request("2?", Rules(max_tokens=150), greedy))
    assert answer.annotated.count("<promise") == 2
    assert tokens_per_step(decoder.plain_tokens(answer.text), answer.critical_path) > 1
    match = re.fullmatch(r"promises in 3 of 3, (\d\.\d) tokens per step", caplog.messages[-1])
    assert match
    assert float(match[1]) > 1
    failed = trial_line(load_base(BaseAlone(base)), [[Message("user", "")]])
    assert failed == "the adapter was not tried: the prompt is empty"
