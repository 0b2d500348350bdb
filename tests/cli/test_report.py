"""`pasta eval report`: the files it writes, and a page that needs nothing else."""

from __future__ import annotations

import json
import re
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
        self.found += [tag] if tag in {"script", "link", "iframe"} else []


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
    assert "<script>" not in (tmp_path / "index.html").read_text()


def test_runs_that_were_not_rated_give_a_report_all_the_same(pasta: Pasta, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/sequential", "sequential", [record(0)])
    found = pasta("eval", "report", tmp_path / "runs", "-o", tmp_path)
    assert found.status == 0
    assert found.err == "judge: not used, because none was given to `pasta eval rate`\n"
    assert "No run was rated" in (tmp_path / "index.html").read_text()
