"""`pasta annotate`: bad input, interruptions, reports."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pasta_decoding.lang.tree import Chunk, read, strip
from tests.chatserver import Act, Body, ChatServer, Raw, chat_server, completion, failure, in_turn
from tests.cli.conftest import Outcome, Pasta, interrupted
from tests.shapes import make_llama3

pytestmark = pytest.mark.usefixtures("tiny_cache")


def row(number: int, response: str) -> str:
    found = {"id": str(number), "source": "s", "instruction": "i", "response": response, "x": 1}
    return json.dumps(found)


LIST = "Tips:\n\n" + "\n".join(
    f"{n}. **{name}**: {' '.join([name.lower()] * 25)}."
    for n, name in enumerate(("Sleep", "Water", "Walks"), start=1)
)
LINES = [row(1, LIST), "{", row(1, "twice"), '{"id": "4"}', "\x80", row(5, "Plain.")]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join(LINES).encode("latin-1"))
    return path


def test_annotate_stops_at_the_first_broken_line_and_writes_nothing(
    broken: Path, pasta: Pasta
) -> None:
    out = broken.with_name("out.jsonl")
    out.write_text("before")
    found = pasta("annotate", broken, out)
    assert found.status == 2
    assert found.err.startswith(f"pasta: {broken}:2: not JSON: ")
    assert out.read_text() == "before"


def test_annotate_keeps_going_when_asked_and_names_every_line_it_skipped(
    broken: Path, pasta: Pasta
) -> None:
    out = broken.with_name("out.jsonl")
    found = pasta("annotate", broken, out, "--with", "structure", "--keep-going")
    assert found.status == 1
    said = [line for line in found.err.splitlines() if line]
    assert said[0].startswith(f"skipped {broken}:2: not JSON: ")
    assert said[1:] == [
        f"skipped {broken}:3: id '1' was used before",
        f"skipped {broken}:4: no 'instruction'",
        f"skipped {broken}:5: not UTF-8 (byte 1)",
        f"2 rows in {out}, 1 with a promise, 4 skipped",
        said[-1],
    ]
    assert said[-1].startswith("ideal speedup 1.")
    first, last = map(json.loads, out.read_text().splitlines())
    assert "<promise topic=" in first["response"]
    assert first["x"] == 1
    assert last["response"] == "Plain."


def test_an_interrupted_annotate_leaves_what_is_finished_and_nothing_half_written(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    path.write_text(row(1, LIST))
    with monkeypatch.context() as context:
        context.setattr(Path, "replace", interrupted)
        found = pasta("annotate", path, out)
    assert found.status == 130
    assert found.err.endswith(
        f"finished rows are in {out}.partial; the same command goes on behind them\n"
        "\npasta: interrupted\n"
    )
    assert set(tmp_path.iterdir()) == {path, tmp_path / "out.jsonl.partial"}
    assert pasta("annotate", path, out).status == 0
    assert set(tmp_path.iterdir()) == {path, out}


def test_annotate_names_an_output_that_it_cannot_write(tmp_path: Path, pasta: Pasta) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row(1, LIST))
    out = tmp_path / "nowhere" / "out.jsonl"
    found = pasta("annotate", path, out)
    assert found.status == 2
    assert f"pasta: cannot write {out}: No such file or directory\n" in found.err


def test_annotate_without_the_default_model_says_to_pull_it(
    tmp_path: Path, pasta: Pasta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASTA_CACHE", str(tmp_path))
    path = tmp_path / "rows.jsonl"
    path.write_text(row(1, LIST))
    expected = (2, f"pasta: the default model is not in {tmp_path}", "run `pasta pull`")
    assert pasta("annotate", path, tmp_path / "out.jsonl").complaint == expected


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Rows that annotators are not for, beside others."""
    path = tmp_path / "mixed.jsonl"
    responses = [
        LIST,
        "",
        " \n",
        "word " * 500,
        "Write <sync/> or </async>.",
        "你好。Ciao! Привет.\r\n",
    ]
    path.write_text("\n".join(row(n, text) for n, text in enumerate(responses)))
    return path


