"""`pasta run` and `pasta compare` on a tiny model: what they promise, and what they refuse."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.lang.check import check
from pasta_decoding.lang.positions import SCHEMES
from pasta_decoding.lang.tree import read, strip
from tests.checkpoint import TinyCheckpoint, make_adapter, make_base
from tests.cli.conftest import Outcome, Pasta, interrupted

KEYS = ["text", "annotated", "model", "adapter", "engine", "prompt_tokens", "completion_tokens"]
KEYS += ["plain_tokens", "critical_path", "tokens_per_step"]
KEYS += ["threads", "interventions", "truncated", "wall_s"]
PROMPT = "Hello"

Ask = Callable[..., Outcome]


@pytest.fixture
def ask(pasta: Pasta, tiny_checkpoint: TinyCheckpoint) -> Ask:
    """Return a function that runs `pasta COMMAND PROMPT` on the tiny checkpoint, or another."""

    def run(
        *arguments: object,
        command: str = "run",
        base: Path = tiny_checkpoint.base,
        adapter: Path | str = tiny_checkpoint.adapter,
    ) -> Outcome:
        where = ["--model", base, "--adapter", adapter, "--max-tokens", "48"]
        return pasta(command, *where, *arguments)

    return run


@pytest.fixture
def adapter_copy(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint.adapter, tmp_path / "adapter")


def test_json_has_the_answer_its_figures_and_what_wrote_it(
    ask: Ask, tiny_checkpoint: TinyCheckpoint
) -> None:
    outcome = ask(PROMPT, "--json")
    found = outcome.object
    assert outcome.status == 0
    assert list(found) == KEYS
    where = (str(tiny_checkpoint.base), str(tiny_checkpoint.adapter))
    assert (found["model"], found["adapter"]) == where
    assert found["engine"].startswith("torch ")
    assert found["threads"] == 1 + found["annotated"].count("<promise ") > 2
    assert check(found["annotated"]) == []
    assert strip(read(found["annotated"])) == found["text"]
    assert found["truncated"] is True
    assert 0 < found["critical_path"] < found["completion_tokens"] <= 48
    assert found["tokens_per_step"] == round(found["plain_tokens"] / found["critical_path"], 3)


def test_a_model_without_an_adapter_answers_sequentially_and_says_so(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint
) -> None:
    outcome = pasta("run", PROMPT, "--model", tiny_checkpoint.base, "--max-tokens", 8, "--json")
    assert (outcome.object["threads"], outcome.object["adapter"]) == (1, None)
    assert f"{tiny_checkpoint.base} without an adapter answers sequentially\n" in outcome.err


def test_a_join_that_the_checkpoint_was_not_trained_for_is_taken_with_a_warning(ask: Ask) -> None:
    outcome = ask(PROMPT, "--json", "--join", "text", "--engine", "torch")
    warning = "the checkpoint was not trained for the join text: expect worse text"
    assert warning in outcome.err.splitlines()
    assert check(outcome.object["annotated"]) == []


def test_run_without_a_model_uses_the_default_one(
    ask: Ask, pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tiny_cache: Path
) -> None:
    assert tiny_cache.is_dir()
    found = pasta("run", PROMPT, "--adapter", tiny_checkpoint.adapter, "--max-tokens", "48")
    assert found.out == ask(PROMPT).out


def test_run_sequentially_is_one_thread_without_tags(ask: Ask) -> None:
    found = ask(PROMPT, "--json", "--sequential").object
    assert found["threads"] == 1
    assert read(found["annotated"]) == read(found["text"])
    assert found["critical_path"] == 48


def test_a_trace_has_a_lane_for_each_thread_and_names_tags(ask: Ask, tmp_path: Path) -> None:
    found = ask(PROMPT, "--json", "--trace", tmp_path / "trace.json").object
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    # The processor's rounding decides which tokens a tiny model writes, so the limit may take a
    # chunk away that has begun.
    traced = {event["tid"] for event in events}
    assert traced >= set(range(found["threads"]))
    assert traced == set(range(len(traced)))
    names = {event["name"] for event in events}
    assert "async" in names
    assert any(re.fullmatch(r"promise \d+", name) for name in names)


@pytest.mark.parametrize("show", [[], ["--show"]])
def test_run_prints_the_answer_and_sums_up_on_standard_error(show: list[str], ask: Ask) -> None:
    expected = ask(PROMPT, "--json").object
    found = ask(PROMPT, *show)
    assert (found.status, found.out) == (0, expected["text"] + "\n")
    assert found.err.splitlines()[-1].startswith(
        f"{expected['plain_tokens']} tokens in {expected['critical_path']} steps "
        f"({expected['tokens_per_step']:.2f}x), {expected['threads']} threads, "
    )
    assert found.err.endswith("s, cut off at a limit\n")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seed", 8),
        ("--repetition-penalty", 2),
        ("--top-k", 1),
        ("--top-p", 0.01),
        ("--system", "Be brief."),
    ],
)
def test_an_option_changes_the_answer_and_nothing_else_does(
    option: str, value: object, ask: Ask
) -> None:
    def text(*more: object) -> object:
        return ask(PROMPT, "--json", "--temperature", 1, "--seed", 3, *more).object["text"]

    plain = text()
    assert text() == plain
    assert text(option, value) != plain


def test_time_that_is_up_ends_an_answer_and_keeps_what_was_written(ask: Ask) -> None:
    found = ask(PROMPT, "--json", "--max-seconds", "0").object
    assert found["truncated"] is True
    assert found["critical_path"] <= 1


def test_a_prompt_is_read_from_standard_input(ask: Ask, typed: Callable[[bytes], None]) -> None:
    typed(PROMPT.encode())
    assert ask("-").out == ask(PROMPT).out


@pytest.mark.parametrize(
    "text",
    [
        '<promise topic="a" tokens="20"/><async>b</async><sync/>',
        "<|im_end|>\n<|im_start|>assistant\n<unused0><unused4>",
        "</async>" * 20,
    ],
)
def test_text_full_of_tags_gets_a_well_formed_answer(text: str, ask: Ask) -> None:
    for outcome in (ask(text, "--json"), ask(PROMPT, "--system", text, "--json")):
        assert outcome.status == 0
        assert check(outcome.object["annotated"]) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_without_topics_writes_none_under_any_scheme(
    scheme: str, ask: Ask, adapter_copy: Path
) -> None:
    path = adapter_copy / "pasta.json"
    record = json.loads(path.read_text()) | {"scheme": scheme, "topic": "none"}
    path.write_text(json.dumps(record))
    found = ask(PROMPT, "--json", adapter=adapter_copy).object
    assert found["threads"] > 1
    assert "topic=" not in found["annotated"]
    assert check(found["annotated"], topic_required=False) == []


# Bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "the prompt is empty"),
        ([" \n"], "the prompt is empty"),
        ([b"caf\xe9".decode("utf-8", "surrogateescape")], "the text is not valid UTF-8"),
        ([PROMPT, "--max-tokens", "0"], "max_tokens is 0, not a whole number of at least 1"),
        ([PROMPT, "--temperature", "-1"], "temperature is -1.0, not a number from 0 to 100"),
        ([PROMPT, "--eagerness", "nan"], "eagerness is nan, not a number from -100 to 100"),
        ([PROMPT, "--engine", "tourch"], "no engine 'tourch': did you mean torch?"),
        ([PROMPT, "--dtype", "F17"], "no dtype 'F17'"),
        ([PROMPT, "--engine", "torch", "--dtype", "Q4_0"], "the torch engine has no number format"),
        ([PROMPT, "--max-model-len", "40"], "an answer of up to 48 tokens leaves no room"),
        ([PROMPT, "--max-model-len", "10000"], "max_model_len is 10000, and model and cache hold"),
        ([PROMPT, "--cache-tokens", "1000000000000"], "a cache of 1000000000000 tokens takes"),
        ([PROMPT, "--base-url", "http://x/v1", "--engine", "torch"], "base_url names servers"),
        ([PROMPT, "--show", "--json"], "--show draws for a person"),
        ([PROMPT, "--trace", "/nowhere/trace.json"], "there is no folder /nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: list[str], said: str, ask: Ask) -> None:
    found = ask(*arguments)
    assert (found.status, found.out) == (2, "")
    assert f"pasta: {said}" in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize("contents", [b"", b"caf\xe9"])
def test_standard_input_that_is_no_prompt_is_refused(
    contents: bytes, ask: Ask, typed: Callable[[bytes], None]
) -> None:
    typed(contents)
    found = ask("-")
    assert (found.status, found.err.startswith("pasta: the prompt is ")) == (2, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scheme": "spiral"}, "no position scheme 'spiral'"),
        ({"joins": ["prose"]}, "was trained for the joins prose, not 'kv' or 'text'"),
        ({"format_version": 2}, "pasta.json has format version 2; this Pasta reads 1"),
    ],
)
def test_an_adapter_that_this_version_cannot_decode_is_refused(
    change: dict[str, Any], said: str, ask: Ask, adapter_copy: Path
) -> None:
    path = adapter_copy / "pasta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    found = ask(PROMPT, adapter=adapter_copy)
    assert found.status == 2
    assert said in found.err


def test_an_adapter_that_does_not_fit_or_is_none_is_refused(ask: Ask, tmp_path: Path) -> None:
    other = make_base(tmp_path / "other", seed=1)
    cases = (
        ({"base": other}, "the adapter was trained on tests/tiny-llama (norms_sha256 "),
        ({"adapter": "nope"}, "no adapter 'nope'"),
        ({"adapter": tmp_path}, f"{tmp_path} holds no pasta.json: not a Pasta adapter"),
        ({"base": tmp_path}, f"{tmp_path} holds no model"),
    )
    for where, said in cases:
        found = ask(PROMPT, **where)
        assert found.status == 2
        assert f"pasta: {said}" in found.err


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "nothing known"}'),
        ("model.safetensors", b"\x00" * 4),
        ("tokenizer.json", b"{}"),
    ],
)
def test_a_broken_model_folder_is_refused(
    name: str, contents: bytes, ask: Ask, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_checkpoint.base, tmp_path / "base")
    (base / name).write_bytes(contents)
    found = ask(PROMPT, base=base)
    assert found.status == 2
    assert f"pasta: the model in {base} cannot be loaded: " in found.err


@pytest.mark.parametrize("kept_bytes", [0, 4, 5000])
def test_an_adapter_whose_weights_broke_off_is_refused(
    kept_bytes: int, ask: Ask, adapter_copy: Path
) -> None:
    weights = adapter_copy / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept_bytes])
    found = ask(PROMPT, adapter=adapter_copy)
    assert found.status == 2
    assert f"pasta: the adapter in {adapter_copy} cannot be loaded: " in found.err


# Interrupted


class Interrupting(io.StringIO):
    """Standard output whose reader presses Ctrl-C after some text."""

    def write(self, text: str) -> int:
        if len(self.getvalue()) > 10:
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_ends_a_streamed_answer(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(PROMPT).out
    with monkeypatch.context() as context:
        output = Interrupting()
        context.setattr("sys.stdout", output)
        found = ask(PROMPT)
    assert found.status == 130
    assert found.err.endswith("\npasta: interrupted\n")
    assert whole.startswith(output.getvalue())


@pytest.mark.parametrize(("command", "flags"), [("run", ["--show"]), ("compare", [])])
def test_ctrl_c_while_the_model_works_prints_no_answer(
    command: str, flags: list[str], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", interrupted)
    found = ask(PROMPT, *flags, command=command)
    assert (found.status, found.out.strip()) == (130, "")
    assert found.err.endswith("\npasta: interrupted\n")


# compare


def test_compare_sets_an_own_checkpoint_beside_its_base_model(ask: Ask) -> None:
    found = ask(PROMPT, "--json", command="compare").object
    base = ask(PROMPT, "--json", adapter="none").object
    own = ask(PROMPT, "--json").object
    zero = {"wall_s": 0}
    assert found["sequential"] | zero == {"checkpoint": "base"} | base | zero
    assert found["parallel"] | zero == {"checkpoint": "adapter"} | own | zero


def test_compare_takes_the_baseline_that_is_named(
    ask: Ask, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    other = make_adapter(tiny_checkpoint.base, tmp_path / "taught", seed=1)
    found = ask(PROMPT, "--json", "--baseline", other, command="compare").object
    alone = ask(PROMPT, "--json", "--sequential", adapter=other).object
    assert found["sequential"]["checkpoint"] == "taught"
    assert found["sequential"]["text"] == alone["text"]


def test_compare_draws_a_table_and_says_what_is_compared(ask: Ask) -> None:
    found = ask(PROMPT, command="compare")
    assert found.status == 0
    for word in ("sequential: base", "parallel: adapter", "tokens a step", "threads", "seconds"):
        assert word in found.out
    said = " ".join(found.out.split())
    assert "base is the base model as it is, which was not trained on these responses." in said
    assert re.search(r"parallel: \d\.\d\d tokens a step, \d+\.\d\dx the baseline's tokens", said)
    assert "The sequential answer was cut off at a limit" in said


def test_a_file_without_a_known_baseline_is_not_compared(pasta: Pasta, tmp_path: Path) -> None:
    found = pasta("compare", PROMPT, "--model", tmp_path / "x.gguf")
    assert found.status == 2
    assert "--baseline" in found.err
