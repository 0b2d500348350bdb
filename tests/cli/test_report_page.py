"""The report in a real browser: it searches, and what models wrote does nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Pasta
from tests.runfolders import failed, parallel, record, write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

pytestmark = [pytest.mark.browser]

NAMES = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = "</details><script>document.title='stolen'</script><img src=x onerror=document.title=1>"


@pytest.fixture
def page() -> Iterator[Any]:
    """Return an empty page without a network; a script error fails the test."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs a Chromium; CHROMIUM names it")
    errors: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        found = browser.new_page(offline=True)
        found.on("pageerror", lambda error: errors.append(str(error)))
        yield found
        browser.close()
    assert errors == []


def test_a_search_leaves_the_prompts_whose_answers_say_it(
    page: Any, pasta: Pasta, tmp_path: Path
) -> None:
    write_run(tmp_path / "runs/sequential", "sequential", [record(n) for n in range(12)])
    ours = [parallel(n, annotated=f"Text {n} {HOSTILE}") for n in range(11)]
    write_run(tmp_path / "runs/pasta", "pasta", [*ours, failed(11)])
    assert pasta("eval", "report", tmp_path / "runs", "-o", tmp_path).status == 0
    page.goto((tmp_path / "index.html").as_uri())
    assert page.title() == "Pasta: evaluation"
    assert page.locator("#shown").inner_text() == "12 of 12 prompts"
    page.get_by_label("Search prompts and answers").fill("text 7")
    assert page.locator("#shown").inner_text() == "1 of 12 prompts"
    page.get_by_role("button", name="Open all shown").click()
    [shown] = page.locator("details.answer:visible").all()
    assert shown.locator("article").count() == 2
    assert HOSTILE in shown.inner_text()
    page.get_by_label("Search prompts and answers").fill("")
    page.get_by_label("failed or cut off only").check()
    assert page.locator("#shown").inner_text() == "1 of 12 prompts"