def responses(path: Path) -> list[str]:
    return [json.loads(line)["response"] for line in path.read_text("utf-8").splitlines()]


def test_empty_and_huge_responses_stay_as_they_are_and_are_counted(
    mixed: Path, pasta: Pasta
) -> None:
    out = mixed.with_name("out.jsonl")
    report = pasta("annotate", mixed, out, "--max-tokens", 1000, "--json").object
    assert report["rejected"] == {"empty response": 2, "more than 1000 tokens": 1}
    assert (report["rows"], report["promised"], report["skipped"]) == (6, 1, 0)
    assert report["ideal_speedup_promised"] > report["ideal_speedup"] > 1
    found = responses(out)
    assert found[1:4] == ["", " \n", "word " * 500]
    assert found[4:] == ["Write \\<sync/> or \\</async>.", "你好。Ciao! Привет.\r\n"]


def test_apar_forks_the_details_of_a_list_without_topics(mixed: Path, pasta: Pasta) -> None:
    annotated, apar = mixed.with_name("annotated.jsonl"), mixed.with_name("apar.jsonl")
    assert pasta("annotate", mixed, annotated).status == 0
    report = pasta("annotate", annotated, apar, "--with", "apar", "--strip", "--json").object
    assert report["promised"] == 1
    assert report["ideal_speedup_promised"] > 1
    found = responses(apar)[0]
    assert strip(read(found)) == LIST
    assert '1. **Sleep**: <promise tokens="' in found


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
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    path.write_text(row(1, "x" * 197))
    assert pasta("annotate", path, out, "--with", "own_rule:thirds").status == 0
    first, second, _rest = read(responses(out)[0])
    assert isinstance(first, Chunk)
    assert isinstance(second, Chunk)
    assert (first.topic, first.tokens, second.topic, second.tokens) == ("first", 70, None, 70)
    for name in ("beyond", "topical", "missing", ""):
        found = pasta("annotate", path, out, "--with", f"own_rule:{name}")
        assert (found.status, found.err.count("Traceback")) == (2, 0), name


def test_stripping_takes_the_tags_out_first_so_that_annotating_twice_is_annotating_once(
    mixed: Path, pasta: Pasta
) -> None:
    once, twice = (mixed.with_name(f"{n}.jsonl") for n in range(2))
    assert pasta("annotate", mixed, once).status == 0
    assert pasta("annotate", once, twice, "--strip").status == 0
    assert responses(twice) == responses(once)


def test_what_is_annotated_already_is_refused_unless_it_is_said_what_to_do(
    mixed: Path, pasta: Pasta
) -> None:
    once, twice = mixed.with_name("once.jsonl"), mixed.with_name("twice.jsonl")
    assert pasta("annotate", mixed, once).status == 0
    assert pasta("annotate", once, twice).complaint == (
        2,
        # The list, and the text that speaks of tags.
        "pasta: 2 of 6 responses are annotated already, the first is that of '0'",
        "--strip takes their tags out first; --keep leaves these rows as they are.",
    )
    assert not twice.exists()
    assert pasta("annotate", once, twice, "--keep", "--strip").complaint == (
        2,
        "pasta: --keep and --strip contradict each other",
        "Give one of them.",
    )


def test_with_keep_the_annotated_rows_stay_and_the_others_are_annotated(
    mixed: Path, pasta: Pasta
) -> None:
    kept = 'My <promise topic="tea" tokens="20"/><async>own choice.</async>'
    mixed.write_text(f"{mixed.read_text()}\n{row(9, kept)}")
    out = mixed.with_name("out.jsonl")
    report = pasta("annotate", mixed, out, "--keep", "--json").object
    assert (report["rows"], report["promised"], report["kept"]) == (7, 2, 1)
    assert responses(out)[6] == kept
    assert strip(read(responses(out)[0])) == LIST
    said = pasta("annotate", mixed, out, "--keep").err
    assert "1 were annotated already and stay as they were" in said


def lengths(path: Path) -> list[int]:
    tree = read(responses(path)[0])
    return [node.tokens for node in tree if isinstance(node, Chunk)]


