"""`pasta chat`: turns see what was said before, and nothing that was stopped or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pasta_decoding.cli.run import CHAT_HELP, answer_shown
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """Return what the model is shown, turn by turn."""
    turns: list[list[tuple[str, str]]] = []

    def listen(model: Any, asked: Sequence[Any], options: Any, *, show: bool) -> Any:
        turns.append([(one["role"], one["content"]) for one in asked])
        if asked[-1]["content"] == "stop me":
            raise KeyboardInterrupt
        return answer_shown(model, asked, options, show=show)

    monkeypatch.setattr("pasta_decoding.cli.run.answer_shown", listen)
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
    found = chat("Hello", "", "And now?", flags=["--system", "Be kind."])
    assert found.status == 0
    first, second = heard
    assert first == [("system", "Be kind."), ("user", "Hello")]
    assert second[:2] == first
    assert [role for role, _ in second[2:]] == ["assistant", "user"]
    assert found.out.startswith(second[2][1])
    assert "<promise" not in found.out
    assert found.err.count(" tokens in ") == 2


def test_a_turn_that_is_stopped_or_does_not_fit_is_forgotten_and_the_chat_goes_on(
    chat: Pasta, heard: list[list[tuple[str, str]]]
) -> None:
    found = chat("stop me", "x" * 5000, "Hello")
    assert found.status == 0
    assert heard[2] == [("user", "Hello")]
    assert "stopped; that turn is forgotten" in found.err
    assert "pasta: the prompt is too long" in found.err
    assert "; /new begins anew" in found.err


def test_commands_forget_draw_explain_and_leave(
    chat: Pasta, heard: list[list[tuple[str, str]]]
) -> None:
    found = chat("Hello", "/new", "/what", "/show", "Again", "/quit", "Never asked")
    assert [turn[-1][1] for turn in heard] == ["Hello", "Again"]
    assert heard[1] == [("user", "Again")]
    assert CHAT_HELP in found.err
    assert "main" in found.err  # the lanes


def test_a_line_that_is_not_utf8_is_told_and_skipped(chat: Pasta) -> None:
    found = chat("caf\udce9")
    assert (found.status, "not UTF-8" in found.err or "not valid UTF-8" in found.err) == (0, True)
