"""A run's settings and folder: what a file may say, what is resumed, what is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.training.config import PreferenceConfig, SftConfig, read_settings_file
from pasta_decoding.training.loop import last_checkpoint
from pasta_decoding.training.run import (
    identity,
    refuse_other_run,
    with_precision,
    write_settings,
)

CONFIG = SftConfig(data=("a.jsonl", "b.jsonl"), max_steps=5, joins=(Joining.text,))


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(PastaError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("config", [CONFIG, PreferenceConfig(prompts=("p",), lambda_=None)])
def test_a_runs_own_settings_are_a_file_of_settings(
    config: SftConfig | PreferenceConfig, tmp_path: Path
) -> None:
    write_settings(tmp_path, config)
    kind = type(config)
    assert kind(**read_settings_file(tmp_path / "config.json", kind)) == config
    refuse_other_run(tmp_path, config)
    refuse_other_run(tmp_path / "new", config)


def test_a_file_says_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1e-4\nlambda: .inf\nalpha: 1\nprompts: [a, b]\n")
    config = PreferenceConfig(**read_settings_file(path, PreferenceConfig))
    assert config == PreferenceConfig(
        learning_rate=1e-4, lambda_=None, alpha=1.0, prompts=("a", "b")
    )
    path.write_text("lambda: 2")
    assert read_settings_file(path, PreferenceConfig) == {"lambda_": 2.0}


def test_what_a_file_cannot_say_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text, complaint in (
        ("lerning_rate: 1", "no setting 'lerning_rate': did you mean learning_rate?"),
        ("epochs: many", "epochs is 'many', not int"),
        ("epochs: true", "epochs is True, not int"),
        ("max_steps: []", "max_steps is [], not int | None"),
        ("epochs: 0", "epochs is 0, less than 1"),
        ("learning_rate: .nan", "learning_rate is nan, less than 0"),
        ("learning_rate: fast", "learning_rate is 'fast', not float"),
        ("bf16: 1", "bf16 is 1, not bool | None"),
        ("data: a.jsonl", "data is 'a.jsonl', not tuple[str, ...]"),
        ("schedule: [linear]", "schedule is ['linear'], not Literal['linear', 'cosine', 'constant"),
        ("joins: [prose]", "joins is ['prose'], not tuple["),
        ("- epochs", "holds no settings, such as `epochs: 2`"),
        ("{epochs: 1", "cannot be read: while parsing a flow mapping"),
    ):
        path.write_text(text)
        message = refusal(lambda: read_settings_file(path, SftConfig))
        assert message.startswith(str(path))
        assert complaint in message
        assert "\n" not in message


def test_the_device_decides_on_bfloat16_and_a_run_goes_on_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A processor without bfloat16 takes forty times as long in it."""
    caplog.set_level("INFO")
    monkeypatch.setattr("pasta_decoding.training.run.native_dtype", lambda _device: "float32")
    config = with_precision(SftConfig(), tmp_path, "cpu")
    assert config == SftConfig(bf16=False)
    assert caplog.messages == ["training in float32: this processor has no bfloat16"]
    write_settings(tmp_path, config)
    monkeypatch.setattr("pasta_decoding.training.run.native_dtype", lambda _device: "bfloat16")
    assert with_precision(SftConfig(), tmp_path, "cpu") == config
    assert with_precision(SftConfig(), tmp_path / "new", "cuda") == SftConfig(bf16=True)
    assert with_precision(SftConfig(bf16=True), tmp_path / "new", "cpu") == SftConfig(bf16=True)


def test_every_setting_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    write_settings(tmp_path, CONFIG)
    other = replace(CONFIG, data=("a.jsonl",), max_steps=None)
    assert refusal(lambda: refuse_other_run(tmp_path, other)) == (
        f"{tmp_path} was begun with other settings: "
        "data (['a.jsonl', 'b.jsonl'] -> ['a.jsonl']), max_steps (5 -> None)"
    )
    refuse_other_run(tmp_path, replace(CONFIG, report_to=("wandb",)))
    assert not {"report_to", "device"} & set(identity(PreferenceConfig()))
    older = {name: value for name, value in identity(CONFIG).items() if name != "load_in_4bit"}
    (tmp_path / "config.json").write_text(json.dumps(older | {"attention": "dense"}))
    refuse_other_run(tmp_path, CONFIG)  # a version without one setting, and with another, began it


def test_the_last_checkpoint_is_the_one_with_the_most_steps_that_is_whole(tmp_path: Path) -> None:
    for step, state in ((9, "{}"), (10, json.dumps({})), (11, '{"global_step"'), (12, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
