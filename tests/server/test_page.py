"""The page in a real browser: an answer appears, races run, and no answer is ever markup."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pasta_decoding.scheduling.decoder import LocalDecoder
from tests.remote.fake import until
from tests.server.running import endless, running, saying, slow, with_engine

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

pytestmark = [pytest.mark.browser]

NAMES = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = '<script>document.title="stolen"</script><img src=x onerror="document.title=1">'
HOSTILE_CHUNK = "</p><svg onload=alert(1)>"
SECONDS = re.compile(r"\d s\b")
"""What the page says of an answer that is there, and not while a baseline is loading."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs a Chromium; CHROMIUM names it")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Return an empty page; a script error or a breach of the policy fails the test."""
    errors: list[str] = []
    context = browser.new_context()
    empty_page = context.new_page()
    empty_page.set_default_timeout(60_000)
    empty_page.on("pageerror", lambda error: errors.append(str(error)))
    empty_page.on(
        "console",
        lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None,
    )
    yield empty_page
    context.close()
    assert errors == []


def ask(page: Any, url: str, *, race: bool = False, limit: int = 300) -> str:
    """Ask, wait for the end, and return the status."""
    page.goto(url)
    if race:
        page.get_by_label("Race the sequential baseline").check()
    page.get_by_label("Longest answer").fill(str(limit))
    page.get_by_label("Your question").fill("Hello")
    page.keyboard.press("Enter")
    status = page.get_by_role("status").filter(has_text=SECONDS)
    status.wait_for()
    return str(status.inner_text())


def test_an_answer_appears_with_its_threads_and_figures(page: Any, decoder: LocalDecoder) -> None:
    script = saying(decoder, "1. **First** `a<b`\n2. ", after="\n\nDone.")
    with running(with_engine(decoder, script, slow)) as server:
        assert "with 2 threads" in ask(page, server.url)
        assert not page.get_by_label("Race the sequential baseline").is_visible()
        text = page.locator("#parallel").inner_text()
        assert text == "1. First a<b\n2. an apple\n\nDone."
        assert page.locator("#parallel strong").inner_text() == "First"
        assert page.locator("#parallel .chunk").inner_text() == "an apple"
        names = page.locator("#timeline .name").all_text_contents()
        assert names == ["main · done", "fruit · joined"]
        assert page.locator("#timeline .sync").count() == 1
        assert "tokens a step" in page.locator("#parallel-counters").inner_text()
        assert page.locator("#model").inner_text() == "tiny"


def test_a_hostile_answer_is_shown_as_text(page: Any, decoder: LocalDecoder) -> None:
    script = saying(decoder, HOSTILE, chunk=HOSTILE_CHUNK, after=HOSTILE)
    with running(with_engine(decoder, script)) as server:
        ask(page, server.url)
        assert page.locator("#parallel").inner_text() == HOSTILE + HOSTILE_CHUNK + HOSTILE
        assert page.locator("#stage script, #stage img, #parallel svg").count() == 0
        assert page.title() == "Pasta: watch the threads write"


def test_a_race_runs_one_after_the_other_and_says_who_was_faster(
    page: Any, decoder: LocalDecoder
) -> None:
    apple = with_engine(decoder, saying(decoder), slow)
    script = saying(decoder, "Two: ", chunk="a pear")
    taught = replace(with_engine(decoder, script, slow), parallel=False)
    page.set_viewport_size({"width": 360, "height": 740})
    with running(apple, lambda: taught) as server:
        assert "times as many tokens a second" in ask(page, server.url, race=True)
        assert page.locator("#parallel").inner_text() == "One: an apple Done."
        assert page.locator("#t-sequential").text_content() == "The sequential baseline: taught"
        assert page.locator("#sequential").inner_text().startswith("Two: ")
        assert page.evaluate("runs[0].ended <= runs[1].began")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "on a phone"


def test_the_page_asks_for_the_key_and_escape_stops_the_answer(
    page: Any, decoder: LocalDecoder
) -> None:
    with running(endless(decoder), api_key="sesame") as server:
        page.goto(server.url)
        key = page.get_by_label("This server wants an API key:")
        key.fill("open")
        page.keyboard.press("Enter")
        page.get_by_role("status").filter(has_text="That is not the key").wait_for()
        key.fill("sesame")
        page.keyboard.press("Enter")
        page.locator("#key-row").wait_for(state="hidden")
        page.get_by_label("Longest answer").fill("2000")
        page.get_by_label("Your question").fill("Hello")
        page.keyboard.press("Enter")
        page.locator("#parallel").filter(has_text="aaaa").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("status").filter(has_text="Stopped.").wait_for()
        until(lambda: server.backend.unended == 0)