def test_lengths_are_counted_in_the_tokens_of_the_model_that_will_be_trained(
    tmp_path: Path, pasta: Pasta
) -> None:
    base, path, out = make_llama3(tmp_path / "llama3"), tmp_path / "rows.jsonl", tmp_path / "out"
    items = (f"{n}. Roles: {', '.join(['user1assistant'] * 15)}." for n in range(3))
    response = "Three:\n\n" + "\n".join(items)
    path.write_text(row(0, response))
    assert pasta("annotate", path, out).status == 0
    in_bytes = lengths(out)
    for option in ("--model", "--tokenizer"):
        assert pasta("annotate", path, out, option, base).status == 0
        # One takes `assistant` whole.
        assert (lengths(out), in_bytes) == ([130] * 3, [250] * 3)
    with chat_server(in_turn([responses(out)[0]])) as server:
        who = ["--with", "llm", "--base-url", server.base_url, "--model", "m", "--json"]
        assert pasta("annotate", path, out, *who).object["rejected"] == {}
        assert lengths(out) == in_bytes
        assert pasta("annotate", path, out, *who, "--tokenizer", base).status == 0
        assert lengths(out) == [130] * 3


def test_only_the_first_rows_are_annotated_where_there_is_a_limit(
    mixed: Path, pasta: Pasta
) -> None:
    out = mixed.with_name("out.jsonl")
    assert pasta("annotate", mixed, out, "--limit", 2, "--json").object["rows"] == 2
    assert len(responses(out)) == 2


PLAIN = "Eat oats for breakfast. Sleep well at night."
GOOD = (
    '<promise topic="diet" tokens="30"/><async>Eat oats for breakfast.</async> '
    '<promise topic="sleep" tokens="20"/><async>Sleep well at night.</async>'
)
WRONG = PLAIN.replace("oats", "rice")


@pytest.fixture
def five(tmp_path: Path) -> Path:
    path = tmp_path / "five.jsonl"
    lines = [json.dumps(json.loads(row(n, PLAIN)) | {"instruction": f"Q{n}"}) for n in range(5)]
    path.write_text("\n".join(lines))
    return path


Ask = Callable[..., Outcome]


@pytest.fixture
def ask(pasta: Pasta, five: Path) -> Ask:
    """Return a function that lets a server annotate five rows, one after the other."""

    def run(server: ChatServer, *arguments: object) -> Outcome:
        where = ["--with", "llm", "--base-url", server.base_url, "--model", "m"]
        rest = ["--concurrency", "1", *arguments]
        return pasta("annotate", five, five.with_name("out.jsonl"), *where, *rest)

    return run


def questions(server: ChatServer, since: int = 0) -> list[str]:
    """Which rows the server was asked about."""
    return [body["messages"][-1]["content"].split("\n")[2] for body in server.bodies[since:]]


def test_an_endpoint_annotates_and_cost_and_rejects_are_reported(ask: Ask, five: Path) -> None:
    def script(_number: int, body: Body) -> Act:
        turns = body["messages"]
        first = len(turns) == 16
        if "Q1\n" in turns[15]["content"] and first:
            return WRONG
        return "I will not." if "Q3\n" in turns[15]["content"] else GOOD

    with chat_server(script) as server:
        report = ask(server, "--retries", "1", "--json").object
    assert (report["rows"], report["promised"]) == (5, 4)
    assert report["rejected"] == {"text differs": 1}
    said = 3 * GOOD.split() + [*WRONG.split(), *GOOD.split(), *2 * ["I", "will", "not."]]
    assert report["cost"] == {
        "requests": 7,
        "prompt_tokens": 70,
        "completion_tokens": len(said),
        "retries: text differs": 2,
    }
    assert responses(five.with_name("out.jsonl")) == [GOOD, GOOD, GOOD, PLAIN, GOOD]


