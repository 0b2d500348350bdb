"""Stage 1 on a tiny model: it learns, it resumes bit-equal, and what it writes can be loaded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from pasta_decoding.data.dataset import Row
from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining, Layout
from pasta_decoding.lang.measures import tokens_per_step
from pasta_decoding.lang.tree import Span, show
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.control_tokens import choose_tokens
from pasta_decoding.models.load import load_base, load_model, load_tokenizer
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.local import torch_decoder
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.loop import set_attention
from pasta_decoding.training.lora import lora_rank
from pasta_decoding.training.sft import (
    compile_rows,
    plan_packs,
    train_sft,
)
from pasta_decoding.training.view import takes_blocks
from tests.checkpoint import (
    BASE_NAME,
    END_ID,
    TinyCheckpoint,
    byte_tokenizer,
    make_adapter,
    make_base,
)
from tests.shapes import make_llama3

CONFIG = SftConfig(
    data=("four.jsonl",),
    base_name=BASE_NAME,
    epochs=20,
    learning_rate=2e-2,
    warmup_steps=2,
    lora_rank=8,
    max_tokens=256,
    pack_tokens=160,
    packs_per_step=2,
    max_steps=20,
    save_every_steps=10,
    bf16=False,
)


def chunk(topic: str, text: str) -> str:
    return f'<promise topic="{topic}" tokens="20"/><async>{text}</async>'


ROWS = [
    Row("1", "", "Two cities?", f"1. {chunk('Paris', 'Paris.')}\n2. {chunk('Rome', 'Rome.')}"),
    Row("2", "", "Two drinks?", f"1. {chunk('Tea', 'Tea.')}\n2. {chunk('Milk', 'Milk.')}"),
    Row("3", "", "Sum?", f"{chunk('Left', 'One.')} {chunk('Right', 'Two.')}<sync/> Three."),
    Row("4", "", "Hello?", "Hello."),
]


@pytest.fixture(scope="module")
def finished(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of twenty steps without a break."""
    out = tmp_path_factory.mktemp("run") / "out"
    train_sft(CONFIG, ROWS, base=tiny_checkpoint.base, out=out, say=lambda _line: None)
    return out


