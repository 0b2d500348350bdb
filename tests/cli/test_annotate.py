"""`pasta annotate`: bad input, interruptions, reports."""

import json
from pathlib import Path

import pytest

from pasta_decoding.data.annotate import base
from pasta_decoding.lang.tree import Chunk, read, strip
from tests.chatserver import ChatServer, chat_server, failure, in_turn
from tests.cli.conftest import Outcome, Pasta, interrupted
from tests.shapes import make_llama3

pytestmark = pytest.mark.usefixtures("tiny_cache")

LIST = "Tips:\n\n" + "\n".join(
    f"{n}. **{name}**: {' '.join([name.lower()] * 25)}."
    for n, name in enumerate(("Sleep", "Water", "Walks"), start=1)
)
PLAIN = [LIST, "", " \n", "word " * 500, "Write <sync/> or </async>.", "你好。Ciao! Привет.\r\n"]


def write(path: Path, *responses: str) -> Path:
    rows = [
        {"id": str(n), "instruction": f"Q{n}", "response": text, "x": 1}
        for n, text in enumerate(responses)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def responses(path: Path) -> list[str]:
    return [json.loads(line)["response"] for line in path.read_text("utf-8").splitlines()]


def test_rules_annotate_what_they_are_for_and_once(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_TOKENS", 1000)
    source = write(tmp_path / "in.jsonl", *PLAIN)
    out = tmp_path / "out.jsonl"
    report = pasta("annotate", source, out, "--json").object
    assert report["rejected"] == {"empty response": 2, "more than 1000 tokens": 1}
    assert (report["rows"], report["with_chunk"]) == (6, 1)
    assert report["ideal_speedup_with_chunk"] > report["ideal_speedup"] > 1
    written = responses(out)
    assert '1. **<promise topic="sleep" tokens="' in written[0]
    assert written[1:4] == ["", " \n", "word " * 500]
    assert written[4:] == ["Write \\<sync/> or \\</async>.", PLAIN[5]]
    assert json.loads(out.read_text().splitlines()[0])["x"] == 1
    twice = pasta("annotate", out, tmp_path / "twice.jsonl")
    assert twice.status == 2  # the list, and the text that speaks of tags
    assert "pasta: 2 of 6 responses are annotated already, the first is that of '0'\n" in twice.err
    again = pasta("annotate", source, tmp_path / "apar.jsonl", "--with", "apar")
    assert (again.status, again.out) == (0, "")
    assert f"6 rows in {tmp_path / 'apar.jsonl'}, 1 with a promise\n" in again.err
    assert strip(read(responses(tmp_path / "apar.jsonl")[0])) == LIST
    assert '1. **Sleep**: <promise tokens="' in responses(tmp_path / "apar.jsonl")[0]


RULE = """
from pasta_decoding.data.annotate.base import Part
def thirds(response):
    third = len(response) // 3
    return [Part(0, third, "first"), Part(third, 2 * third)]
def beyond(response):
    return [Part(0, len(response) + 1)]
def topical(response):
    return [Part(0, 1, 'a "b"')]
"""


def test_a_rule_of_ones_own_promises_any_parts_and_lengths(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(tmp_path)
    path = write(tmp_path / "rows.jsonl", "x" * 197)
    out = tmp_path / "out.jsonl"
    assert pasta("annotate", path, out, "--with", "own_rule:thirds").status == 0
    first, second, _rest = read(responses(out)[0])
    assert isinstance(first, Chunk)
    assert isinstance(second, Chunk)
    assert (first.topic, first.tokens, second.topic, second.tokens) == ("first", 70, None, 70)
    base = make_llama3(tmp_path / "llama3")  # it takes `assistant` whole
    write(path, "1assistant" * 21)
    assert pasta("annotate", path, out, "--with", "own_rule:thirds", "--model", base).status == 0
    assert '"first" tokens="20"' in responses(out)[0]
    for name in ("beyond", "topical", "missing", ""):
        outcome = pasta("annotate", path, out, "--with", f"own_rule:{name}")
        assert (outcome.status, outcome.err.count("Traceback")) == (2, 0), name


OATS = "Eat oats for breakfast. Sleep well at night."
GOOD = (
    '<promise topic="diet" tokens="30"/><async>Eat oats for breakfast.</async> '
    '<promise topic="sleep" tokens="20"/><async>Sleep well at night.</async>'
)


@pytest.fixture
def five(tmp_path: Path) -> Path:
    return write(tmp_path / "five.jsonl", *[OATS] * 5)


@pytest.fixture
def ask(pasta: Pasta, five: Path) -> Pasta:
    """Return a function that lets a server annotate five rows, one after the other."""

    def run(server: ChatServer, *arguments: object) -> Outcome:
        where = ["--with", "llm", "--base-url", server.base_url, "--model", "m"]
        rest = ["--concurrency", "1", *arguments]
        return pasta("annotate", five, five.with_name("out.jsonl"), *where, *rest)

    return run


def test_a_stopped_run_asks_only_for_what_is_missing_and_costs_and_rejects_are_reported(
    ask: Pasta, five: Path
) -> None:
    partial = five.with_name("out.jsonl.partial")
    with chat_server(in_turn([GOOD, GOOD, "No.", "No.", "No.", failure(401)])) as server:
        outcome = ask(server)
        assert (outcome.status, len(server.bodies)) == (2, 6)
        assert "refuses the key (401); it is read from PASTA_ENDPOINT_KEY" in outcome.err
        assert len(partial.read_text().splitlines()) == 4
        with partial.open("a") as file:  # killed while it wrote a line
            file.write('{"id": "3", "resp')
        other = ask(server, "--model", "other")
        assert f"{partial} was begun with other settings: model (m -> other)" in other.err
        assert other.err.endswith(f"Remove it to start again: rm {partial}\n")
        server.script = in_turn([GOOD])
        error_lines = ask(server).err.splitlines()
        questions_sent = [
            body["messages"][-1]["content"].split("\n")[2] for body in server.bodies[6:]
        ]
        assert questions_sent == ["Q3", "Q4"]
    assert error_lines[-6:-2] == [
        f"5 rows in {five.with_name('out.jsonl')}, 4 with a promise",
        "1 rejected: text differs",
        "7 requests",
        "70 prompt_tokens",
    ]
    assert responses(five.with_name("out.jsonl")) == [GOOD, GOOD, OATS, GOOD, GOOD]
    assert not partial.exists()


def test_what_cannot_be_annotated_is_told_and_what_was_there_stays(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, broken = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "broken.jsonl"))
    broken.write_text(write(source, LIST).read_text() + "\n{")
    out.write_text("before")
    partial = tmp_path / "other.jsonl.partial"
    partial.write_text("{}\n")
    refused = {
        (broken, out): f"{broken}:2: not JSON: ",
        (source, tmp_path / "other.jsonl"): f"{partial} is not a journal of annotations: ",
        (broken, out, "--with", "nothing"): "--with nothing is neither structure, apar, llm nor",
        (source, out, "--with", "llm"): "an endpoint is asked by --base-url http",
    }
    for arguments, message in refused.items():
        outcome = pasta("annotate", *arguments)
        assert outcome.status == 2
        assert f"pasta: {message}" in outcome.err
    monkeypatch.setattr(Path, "replace", interrupted)
    assert pasta("annotate", source, out).status == 130
    assert out.read_text() == "before"
