"""`pasta run`, `compare` and `chat` on a tiny model: what they print, keep and refuse."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.cli.run import CHAT_HELP, limit_notice, print_answer
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import read, strip
from tests.checkpoint import TinyCheckpoint, make_adapter
from tests.cli.conftest import Outcome, Pasta, interrupted

KEYS = ["text", "annotated", "model", "adapter", "engine", "prompt_tokens", "completion_tokens"]
KEYS += ["plain_tokens", "critical_path", "tokens_per_step"]
KEYS += ["threads", "interventions", "truncated", "wall_s"]
PROMPT = "Hello"


@pytest.fixture
def ask(pasta: Pasta, tiny_checkpoint: TinyCheckpoint) -> Pasta:
    """Return a function that runs `pasta COMMAND` on the tiny checkpoint, or another."""

    def run(
        *arguments: object,
        command: str = "run",
        base: Path = tiny_checkpoint.base,
        adapter: Path | str = tiny_checkpoint.adapter,
    ) -> Outcome:
        where = ["--model", base, "--adapter", adapter, "--max-tokens", "48"]
        return pasta(command, *where, *arguments)

    return run


def test_json_has_the_answer_its_figures_and_what_wrote_it(
    ask: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    outcome = ask(PROMPT, "--json", "--trace", tmp_path / "trace.json")
    figures = outcome.object
    assert outcome.status == 0
    assert list(figures) == KEYS
    where = (str(tiny_checkpoint.base), str(tiny_checkpoint.adapter))
    assert (figures["model"], figures["adapter"]) == where
    assert figures["engine"].startswith("fast ")
    assert "engine: fast " in outcome.err
    assert figures["threads"] == 1 + figures["annotated"].count("<promise ") > 2
    assert check(figures["annotated"]) == []
    assert strip(read(figures["annotated"])) == figures["text"]
    assert figures["truncated"] is True
    assert 0 < figures["critical_path"] < figures["completion_tokens"] <= 48
    assert figures["tokens_per_step"] == round(
        figures["plain_tokens"] / figures["critical_path"], 3
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    # The processor's rounding decides which tokens a tiny model writes, so the limit may take a
    # chunk away that has begun.
    assert {event["tid"] for event in events} >= set(range(figures["threads"]))
    prefill, *boxes = (event for event in events if event["ph"] == "X")
    assert prefill["name"] == "prefill"
    assert len(boxes) >= figures["completion_tokens"] - 1
    assert "async" in {box["name"] for box in boxes if box["tid"] == 1}


@pytest.mark.parametrize("show", [[], ["--show"]])
def test_run_prints_the_answer_and_sums_up_on_standard_error(show: list[str], ask: Pasta) -> None:
    expected = ask(PROMPT, "--json").object
    outcome = ask(PROMPT, *show)
    assert (outcome.status, outcome.out) == (0, expected["text"] + "\n")
    assert outcome.err.splitlines()[-1].startswith(
        f"{expected['plain_tokens']} tokens in {expected['critical_path']} steps "
        f"({expected['tokens_per_step']:.2f}x), {expected['threads']} threads, "
    )
    assert outcome.err.endswith("s, cut off at --max-tokens 48 (tags count)\n")


@pytest.mark.parametrize(
    ("result", "notice"),
    [
        ({"truncated": False, "hit_limit": False, "finish_reason": "stop"}, ""),
        (
            {"truncated": True, "hit_limit": True, "finish_reason": "length"},
            ", cut off at --max-tokens 512 (tags count)",
        ),
        (
            {"truncated": True, "hit_limit": False, "finish_reason": "length"},
            ", cut off by the time limit",
        ),
        (
            {"truncated": True, "hit_limit": False, "finish_reason": "stop"},
            ", a thread was cut off far past the length that it had promised",
        ),
    ],
)
def test_the_last_line_names_the_limit(result: dict[str, Any], notice: str) -> None:
    assert limit_notice(SimpleNamespace(**result), GenerationConfig()) == notice  # type: ignore[arg-type]


def test_a_model_without_an_adapter_answers_sequentially_and_says_so(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint
) -> None:
    outcome = pasta("run", PROMPT, "--model", tiny_checkpoint.base, "--max-tokens", 8, "--json")
    assert (outcome.object["threads"], outcome.object["adapter"]) == (1, None)
    assert f"{tiny_checkpoint.base} without an adapter answers sequentially\n" in outcome.err


@pytest.mark.usefixtures("tiny_cache")
def test_run_without_a_model_uses_the_default_one_and_reads_standard_input(
    ask: Pasta, pasta: Pasta, tiny_checkpoint: TinyCheckpoint, typed: Callable[[bytes], None]
) -> None:
    typed(PROMPT.encode())
    outcome = pasta("run", "-", "--adapter", tiny_checkpoint.adapter, "--max-tokens", "48")
    assert outcome.out == ask(PROMPT).out


def test_an_option_changes_the_answer_and_nothing_else_does(ask: Pasta) -> None:
    def text(*flags: object) -> object:
        return ask(PROMPT, "--json", "--temperature", 1, "--seed", 3, *flags).object["text"]

    plain = text()
    assert text() == plain
    for option, value in (("--seed", 8), ("--top-p", 0.01), ("--system", "Be brief.")):
        assert text(option, value) != plain


def test_a_mistake_is_one_line_and_status_2(ask: Pasta) -> None:
    for arguments, message in (
        ([""], "the prompt is empty"),
        (["x" * 20_000], "the prompt is too long"),
        ([os.fsdecode(b"caf\xe9")], "the text is not valid UTF-8"),
        ([PROMPT, "--engine", "tourch"], "no engine 'tourch': did you mean torch?"),
        ([PROMPT, "--engine", "llama"], "the llama engine needs llama-cpp-python"),
        ([PROMPT, "--engine", "remote"], "no server is named"),
        ([PROMPT, "--adapter", "nope"], "no adapter 'nope'"),
        ([PROMPT, "--model", "tests"], "tests holds no model"),
        ([PROMPT, "--sequential"], "no baseline is known that answers"),
        ([PROMPT, "--show", "--json"], "--show draws for a person"),
        ([PROMPT, "--trace", "/nowhere/trace.json"], "there is no folder /nowhere"),
    ):
        outcome = ask(*arguments)
        assert (outcome.status, outcome.out) == (2, "")
        assert f"pasta: {message}" in outcome.err
        assert "Traceback" not in outcome.err


def test_standard_input_that_is_no_prompt_is_refused(
    ask: Pasta, typed: Callable[[bytes], None]
) -> None:
    for contents in (b"", b"caf\xe9"):
        typed(contents)
        outcome = ask("-")
        assert (outcome.status, outcome.err.startswith("pasta: the prompt is ")) == (2, True)


@pytest.mark.parametrize(("command", "flags"), [("run", []), ("run", ["--show"]), ("compare", [])])
def test_ctrl_c_while_the_model_works_prints_no_answer(
    command: str, flags: list[str], ask: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", interrupted)
    outcome = ask(PROMPT, *flags, "--engine", "torch", command=command)
    assert (outcome.status, outcome.out.strip()) == (130, "")
    assert outcome.err.endswith("\npasta: interrupted\n")


def test_sequential_runs_the_recorded_baseline_in_one_thread(
    ask: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = make_adapter(tiny_checkpoint.base, tmp_path / "taught", seed=1)
    monkeypatch.setattr("pasta_decoding.cli.run.recorded_baseline", lambda *_, **__: str(taught))
    figures = ask(PROMPT, "--json", "--sequential").object
    assert (figures["adapter"], figures["threads"]) == (str(taught), 1)
    compared = ask(PROMPT, "--json", "--baseline", taught, command="compare").object
    assert compared["sequential"]["text"] == figures["text"]


def test_compare_sets_an_own_checkpoint_beside_its_base_model_or_what_is_named(
    ask: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    zero = {"wall_s": 0}
    compared = ask(PROMPT, "--json", command="compare").object
    base = ask(PROMPT, "--json", adapter="none").object
    parallel = ask(PROMPT, "--json").object
    assert compared["sequential"] | zero == {"checkpoint": "base"} | base | zero
    assert compared["parallel"] | zero == {"checkpoint": "adapter"} | parallel | zero
    other = make_adapter(tiny_checkpoint.base, tmp_path / "taught", seed=1)
    named = ask(PROMPT, "--json", "--baseline", other, command="compare").object
    assert named["sequential"]["checkpoint"] == "taught"
    assert named["sequential"]["threads"] == 1


def test_compare_prints_both_answers_and_says_what_is_compared(ask: Pasta) -> None:
    compared = ask(PROMPT, command="compare")
    assert compared.out.count("\n") >= 2
    for words in (
        *("\nparallel: adapter\n", "\nsequential: base\n", " 1 thread, "),
        "base is the base model as it is, which was not trained on these responses.",
        "An answer that was cut off says little",
    ):
        assert words in compared.err
    assert re.search(r"The parallel answer has \d+\.\d\dx its tokens a second", compared.err)
    assert "That was measured once, with a load of 0.0 on " in compared.err


def test_a_busy_machine_is_told_with_the_option_that_helps(
    ask: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    line = "other programs keep the cores busy, and steps wait: try --threads 1\n"
    assert line in ask(PROMPT).err
    assert line not in ask(PROMPT, "--threads", "1").err


# `pasta chat`: turns see what was said before, and nothing that was stopped or refused


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """Return what the model is shown, turn by turn."""
    turns: list[list[tuple[str, str]]] = []

    def listen(model: Any, conversation: Sequence[Any], options: Any, *, show: bool) -> Any:
        turns.append([(message["role"], message["content"]) for message in conversation])
        if conversation[-1]["content"] == "stop me":
            raise KeyboardInterrupt
        return print_answer(model, conversation, options, show=show)

    monkeypatch.setattr("pasta_decoding.cli.run.print_answer", listen)
    return turns


@pytest.fixture
def chat(pasta: Pasta, tiny_checkpoint: TinyCheckpoint, typed: Callable[[bytes], None]) -> Pasta:
    """Return a function that types lines into a chat with the tiny model."""

    def run(*lines: str, flags: Sequence[str] = ()) -> Outcome:
        typed("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
        where = ["--model", tiny_checkpoint.base, "--adapter", tiny_checkpoint.adapter]
        return pasta("chat", *where, "--max-tokens", "24", *flags)

    return run


def test_a_turn_sees_the_clean_text_of_those_before(
    chat: Pasta, heard: list[list[tuple[str, str]]]
) -> None:
    outcome = chat("Hello", "", "And now?", flags=["--system", "Be kind."])
    assert outcome.status == 0
    first, second = heard
    assert first == [("system", "Be kind."), ("user", "Hello")]
    assert second[:2] == first
    assert [role for role, _ in second[2:]] == ["assistant", "user"]
    assert outcome.out.startswith(second[2][1])
    assert "<promise" not in outcome.out
    assert outcome.err.count(" tokens in ") == 2


def test_a_turn_that_is_stopped_or_does_not_fit_is_forgotten_and_the_chat_goes_on(
    chat: Pasta, heard: list[list[tuple[str, str]]]
) -> None:
    outcome = chat("stop me", "x" * 5000, "Hello")
    assert outcome.status == 0
    assert heard[2] == [("user", "Hello")]
    assert "stopped; that turn is forgotten" in outcome.err
    assert "pasta: the prompt is too long" in outcome.err
    assert "; /new begins anew" in outcome.err


def test_commands_forget_draw_explain_and_leave(
    chat: Pasta, heard: list[list[tuple[str, str]]]
) -> None:
    outcome = chat("Hello", "/new", "/what", "/show", "Again", "/quit", "Never asked")
    assert [turn[-1][1] for turn in heard] == ["Hello", "Again"]
    assert heard[1] == [("user", "Again")]
    assert CHAT_HELP in outcome.err
    assert "main" in outcome.err  # the lanes


def test_a_line_that_is_not_utf8_is_told_and_skipped(chat: Pasta) -> None:
    outcome = chat("caf\udce9")
    assert (outcome.status, "not UTF-8" in outcome.err or "not valid UTF-8" in outcome.err) == (
        0,
        True,
    )
