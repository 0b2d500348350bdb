"""`pasta eval report`: the files it writes, and a page that needs nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.cli.conftest import Pasta
from tests.evaluation.report.test_build import annotate, rate
from tests.runfolders import failed, parallel, record, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three timed and rated runs."""
    folder = tmp_path / "runs"
    base = [record(n, turns=f"t{n}") for n in range(12)]
    write_run(folder / "sequential", "sequential", base)
    ours = [parallel(n, turns=f"t{n}", seconds=4.0 + n / 10) for n in range(11)]
    write_run(folder / "pasta", "pasta", [*ours, failed(11, turns="t11")])
    sot = [parallel(n, turns=f"t{n}", critical_path=60, promises=()) for n in range(12)]
    write_run(folder / "sot", "sot", sot)
    for label, gain in (("pasta", 0.3), ("sot", -0.2)):
        rate(folder / label, gain)
        annotate(folder / label, [1.2 + n / 20 for n in range(11)])
    return folder


class Links(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}
        ]
        self.found += [tag] if tag in {"link", "iframe", "object", "base"} else []


def test_pictures_show_prompts_as_they_are_and_runs_without_a_figure_not_at_all(
    pasta: Pasta, tmp_path: Path
) -> None:
    said = r"Simplify $\frac{1}{2$ now"
    runs, out = tmp_path / "runs", tmp_path / "report"
    write_run(runs / "sequential", "sequential", [replace(record(0), instruction=said)])
    answer = replace(parallel(0), instruction=said, chunks=3)
    math = replace(answer, annotated=answer.annotated.replace('"diet"', '"$\\frac{$"'))
    write_run(runs / "pasta", "pasta", [math])
    found = pasta("eval", "report", runs, "-o", out)
    assert (found.status, (out / "timelines.png").is_file()) == (0, True)
    write_run(runs / "sequential", "sequential", [replace(failed(0), instruction=said)])
    found = pasta("eval", "report", runs, "-o", out)
    assert found.status == 0, found.err


def test_a_report_is_a_page_tables_and_pictures(pasta: Pasta, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    found = pasta("eval", "report", runs, "-o", out)
    assert (found.status, found.out) == (0, f"{out}/index.html\n")
    assert {path.name for path in out.iterdir()} == {
        "index.html", "report.json", "runs.csv", "prompts.csv", "frontier_lc_win_rate.png",
        "frontier_text_quality.png", "speedups.png", "lengths.png", "widths.png", "promises.png",
    }  # fmt: skip
    assert json.loads((out / "report.json").read_text())["runs"]["pasta"]["failures"] == 1


def test_the_page_opens_without_a_network(pasta: Pasta, runs: Path, tmp_path: Path) -> None:
    pasta("eval", "report", runs, "-o", tmp_path)
    page = (tmp_path / "index.html").read_text()
    links = Links()
    links.feed(page)
    # Pictures refer to parts of themselves, and to nothing else.
    assert all(link.startswith("#") for link in links.found)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links.found} <= set(ids)


def test_the_page_names_failures_the_judge_and_the_paper(
    pasta: Pasta, runs: Path, tmp_path: Path
) -> None:
    pasta("eval", "report", runs, "-o", tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "Failed requests: 1, inside every figure." in page
    assert "compared by somebody" in page
    assert "Another model and another machine" in page
    assert "prefers-color-scheme:dark" in page


def test_what_a_record_says_is_text_and_no_part_of_the_page(
    pasta: Pasta, runs: Path, tmp_path: Path
) -> None:
    # Not timed, either: the others' wall-clock speedups stay.
    write_run(runs / "sot", "sot", [parallel(n) for n in range(12)], machine="<script>x</script>")
    assert pasta("eval", "report", runs, "-o", tmp_path).status == 0
    assert "<script>x" not in (tmp_path / "index.html").read_text()


HOSTILE = "</details></script><script>document.title='stolen'</script><img src=x onerror=alert(1)>"


def test_answers_stand_side_by_side_with_their_threads_coloured_and_nothing_in_them_acts(
    pasta: Pasta, runs: Path, tmp_path: Path
) -> None:
    chunk = f'<promise topic="diet" tokens="20"/><async>{HOSTILE}</async><sync/>'
    hostile = [
        parallel(n, annotated=f"Two & {chunk} end", text=f"Two & {HOSTILE} end") for n in range(12)
    ]
    write_run(runs / "sot", "sot", hostile)
    for rated in ("quality.jsonl", "annotations.json"):
        (runs / "sot" / rated).unlink()
    asked = f"What?{HOSTILE}"
    for label in ("sequential", "pasta", "sot"):
        path = runs / label / "records.jsonl"
        path.write_text(path.read_text().replace("What about 3?", json.dumps(asked)[1:-1]))
    assert pasta("eval", "report", runs, "-o", tmp_path).status == 0
    page = (tmp_path / "index.html").read_text()
    assert page.count("<article>") == 3 * 12
    assert page.count("<script>") == 1
    assert "<img" not in page
    assert (
        'Two &amp; <span class="chunk c0" title="thread 1: diet, 20 tokens promised">'
        f'{escape(HOSTILE)}</span><span class="sync">sync</span> end'
    ) in page
    assert f"<summary>{escape(asked)}</summary>" in page
    assert "failed: no answer" in page


def test_a_picture_of_promises_says_when_there_is_too_little(pasta: Pasta, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "sequential", "sequential", [record(n) for n in range(6)])
    few = [(20, 15)] * 2
    write_run(runs / "pasta", "pasta", [parallel(n, promises=few[:1]) for n in range(6)])
    write_run(runs / "new", "pasta", [parallel(n, promises=few * (n == 0)) for n in range(6)])
    pasta("eval", "report", runs, "-o", tmp_path / "some")
    page = (tmp_path / "some" / "index.html").read_text()
    assert "Too few chunks to say, fewer than 5 of a length: new 2 of 2." in page
    assert "pasta, 6 chunks" in page
    write_run(runs / "pasta", "pasta", [parallel(n, promises=()) for n in range(6)])
    pasta("eval", "report", runs, "-o", tmp_path / "none")
    assert not (tmp_path / "none" / "promises.png").exists()
    assert "new 2 of 2" in (tmp_path / "none" / "index.html").read_text()


def test_runs_that_were_not_rated_give_a_report_all_the_same(pasta: Pasta, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/sequential", "sequential", [record(0)])
    found = pasta("eval", "report", tmp_path / "runs", "-o", tmp_path)
    assert found.status == 0
    assert found.err == "judge: not used, because none was given to `pasta eval rate`\n"
    assert "No run was rated" in (tmp_path / "index.html").read_text()
