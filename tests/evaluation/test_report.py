"""`pasta eval report`: runs it compares, runs it refuses, and a page that needs nothing else."""

import json
import math
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.cli import main
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.records import find_runs
from pasta_decoding.evaluation.report import EvaluationReport, build_report, numbers, plot, render
from tests.evaluation.runfolders import PLAIN, failed, parallel, record, write_run

HOSTILE = "</details></script><script>document.title='stolen'</script><img src=x onerror=alert(1)>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four runs of twelve prompts."""
    folder = tmp_path / "runs"
    write_run(folder / "sequential", "sequential", [record(n) for n in range(12)])
    write_run(folder / "pasta-fast", "pasta", [parallel(n, critical_path=30) for n in range(12)])
    write_run(folder / "sot", "sot", [parallel(n, critical_path=60) for n in range(12)])
    with_failure = [failed(n) if n == 3 else parallel(n, critical_path=70) for n in range(12)]
    write_run(folder / "apar", "apar", with_failure)
    return folder


def annotate(folder: Path, preferences: list[float | None], text: str = PLAIN) -> None:
    """Write what alpaca_eval writes, its leaderboard included."""
    judge_folder = folder / "judge"
    judge_folder.mkdir()
    rows = [
        {"instruction": f"What about {n}?", "output_1": f"This about {n}.", "output_2": text,
         "annotator": "somebody", "preference": preference}
        for n, preference in enumerate(preferences)
    ]  # fmt: skip
    (judge_folder / "annotations.json").write_text(json.dumps(rows))
    (judge_folder / "leaderboard.csv").write_text(
        ",win_rate,standard_error,length_controlled_winrate,lc_standard_error\n"
        f"other,1,1,1,1\n{folder.name},80,4,55.5,2.0\n"
    )


def report_of(*paths: Path) -> EvaluationReport:
    return build_report(find_runs(paths))


