"""`pasta eval report` with a judge: preferences, ties, cut answers, and a broken judge."""

import json
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.cli import main
from tests.chatserver import Act, Body, ChatServer, chat_server, failure, in_turn
from tests.evaluation.runfolders import PLAIN, failed, parallel, record, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs of eight prompts; two answers of `pasta` were cut, and one failed."""
    folder = tmp_path / "runs"
    write_run(folder / "sequential", "sequential", [record(n, hit_limit=n == 0) for n in range(8)])
    answers = [parallel(n, hit_limit=n in (0, 1)) for n in range(7)]
    write_run(folder / "pasta", "pasta", [*answers, failed(7)])
    write_run(folder / "sot", "sot", [record(n) for n in range(8)])
    return folder


def prefers_parallel(_number: int, body: Body) -> Act:
    """Prefer `PLAIN`; in the first position alone for the prompts 3 and 4."""
    question = body["messages"][0]["content"]
    instruction, first, second = (
        question.split(f"<{tag}>\n")[1].split(f"\n</{tag}>")[0]
        for tag in ("instruction", "answer_A", "answer_B")
    )
    if instruction in ("What about 3?", "What about 4?"):
        return "A"
    return "A" if first == PLAIN or not second else "B"


def report(
    runs: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], str]:
    """Return the exit status, the runs in report.json, and standard error."""
    out = runs.parent / "report"
    judge = ["--judge-base-url", server.base_url, "--judge-model", "m"]
    status = main(["eval", "report", str(runs), "-o", str(out), *judge])
    figures = json.loads((out / "report.json").read_text())["runs"] if status == 0 else {}
    return status, figures, capsys.readouterr().err


def test_a_judge_gives_preferences_with_and_without_cut_answers(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_ENDPOINT_KEY", "secret")
    with chat_server(prefers_parallel) as server:
        status, figures, _ = report(runs, server, capsys)
        assert set(server.keys) == {"Bearer secret"}
        requests = len(server.bodies)
        assert report(runs, server, capsys)[:2] == (0, figures)
        assert len(server.bodies) == requests == 8 * 2 * 3
    assert status == 0
    pasta, sot, base = (figures[name] for name in ("pasta", "sot", "sequential"))
    assert (pasta["judge"], sot["judge"], base["judge"]) == ("m", "m", None)
    # Five prompts are won, two depend on the order, and the failed one is lost.
    assert pasta["win_rate"]["value"] == pytest.approx(100 * (5 + 2 * 0.5) / 8)
    assert pasta["win_rate"]["low"] < 75 < pasta["win_rate"]["high"]
    assert (pasta["ties"], pasta["agreement"]) == (2 / 8, 6 / 8)
    assert pasta["both_ended"] == 5
    assert pasta["win_rate_both_ended"]["value"] == pytest.approx(100 * (3 + 2 * 0.5) / 5)
    assert pasta["speedups"]["speedup_in_steps"]["value"] < 2, "a failed answer took 400 steps"
    assert pasta["speedup_in_steps_both_ended"]["value"] == pytest.approx(2)
    # The same answers as the baseline's.
    assert (sot["win_rate"]["value"], sot["ties"], sot["agreement"]) == (50, 1, 1)
    assert sot["both_ended"] == 7
    page = (runs.parent / "report" / "index.html").read_text()
    for text in ("win rate where both ended, %", "<th>ties</th>", "5 of 8", "judged by m", "<svg"):
        assert text in page


def test_prompts_without_a_verdict_are_counted_and_in_no_win_rate(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(number: int, body: Body) -> Act:
        hard = "What about 2?" in body["messages"][0]["content"]
        return "I cannot say." if hard else prefers_parallel(number, body)

    with chat_server(script) as server:
        _, figures, err = report(runs, server, capsys)
    assert figures["pasta"]["win_rate"]["value"] == pytest.approx(100 * (4 + 2 * 0.5) / 7)
    assert "pasta: 1 prompts without a verdict\n" in err


def test_a_judge_that_breaks_down_is_one_line_and_the_same_command_goes_on(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(in_turn([*["C"] * 20, failure(401)])) as server:
        status, _, err = report(runs, server, capsys)
    assert status == 2
    assert err.startswith(f"pasta: {server.base_url} refuses the key (401)")
    assert err.count("\n") == 1
    replies = len((runs / "pasta" / "verdicts.jsonl").read_text().splitlines())
    with chat_server(in_turn(["C"])) as server:
        status, figures, _ = report(runs, server, capsys)
        assert len(server.bodies) == 8 * 2 * 3 - replies
    assert (status, figures["pasta"]["win_rate"]["value"]) == (0, 50)


def test_half_a_judge_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--judge-model", "m"], ["--judge-base-url", "http://localhost:1/v1"]):
        assert main(["eval", "report", str(runs), *option]) == 2
        message = "a judge is named by --judge-base-url http://host/v1 and --judge-model m\n"
        assert capsys.readouterr().err == f"pasta: {message}"
