"""The page in a real browser: an answer appears, races run, and no answer is ever markup."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pasta_decoding.runtime.local import LocalDecoder
from tests.server.running import running, wait_for
from tests.server.scripts import Slow, endless, running_ahead, saying, with_engine

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

pytestmark = [pytest.mark.browser]

NAMES = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = '<script>document.title="stolen"</script><img src=x onerror="document.title=1">'
HOSTILE_CHUNK = "</p><svg onload=alert(1)>"
SECONDS = re.compile(r"\d s\b")
"""What the page says of an answer that is there, and not while a baseline is loading."""
MARKDOWN = "# Plan\n\n1. **First** `a<b`\n2. "


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs a Chromium; CHROMIUM names it")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Return an empty page; a script error or a breach of the policy fails the test."""
    errors: list[str] = []
    context = browser.new_context()
    found = context.new_page()
    found.set_default_timeout(60_000)
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on(
        "console",
        lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None,
    )
    yield found
    context.close()
    assert errors == []


def ask(page: Any, url: str, question: str = "Hello", *, race: bool = False) -> None:
    page.goto(url)
    if race:
        page.get_by_label("Race the sequential baseline").check()
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text=SECONDS).wait_for()


def test_what_a_limit_trims_is_not_shown(page: Any, decoder: LocalDecoder) -> None:
    """Main writes its end while the chunk is still being written; the limit falls into that."""
    script = running_ahead(decoder, "One: ", "one", "a chunk of some length", " And the end of it.")
    with running(with_engine(decoder, script, Slow), answer_tokens=40) as server:
        page.goto(server.url)
        page.get_by_label("Longest answer").fill("40")
        page.get_by_label("Your question").fill("Hello")
        page.keyboard.press("Enter")
        page.get_by_role("status").filter(has_text=SECONDS).wait_for()
        shown = page.locator("#parallel").inner_text()
        body = {"messages": [{"role": "user", "content": "Hello"}], "model": "tiny"}
        plain = server.ask("/v1/chat/completions", body | {"max_tokens": 40, "temperature": 0})
        text = plain.json["choices"][0]["message"]["content"]
        assert plain.json["usage"]["trimmed_tokens"] > 0
        assert text in shown.replace("\n", " ")
        assert "end of it" not in shown


def test_an_answer_appears_with_its_threads_and_figures(page: Any, decoder: LocalDecoder) -> None:
    script = saying(decoder, MARKDOWN, "fruit", "an apple", "\n\nDone.")
    with running(with_engine(decoder, script, Slow)) as server:
        ask(page, server.url)
        assert page.locator("#parallel h3").inner_text() == "Plan"
        assert page.locator("#parallel li").all_inner_texts() == ["First a<b", "an apple"]
        assert page.locator("#parallel li strong").inner_text() == "First"
        assert page.locator("#parallel .chunk").inner_text() == "an apple"
        assert page.locator(".lane h3").all_inner_texts() == ["main\ndone", "fruit\njoined"]
        assert page.locator("#timeline .sync").count() == 1
        waits = [path.get_attribute("d") for path in page.locator("#timeline .wait").all()]
        assert waits[0].startswith("M"), "main waits for the chunk"
        assert waits[1] == ""
        counters = page.locator("#parallel-counters").inner_text()
        assert "tokens a step" in counters
        assert page.locator("#model").inner_text() == "tiny"
        server.wait_until_idle()


def test_a_hostile_answer_is_shown_as_text(page: Any, decoder: LocalDecoder) -> None:
    script = saying(decoder, HOSTILE, "fruit", HOSTILE_CHUNK, HOSTILE)
    with running(with_engine(decoder, script)) as server:
        ask(page, server.url)
        assert page.locator("#parallel").inner_text() == HOSTILE + HOSTILE_CHUNK + HOSTILE
        assert page.locator("#stage script, #stage img, #parallel svg").count() == 0
        assert page.title() == "Pasta: watch the threads write"
        server.wait_until_idle()


def test_a_race_shows_both_and_says_who_was_faster(page: Any, decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script, Slow), baseline=taught(decoder)) as server:
        ask(page, server.url, race=True)
        assert page.locator("#parallel").inner_text() == "One: an apple Done."
        assert page.locator("#rival").is_visible()
        assert page.locator("#t-sequential").text_content() == "The sequential baseline: taught"
        assert page.locator("#sequential").inner_text().startswith("Two: ")
        assert "times as many tokens a second" in page.get_by_role("status").inner_text()
        server.wait_until_idle()


def test_without_a_baseline_the_page_offers_no_race(page: Any, decoder: LocalDecoder) -> None:
    with running(
        with_engine(decoder, saying(decoder, "One: ", "fruit", "an apple", "."))
    ) as server:
        ask(page, server.url)
        assert not page.get_by_label("Race the sequential baseline").is_visible()
        server.wait_until_idle()


def taught(decoder: LocalDecoder) -> LocalDecoder:
    """Return the baseline of a race: another model, which may not promise."""
    script = saying(decoder, "Two: ", "fruit", "a pear", " Done.")
    return replace(with_engine(decoder, script, Slow), parallel=False)


def test_escape_stops_the_answer_and_the_engine(page: Any, decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, endless(decoder), Slow)) as server:
        page.goto(server.url)
        page.get_by_label("tokens").fill("2000")
        page.get_by_label("Your question").fill("Hello")
        page.keyboard.press("Enter")
        page.locator("#parallel p").filter(has_text="aaaa").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("status").filter(has_text="Stopped.").wait_for()
        server.wait_until_idle()