def losses(out: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` says, without the clock."""
    lines = read_lines(out / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_an_adapter_for_both_joins_says_so_and_decodes_with_both(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    config = replace(CONFIG, joins=(Joining.kv, Joining.text), max_steps=1)
    said: list[str] = []
    adapter = train_sft(
        config, ROWS, base=tiny_checkpoint.base, out=tmp_path / "run", say=said.append
    )
    assert checkpoints.load(adapter).joins == ("kv", "text")
    # Four answers, and the stretch behind the one sync as a row of its own.
    assert any(line.startswith("5 rows, ") for line in said)
    for joining in Joining:
        decoder = torch_decoder(tiny_checkpoint.base, adapter, joining=joining)
        assert decoder.joining is joining
        assert decoder.trained


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_twenty_steps_on_four_examples_bring_the_loss_down(finished: Path) -> None:
    lines = losses(finished)
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert lines[0]["text_loss"] > 6
    assert lines[-1]["text_loss"] < 1.5
    assert lines[-1]["control_loss"] < 0.2


def test_a_run_folder_holds_settings_metrics_a_picture_and_the_adapter(finished: Path) -> None:
    settings = json.loads((finished / "config.json").read_text(encoding="utf-8"))
    assert settings["learning_rate"] == CONFIG.learning_rate
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    expected = {"adapter_config.json", "adapter_model.safetensors", "pasta.json"}
    assert set(files(finished / "adapter")) == expected
    assert not (finished / "adapter.partial").exists()


@pytest.fixture
def dying_optimizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the thirteenth optimiser step never come back."""
    step = torch.optim.AdamW.step
    steps = 0

    def die(self: torch.optim.AdamW, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 13:
            raise KeyboardInterrupt
        return step(self, *arguments)

    with monkeypatch.context() as context:
        context.setattr(torch.optim.AdamW, "step", die)
        yield context


def test_a_killed_run_goes_on_to_the_same_losses_and_the_same_adapter(
    tiny_checkpoint: TinyCheckpoint,
    finished: Path,
    tmp_path: Path,
    dying_optimizer: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train_sft(CONFIG, ROWS, base=tiny_checkpoint.base, out=out, say=lambda _line: None)
    dying_optimizer.undo()
    assert [line["step"] for line in losses(out)] == [5, 10]
    assert not (out / "adapter").exists()
    # A checkpoint that was cut off while it was written is no checkpoint.
    (out / "checkpoint-11").mkdir()
    (out / "checkpoint-12").mkdir()
    (out / "checkpoint-12" / "trainer_state.json").write_text('{"global_step": 1')
    # Lines that were logged after the checkpoint are logged again; the last one broke off.
    with (out / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        metrics.write('{"step": 12, "loss": 9.0}\n{"step": 1')
    train_sft(CONFIG, ROWS, base=tiny_checkpoint.base, out=out, say=lambda _line: None)
    assert losses(out) == losses(finished)
    assert files(out / "adapter") == files(finished / "adapter")


def test_a_finished_run_is_left_as_it_is(
    tiny_checkpoint: TinyCheckpoint, finished: Path, tmp_path: Path
) -> None:
    again = shutil.copytree(finished, tmp_path / "again")
    train_sft(CONFIG, ROWS, base=tiny_checkpoint.base, out=again, say=lambda _line: None)
    assert losses(again) == losses(finished)
    assert files(again / "adapter") == files(finished / "adapter")


def test_a_run_folder_refuses_a_run_with_other_settings(
    tiny_checkpoint: TinyCheckpoint, finished: Path
) -> None:
    before = files(finished / "adapter")
    other = replace(CONFIG, learning_rate=1e-3)
    with pytest.raises(PastaError) as caught:
        train_sft(other, ROWS, base=tiny_checkpoint.base, out=finished, say=lambda _line: None)
    assert str(caught.value) == (
        f"{finished} was begun with other settings: learning_rate (0.02 -> 0.001)"
    )
    assert caught.value.hint == "Choose another --out, or repeat its settings to resume it."
    assert files(finished / "adapter") == before


def test_the_merged_model_computes_what_the_adapter_on_its_base_does(
    tiny_checkpoint: TinyCheckpoint, finished: Path
) -> None:
    loaded = load_model(tiny_checkpoint.base, finished / "adapter")
    base, _ = load_base(tiny_checkpoint.base, dtype="float32")
    ids = torch.arange(len(loaded.tokenizer))[None]
    with torch.no_grad():
        plain_TV = base(ids).logits[0]
        unmerged_TV = PeftModel.from_pretrained(base, str(finished / "adapter"))(ids).logits[0]
        merged_TV = loaded.model(ids).logits[0]
    torch.testing.assert_close(merged_TV, unmerged_TV, atol=1e-3, rtol=1e-4)
    assert (merged_TV - plain_TV).abs().max() > 1, "the adapter does something"
    assert loaded.checkpoint.base.name == BASE_NAME


def test_the_adapter_names_its_base_and_no_folder_of_this_machine(
    finished: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    written = (finished / "adapter" / "adapter_config.json").read_text(encoding="utf-8")
    assert json.loads(written)["base_model_name_or_path"] == BASE_NAME
    assert str(tiny_checkpoint.base) not in written


def test_rows_that_cannot_be_used_are_left_out_counted_and_told_why() -> None:
    tokenizer = byte_tokenizer()
    said: list[str] = []
    unusable = [
        Row("5", "", "x" * 300, "Too late."),
        Row("6", "", "Why?", "No <promise tokens='x'> and an <async>end"),
        Row("7", "", "Why?", "</async>"),
        Row("8", "", "Why?", " \n"),
        Row("11", "", "Why?", show((Span(ROWS[0].response),))),
        Row("9", "", " ", "To what?"),
        Row("10", "", "y" * 300, "Too late."),
    ]
    layouts = compile_rows(
        [*ROWS, *unusable],
        tokenizer,
        choose_tokens(tokenizer),
        CONFIG,
        said.append,
        end=END_ID,
    )
    assert len(layouts) == 4
    assert said == [
        "2 rows left out, the first is 5: longer than 256 tokens",
        "1 rows left out, the first is 6: broken tags (promise-without-async)",
        "1 rows left out, the first is 7: broken tags (stray-close)",
        "1 rows left out, the first is 8: empty response",
        "1 rows left out, the first is 11: annotated twice: its tags are text",
        "1 rows left out, the first is 9: the prompt is empty",
    ]


def compiled(rows: list[Row], config: SftConfig = CONFIG) -> tuple[list[Layout], list[str]]:
    """Return the layouts of rows and what was said about others."""
    tokenizer = byte_tokenizer()
    said: list[str] = []
    return compile_rows(
        rows, tokenizer, choose_tokens(tokenizer), config, said.append, end=END_ID
    ), said


def test_without_topics_the_same_rows_teach_promises_that_are_closed_at_once() -> None:
    bare = [replace(row, response=re.sub(' topic="[^"]*"', "", row.response)) for row in ROWS]
    config = replace(CONFIG, topic="none")
    layouts, said = compiled(ROWS, config)
    assert (layouts, said) == compiled(bare, config)
    control = choose_tokens(byte_tokenizer())
    tokens = [token for layout in layouts for token in layout.tokens]
    behind = [tokens[place + 1] for place, id_ in enumerate(tokens) if id_ == control.promise_open]
    assert behind == [control.promise_close[20]] * 6
    told = "3 rows left out, the first is 1: broken tags (missing-topic)"
    assert compiled(bare)[1] == [told]


def test_earlier_turns_are_part_of_the_prompt_and_carry_no_loss() -> None:
    tokenizer = byte_tokenizer()
    history = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Ho."))
    [alone], [behind] = compiled(ROWS[3:])[0], compiled([replace(ROWS[3], history=history)])[0]
    shown = tokenizer.decode(list(behind.tokens))
    assert "<|im_start|>system\nBe brief.<|im_end|>" in shown
    assert shown.index("Ho.<|im_end|>") < shown.index("Hello?")
    labels = [[label for label in one.label if label is not None] for one in (alone, behind)]
    assert labels[0] == labels[1]


def test_the_same_rows_teach_each_tokenizer_its_own_lengths(tmp_path: Path) -> None:
    """One takes these words whole, as large vocabularies do; the other writes them in bytes."""
    text = "user1assistant2system3user4assistant5system6user"
    rows = [replace(ROWS[0], response=chunk("Roles", text))]  # which says 20 tokens
    bases = {13: make_llama3(tmp_path / "llama3"), 48: make_base(tmp_path / "bytes")}
    for tokens, base in bases.items():
        tokenizer = load_tokenizer(base)
        control = choose_tokens(tokenizer)
        end = tokenizer.eos_token_id
        [layout] = compile_rows(rows, tokenizer, control, CONFIG, print, end=end)
        begin = layout.tokens.index(control.async_open)
        assert sum(thread == 1 for thread in layout.thread) - 1 == tokens
        assert layout.tokens[begin - 1] == control.promise_close[control.bucket(tokens)]
        out = tmp_path / f"run-{tokens}"
        config = replace(CONFIG, max_steps=1)
        adapter = train_sft(config, rows, base=base, out=out, say=lambda _line: None)
        assert checkpoints.load(adapter).control == control


def test_the_scheme_places_the_tokens_and_nothing_else() -> None:
    (shared, _), (reserved, _) = (
        compiled(ROWS),
        compiled(ROWS, replace(CONFIG, scheme="reserve")),
    )
    assert [layout.position for layout in shared] != [layout.position for layout in reserved]
    alike = [replace(layout, position=()) for layout in shared]
    assert [replace(layout, position=()) for layout in reserved] == alike


def test_an_unknown_scheme_is_refused_before_anything_is_trained(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    config = replace(CONFIG, scheme="spiral")
    with pytest.raises(PastaError, match=r"^no position scheme 'spiral'; known are shared-max,"):
        train_sft(config, ROWS, base=tiny_checkpoint.base, out=tmp_path, say=lambda _line: None)


@pytest.mark.parametrize("rows", [[], [Row("5", "", "x" * 300, "Too late.")]])
def test_with_nothing_to_train_on_training_is_refused(rows: list[Row]) -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(PastaError, match=r"^no row to train on$") as caught:
        compile_rows(rows, tokenizer, choose_tokens(tokenizer), CONFIG, print, end=END_ID)
    assert caught.value.hint == "Raise --max-length or give other rows."


def test_packs_of_all_epochs_are_fixed_in_advance_and_each_epoch_shows_every_row() -> None:
    tokenizer = byte_tokenizer()
    control = choose_tokens(tokenizer)
    layouts = compile_rows(ROWS, tokenizer, control, CONFIG, print, end=END_ID)
    all_epochs = replace(CONFIG, max_steps=None)
    packs = plan_packs(layouts, all_epochs)
    assert packs == plan_packs(layouts, all_epochs)
    assert packs[:40] == plan_packs(layouts, CONFIG)
    shown = [layout for layouts_of_pack in packs for layout in layouts_of_pack]
    for epoch in range(20):
        assert sorted(map(id, shown[4 * epoch : 4 * epoch + 4])) == sorted(map(id, layouts))


def test_all_weights_can_be_trained_and_what_is_saved_is_a_whole_model(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    whole = replace(CONFIG, lora_rank=0, learning_rate=3e-3, max_steps=10)
    train_sft(whole, ROWS, base=tiny_checkpoint.base, out=out, say=lambda _line: None)
    assert losses(out)[-1]["text_loss"] < losses(out)[0]["text_loss"] - 1
    loaded = load_model(tiny_checkpoint.base, out / "adapter")
    base, _ = load_base(tiny_checkpoint.base, dtype="float32")
    assert loaded.checkpoint.base.name == BASE_NAME
    assert loaded.checkpoint.base.norms_sha256 != checkpoints.describe_base(base, "").norms_sha256
    assert (out / "adapter" / "tokenizer.json").is_file()
    ours, theirs = loaded.model.state_dict(), base.state_dict()
    assert all(not torch.equal(ours[name], theirs[name]) for name in theirs)


def test_all_weights_cannot_go_on_from_an_adapter(tiny_checkpoint: TinyCheckpoint) -> None:
    with pytest.raises(PastaError, match="no adapter to go on from"):
        replace(CONFIG, lora_rank=0, start=str(tiny_checkpoint.adapter))


def test_a_run_goes_on_with_its_own_rows_and_base_model_only(
    tiny_checkpoint: TinyCheckpoint,
    finished: Path,
    tmp_path: Path,
    dying_optimizer: pytest.MonkeyPatch,
) -> None:
    base, other = tiny_checkpoint.base, make_base(tmp_path / "other", seed=1)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        train_sft(CONFIG, ROWS, base=base, out=out, say=lambda _line: None)
    dying_optimizer.undo()
    rows = [*ROWS[:-1], replace(ROWS[-1], response="Goodbye.")]
    for run in (out, finished):
        with pytest.raises(PastaError, match=r"was begun with other settings: rows \(\w+ -> \w+\)"):
            train_sft(CONFIG, rows, base=base, out=run, say=lambda _line: None)
    with pytest.raises(PastaError, match="was begun with other settings: base "):
        train_sft(CONFIG, ROWS, base=other, out=out, say=lambda _line: None)
    train_sft(CONFIG, ROWS, base=base, out=out, say=lambda _line: None)
    assert files(out / "adapter") == files(finished / "adapter")


def test_what_training_cannot_go_on_from_is_refused_before_there_is_a_run(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    stranger = make_adapter(make_base(tmp_path / "other", seed=1), tmp_path / "stranger")
    whole = Path(shutil.copytree(tiny_checkpoint.base, tmp_path / "whole"))
    shutil.copy(tiny_checkpoint.adapter / "pasta.json", whole)
    rank = lora_rank(tiny_checkpoint.adapter)
    for start, wanted_rank, message in (
        (stranger, rank, "the adapter was trained on .*norms_sha256"),
        (whole, rank, "holds a whole model, not an adapter"),
        (tiny_checkpoint.adapter, rank + 1, f"has LoRA of rank {rank}, which stays"),
    ):
        config = replace(CONFIG, start=str(start), lora_rank=wanted_rank)
        with pytest.raises(PastaError, match=message):
            train_sft(
                config,
                ROWS,
                base=tiny_checkpoint.base,
                out=tmp_path / "out",
                say=lambda _line: None,
            )
    assert not (tmp_path / "out").exists()


def test_activations_computed_again_give_the_same_losses(
    tiny_checkpoint: TinyCheckpoint, finished: Path, tmp_path: Path
) -> None:
    again = replace(CONFIG, gradient_checkpointing=True)
    train_sft(again, ROWS, base=tiny_checkpoint.base, out=tmp_path, say=lambda _line: None)
    assert losses(tmp_path) == losses(finished)


def test_block_masks_are_refused_where_torch_cannot_train_with_them(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = replace(CONFIG, attention="flex")
    with pytest.raises(PastaError, match=r"^flex attention has no backward pass on a CPU"):
        train_sft(config, ROWS, base=tiny_checkpoint.base, out=tmp_path, say=lambda _line: None)


def test_what_attention_is_computed_with_is_said(tiny_checkpoint: TinyCheckpoint) -> None:
    model, _ = load_base(tiny_checkpoint.base, dtype="float32")
    assert set_attention(model, "dense", on_gpu=True) == "sdpa, with dense masks"
    assert set_attention(model, "auto", on_gpu=False) == "sdpa, with dense masks"
    assert set_attention(model, "auto", on_gpu=True) == "flex, with block masks"
    assert takes_blocks(model)


def test_four_rows_are_enough_for_an_answer_with_more_than_one_token_a_step(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint.base
    config = replace(CONFIG, epochs=80, max_steps=80, pack_tokens=256)
    texts = [
        (chunk("A", f"{word} " * 12 + "."), chunk("B", f"{word} " * 9 + ".")) for word in "abcd"
    ]
    rows = [Row(str(n), "", f"{n}?", " ".join(both)) for n, both in enumerate(texts)]
    adapter = train_sft(config, rows, base=base, out=tmp_path, say=lambda _line: None)
    decoder = torch_decoder(base, adapter)
    greedy = SamplingParams(temperature=0.0)
    answer = decoder.answer(decoder.request("2?", Rules(max_tokens=150), greedy))
    assert answer.annotated.count("<promise") == 2
    assert tokens_per_step(decoder.plain_tokens(answer.text), answer.critical_path) > 1
