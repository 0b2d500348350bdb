"""The program itself: help that one can read, exit status, and what a user's mistake looks like."""

import errno
import re
from pathlib import Path

import pytest

from pasta_decoding import __version__
from pasta_decoding.cli import COMMANDS, GROUPS
from tests.cli.conftest import Pasta, interrupted

READABLE = ("run", "chat", "compare", "serve", "models", "pull", "export", "lint")


@pytest.mark.parametrize("name", ["", *GROUPS, *COMMANDS])
def test_every_command_has_help_of_a_page_and_examples(
    name: str, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = pasta(*name.split(), *["--help"] * (name in COMMANDS))
    assert outcome.status == 0
    assert f"Usage: pasta {name}".rstrip() in outcome.out
    if name in READABLE:
        assert len(outcome.out.splitlines()) <= 60
        examples = outcome.out.partition("Examples:")[2]
        assert len(re.findall(rf"^ pasta {name}", examples, re.M)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fly", "No such command 'fly'; see pasta --help"),
        ("data fly", "No such command 'fly'; see pasta data --help"),
        ("run", "Missing argument 'prompt'; see pasta run --help"),
        ("lint --fast x", "No such option: --fast; see pasta lint --help"),
        ("run x --seed y", "Invalid value for '--seed': "),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    line: str, message: str, pasta: Pasta
) -> None:
    outcome = pasta(*line.split())
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert outcome.err.startswith(f"pasta: {message}")
    assert pasta("--version").out == f"pasta {__version__}\n"


@pytest.mark.parametrize("question", ["- buy milk", "--1 + 2", "-5 degrees?"])
def test_a_question_that_begins_like_an_option_is_told_where_it_goes(
    question: str, pasta: Pasta
) -> None:
    hint = f"Text that begins with - follows --: pasta run -- {question!r}"
    assert pasta("run", question).complaint[2] == hint


def test_an_interruption_and_a_full_disk_are_one_line(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", interrupted)
    outcome = pasta("lint", tmp_path / "any.txt")
    assert (outcome.status, outcome.out, outcome.err) == (130, "", "\npasta: interrupted\n")

    def full(_path: Path) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device", "any.txt")

    monkeypatch.setattr(Path, "read_bytes", full)
    outcome = pasta("lint", tmp_path / "any.txt")
    assert (outcome.status, outcome.err) == (2, "pasta: any.txt: No space left on device\n")