def rewrite(name: str, **settings: Any) -> Callable[[Path], object]:
    return lambda runs: write_run(
        runs / name, "pasta", [parallel(n) for n in range(12)], **settings
    )


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "other prompts": (
        lambda runs: write_run(runs / "sot", "sot", [parallel(n) for n in (*range(11), 99)]),
        "2 prompts are in one of .*sequential and .*sot only, such as 'What about 11",
    ),
    "another engine": (rewrite("sot", engine="torch"), r"other settings: engine \(torch -> None\)"),
    "no method": (lambda runs: (runs / "sot" / "run.json").write_text("{}"), "has no 'method'"),
    "no records": (lambda runs: write_run(runs / "sot", "sot", []), "holds no records"),
    "no annotations": (
        lambda runs: (runs / "sot" / "annotations.json").write_text('[{"preference": 1}]'),
        "not alpaca_eval's annotations: 'instruction'",
    ),
    "a preference out of range": (
        lambda runs: annotate(runs / "sot", [0.7]),
        r"the preference 0.7 is not in \[1, 2\]",
    ),
    "annotations of other answers": (
        lambda runs: annotate(runs / "sot", [2.0], text="Something else."),
        "is of other answers to 'What about 0",
    ),
    "no sequential run": (
        lambda runs: (runs / "sequential" / "run.json").unlink(),
        "no run is sequential: apar, pasta-fast, sot",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_compared_is_refused_and_named(runs: Path, change: str) -> None:
    make, message = REFUSED[change]
    make(runs)
    with pytest.raises(PastaError, match=message):
        report_of(runs)


def test_runs_are_found_alone_and_inside_a_folder_and_the_baseline_comes_first(runs: Path) -> None:
    with pytest.raises(PastaError, match="no run folder of"):
        find_runs([runs.parent / "nowhere"])
    write_run(runs / "hf", "hf", [record(n) for n in range(12)], engine="transformers")
    report = report_of(runs / "sot", runs)
    labels = [summary.run.label for summary in report.summaries]
    assert labels == ["sequential", "sot", "apar", "hf", "pasta-fast"]
    assert "hf ran on transformers, the baseline on None" in report.notes
    for path in runs.glob("*/run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"prompts": {"number": 20}}))
    assert "sot: 8 prompts of its file are not answered yet" in report_of(runs).notes


def test_the_numbers_are_json_with_failures_inside(runs: Path) -> None:
    report = json.loads(json.dumps(numbers(report_of(runs))))
    apar = report["runs"]["apar"]
    assert apar["failures"] == 1
    assert apar["seams"]["mixed_markup"]["value"] == 0
    product = math.prod([100 / 70] * 11 + [100 / 400])
    assert apar["speedups"]["speedup_in_steps"]["value"] == pytest.approx(product ** (1 / 12))
    assert report["notes"] == [
        "no win rates: give --judge-base-url and --judge-model, or run alpaca_eval on the "
        "model_outputs.json of two run folders"
    ]


def test_win_rates_are_those_of_alpaca_eval_and_a_missing_verdict_is_no_tie(runs: Path) -> None:
    annotate(runs / "sot", [2.0] * 6 + [1.0] * 2 + [None] * 3)  # and the twelfth is not there
    report = report_of(runs)
    [sot] = [summary for summary in report.summaries if summary.run.label == "sot"]
    lc = sot.verdicts.win_rates["lc_win_rate"]
    assert (lc.value, lc.low, lc.high) == pytest.approx((55.5, 55.5 - 3.92, 55.5 + 3.92))
    assert sot.verdicts.win_rates["win_rate"].value == pytest.approx(75)
    assert "sot: 4 prompts without a verdict" in report.notes
    assert numbers(report)["runs"]["sot"]["judge"] == "somebody"


def test_the_page_opens_alone_and_no_answer_is_markup(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chunk = f'<promise topic="diet" tokens="20"/><async>{HOSTILE}</async><sync/>'
    hostile = [
        parallel(n, annotated=f"Two & {chunk} end", text=f"Two & {HOSTILE} end") for n in range(12)
    ]
    write_run(runs / "sot", "sot", hostile, machine="<script>x</script>")
    question = f"What?{HOSTILE}"
    for path in runs.glob("*/records.jsonl"):
        path.write_text(path.read_text().replace("What about 3?", json.dumps(question)[1:-1]))
    for label in ("pasta-fast", "apar"):
        annotate(runs / label, [1.2, 1.4, 2.0] if label == "pasta-fast" else [1.2])
    out = tmp_path / "report"
    assert main(["eval", "report", str(runs), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}/index.html\n"
    assert {path.name for path in out.iterdir()} == {"index.html", "report.json"}
    page = (out / "index.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert not re.search(r'\b(src|href)="(?!#)|url\((?!#)|@import', page)
    assert "Failed requests: 1, inside every figure." in page
    assert page.count("<article>") == 4 * 12
    assert (
        '<span class="chunk" style="--hue: 308" title="thread 1: diet, 20 tokens promised">'
        f'{escape(HOSTILE).replace("&#x27;", "&#39;")}</span><span class="sync">sync</span> end'
    ) in page
    assert "failed: no answer" in page
    assert "<th>wrong item counts</th>" in page
    assert page.count("<svg") == 1


def test_judged_runs_are_points_of_speed_against_win_rate(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd_name = write_run(runs / r"a $\frac{1}{2$", "pasta", [parallel(n) for n in range(12)])
    annotate(odd_name, [2.0, 1.0])
    assert plot(report_of(runs / "sequential", runs / "sot")) == ""
    page = render(report_of(runs))
    assert "<svg" in page
    assert "length-controlled win rate, %" in page
    assert "judged by somebody" in page
    monkeypatch.setattr("pasta_decoding.errors.find_spec", lambda _: None)
    assert render(report_of(runs / "sequential", runs / "sot")), "nothing to draw"
    with pytest.raises(PastaError, match="drawing a report needs the package matplotlib"):
        render(report_of(runs))