def test_the_page_asks_for_the_key_and_goes_on_with_it(page: Any, decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script), api_key="sesame") as server:
        page.goto(server.url)
        key = page.get_by_label("This server wants an API key:")
        key.fill("open")
        page.keyboard.press("Enter")
        page.get_by_role("status").filter(has_text="That is not the key").wait_for()
        assert key.is_visible()
        key.fill("sesame")
        page.keyboard.press("Enter")
        page.locator("#key-row").wait_for(state="hidden")
        page.locator("#model").filter(has_text="tiny").wait_for()
        page.locator("#question:focus").wait_for()
        assert page.get_by_role("status").inner_text() == ""
        page.keyboard.type("Hello")  # the question has the focus
        page.keyboard.press("Enter")
        page.get_by_role("status").filter(has_text="Done in").wait_for()
        server.wait_until_idle()


def test_a_first_visit_says_what_to_do_until_somebody_has_asked(
    page: Any, decoder: LocalDecoder
) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script)) as server:
        page.goto(server.url)
        hello = page.get_by_text("Ask a question with several sides to it")
        assert hello.is_visible()
        assert page.locator("#stage").is_hidden()
        ask(page, server.url)
        assert hello.is_hidden()
        server.wait_until_idle()


def test_figures_explain_themselves_when_they_are_touched(page: Any, decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script)) as server:
        ask(page, server.url)
        for name in ("critical path", "tokens a step"):
            figure = page.locator("#parallel-counters").get_by_text(name)
            assert len(figure.get_attribute("title")) > 40
            figure.click()
            assert page.locator("#parallel-tip").inner_text().startswith(f"{name}: ")
            figure.click()
            assert page.locator("#parallel-tip").is_hidden()
        server.wait_until_idle()


EVENT = {"type": "delta", "step": 1, "thread": 0, "text": "Half an ans"}
PIECE = {"index": 0, "delta": {"content": EVENT["text"]}, "pasta_events": [EVENT]}
FINISHED = {
    "index": 0,
    "delta": {},
    "pasta_events": [{"type": "finished", "step": 2, "truncated": False}],
}


def stream_of(*choices: dict[str, Any], end: str = "\n") -> str:
    """Return a stream as other servers write it, with comments; CR LF is as good as LF."""
    data = (f"data: {json.dumps({'choices': [choice]})}" for choice in choices)
    return "".join(f": keep-alive{end}{end}{line}{end}{end}" for line in data)


def replied(body: str, route: Any) -> None:
    route.fulfill(body=body, content_type="text/event-stream")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_that_is_cut_off_is_not_done_and_comments_are_nothing(
    end: str, page: Any, decoder: LocalDecoder
) -> None:
    cut = stream_of(PIECE, end=end)
    whole = stream_of(PIECE, FINISHED, end=end) + f"data: [DONE]{end}{end}"
    with running(with_engine(decoder, endless(decoder))) as server:
        for body, said in ((cut, "The answer broke off"), (whole, "Done in")):
            reply = partial(replied, body)
            page.route("**/v1/chat/completions", reply)
            page.goto(server.url)
            page.get_by_label("Your question").fill("Hello")
            page.keyboard.press("Enter")
            page.get_by_role("status").filter(has_text=said).wait_for()
            page.locator("#parallel").filter(has_text="Half an ans").wait_for()
            page.unroute("**/v1/chat/completions")
        assert "with 1 thread." in page.get_by_role("status").inner_text()


def test_a_race_is_run_one_after_the_other(page: Any, decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script, Slow), baseline=taught(decoder)) as server:
        ask(page, server.url, race=True)
        page.get_by_role("status").filter(has_text="times as many").wait_for()
        assert page.evaluate("runs[0].began + runs[0].ended <= runs[1].began")
        server.wait_until_idle()


@pytest.mark.parametrize("width", [360, 700, 1200])
def test_names_are_whole_on_a_phone_and_elsewhere(
    width: int, page: Any, decoder: LocalDecoder
) -> None:
    script = saying(decoder, "One: ", "fruit and vegetables here", "an apple", " Done.")
    page.set_viewport_size({"width": width, "height": 740})
    with running(with_engine(decoder, script)) as server:
        ask(page, server.url)
        name = page.locator("#timeline .name").nth(1)
        name.filter(has_text="fruit").wait_for()
        assert "…" not in name.text_content()
        right = name.evaluate("node => node.getBoundingClientRect().right")
        assert right <= width
        server.wait_until_idle()


def test_the_page_is_dark_for_whoever_wants_it_dark(browser: Any, decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, endless(decoder))) as server:
        light, dark = (colours(browser, server.url, scheme) for scheme in ("light", "dark"))
    assert brightness(light["text"]) < 100 < brightness(light["background"])
    assert brightness(dark["background"]) < 100 < brightness(dark["text"])


def test_a_phone_scrolls_in_one_direction_only(page: Any, decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    page.set_viewport_size({"width": 360, "height": 740})
    with running(with_engine(decoder, script), baseline=taught(decoder)) as server:
        ask(page, server.url, race=True)
        widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1]
        wait_for(lambda: page.locator("#timeline svg").count() == 1)
        server.wait_until_idle()


def colours(browser: Any, url: str, scheme: str) -> dict[str, str]:
    """Return the colours that the page has for those who want `scheme`."""
    context = browser.new_context(color_scheme=scheme)
    try:
        page = context.new_page()
        page.goto(url)
        style = "getComputedStyle(document.body)"
        found: dict[str, str] = page.evaluate(
            f"({{background: {style}.backgroundColor, text: {style}.color}})"
        )
        return found
    finally:
        context.close()


def brightness(colour: str) -> int:
    """Return the largest part of `rgb(1, 2, 3)`."""
    return max(map(int, re.findall(r"\d+", colour)))