def test_for_people_the_report_is_lines(ask: Ask, five: Path) -> None:
    with chat_server(in_turn([GOOD, "no", GOOD])) as server:
        found = ask(server, "--retries", "0")
    assert (found.status, found.out) == (0, "")
    assert found.err.splitlines()[-6:-1] == [
        f"5 rows in {five.with_name('out.jsonl')}, 4 with a promise, 0 skipped",
        "1 rejected: text differs",
        "5 requests",
        "50 prompt_tokens",
        f"{4 * len(GOOD.split()) + 1} completion_tokens",
    ]


def test_a_stopped_run_asks_only_for_what_is_missing(ask: Ask, five: Path) -> None:
    partial = five.with_name("out.jsonl.partial")
    with chat_server(in_turn([GOOD, WRONG, GOOD, failure(401)])) as server:
        found = ask(server, "--retries", "0")
        assert (found.status, len(server.bodies)) == (2, 4)
        assert "refuses the key (401); it is read from PASTA_ENDPOINT_KEY" in found.err
        assert len(partial.read_text().splitlines()) == 4
        with partial.open("a") as file:  # killed while it wrote a line
            file.write('{"id": "3", "resp')
        server.script = lambda number, _body: GOOD if number == 4 else failure(401)
        assert ask(server, "--retries", "0").status == 2
        server.script = in_turn([GOOD])
        report = ask(server, "--retries", "0", "--json").object
        assert questions(server, since=4) == ["Q3", "Q4", "Q4"]
    assert report["rejected"] == {"text differs": 1}
    assert report["cost"]["requests"] == 5
    assert responses(five.with_name("out.jsonl")) == [GOOD, PLAIN, GOOD, GOOD, GOOD]
    assert not partial.exists()


@pytest.fixture
def control_c() -> Iterator[None]:
    """Let Ctrl-C mean what it does at a terminal: a background job is started deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("control_c")
def test_control_c_while_an_endpoint_thinks_loses_nothing(ask: Ask) -> None:
    assert threading.current_thread() is threading.main_thread()

    def script(number: int, _body: Body) -> Act:
        if number < 2:
            return GOOD
        os.kill(os.getpid(), signal.SIGINT)
        return Raw(completion(GOOD), wait_s=30)

    with chat_server(script) as server:
        found = ask(server)
        assert found.status == 130
        assert "finished rows are in " in found.err
        server.script = in_turn([GOOD])
        assert ask(server).status == 0
        assert questions(server, since=3) == ["Q2", "Q3", "Q4"]


def test_a_journal_of_other_settings_is_refused_with_the_keys_that_differ(
    ask: Ask, five: Path
) -> None:
    with chat_server(in_turn([GOOD, failure(401)])) as server:
        assert ask(server).status == 2
        status, message, hint = ask(server, "--model", "other", "--retries", "7").complaint
        assert status == 2
        assert message.endswith(
            f"{five.with_name('out.jsonl.partial')} was begun with other settings: "
            "model (m -> other), retries (2 -> 7)"
        )
        assert hint == ("Give the settings it was begun with, or remove the file to start again.")
        five.write_text(five.read_text() + "\n\n")
        assert "other settings: input (" in ask(server).complaint[1]
        assert len(server.bodies) == 2


@pytest.mark.parametrize("line", ["{", "[]", '{"settings": 5}'])
def test_a_journal_of_something_else_is_refused(line: str, mixed: Path, pasta: Pasta) -> None:
    partial = mixed.with_name("out.jsonl.partial")
    partial.write_text(line + "\n")
    status, message, hint = pasta("annotate", mixed, mixed.with_name("out.jsonl")).complaint
    assert status == 2
    assert f"pasta: {partial}:1: not a line of an annotation: " in message
    assert hint == "Remove the file to start again."
    assert partial.read_text() == line + "\n"


def test_an_endpoint_needs_an_address_and_a_model(mixed: Path, pasta: Pasta) -> None:
    expected = (
        2,
        "pasta: an endpoint is asked by --base-url and --model",
        "For example: --base-url http://localhost:8000/v1 --model m",
    )
    out = mixed.with_name("out.jsonl")
    assert pasta("annotate", mixed, out, "--with", "llm", "--model", "m").complaint == expected
