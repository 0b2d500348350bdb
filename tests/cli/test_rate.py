"""`pasta eval rate`: without a judge on a tiny model, and with made-up judges."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.data.questions import question_of
from pasta_decoding.evaluation.run_folder import RunFolder
from tests.chatserver import Act, Body, Raw, chat_server, completion, failure
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Pasta
from tests.runfolders import failed, parallel, record, write_run

JUDGED = ("--no-likelihood", "--model", "m", "--retries", 0, "--base-url")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three prompts, the last of which our run failed at."""
    write_run(tmp_path / "runs/sequential", "sequential", [record(n) for n in range(3)])
    ours = [parallel(0), parallel(1), failed(2)]
    write_run(tmp_path / "runs/pasta", "pasta", ours)
    return tmp_path / "runs"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def verdicts(runs: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((runs / "pasta/annotations.json").read_text())
    return found


def prefers(good: str, body: Body) -> str:
    """Name the answer that is this text."""
    shown_first = body["messages"][0]["content"].partition("Answer A:\n<answer>\n")[2]
    return "A" if shown_first.startswith(good) else "B"


@pytest.mark.usefixtures("tiny_cache")
def test_texts_are_rated_under_the_sequential_model_and_a_second_run_goes_on(
    pasta: Pasta, runs: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    command = ("eval", "rate", runs, "--adapter", tiny_checkpoint.adapter)
    assert pasta(*command).status == 0
    whole = (runs / "pasta/quality.jsonl").read_text()
    rows = lines(runs / "pasta/quality.jsonl")
    assert [row["topics"] for row in rows] == [2, 2, 0]
    assert [row["missing_topics"] for row in rows] == [1, 1, 0]  # nothing of sleep is said
    assert all(row["nats"] > 0 and row["baseline_nats"] > 0 for row in rows)
    own = lines(runs / "sequential/quality.jsonl")
    assert [row["nats"] for row in own] == [row["baseline_nats"] for row in own]
    # A torn last line is made again, and nothing else is.
    (runs / "pasta/quality.jsonl").write_text(whole[:-20])
    assert pasta(*command).status == 0
    assert (runs / "pasta/quality.jsonl").read_text() == whole


@pytest.mark.usefixtures("tiny_cache")
def test_only_texts_that_changed_are_rated_again(
    pasta: Pasta, runs: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    command = ("eval", "rate", runs, "--adapter", tiny_checkpoint.adapter)
    pasta(*command)
    before = lines(runs / "pasta/quality.jsonl")
    base = [record(n, text="Changed." if n == 1 else f"This about {n}.") for n in range(3)]
    write_run(runs / "sequential", "sequential", base)
    stale = pasta("eval", "report", runs, "-o", runs.parent)
    assert stale.complaint[1:] == (
        f"pasta: {runs}/pasta was rated with another answer to 'What about 1?' than "
        f"{runs}/sequential holds",
        "Rate the run again with `pasta eval rate`.",
    )
    assert pasta(*command).status == 0
    after = lines(runs / "pasta/quality.jsonl")
    assert after[:3] == before
    assert [row["id"] for row in after[3:]] == [record(1).id]
    assert pasta("eval", "report", runs, "-o", runs.parent).status == 0


@pytest.mark.usefixtures("tiny_cache")
def test_ratings_of_two_models_are_not_mixed(
    pasta: Pasta, runs: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    command = ("eval", "rate", runs / "sequential", "--adapter", tiny_checkpoint.adapter)
    pasta(*command)
    path = runs / "sequential/rating.json"
    path.write_text(json.dumps({"likelihood_under": "another"}))
    status, message, hint = pasta(*command).complaint
    assert status == 2
    quality = runs / "sequential/quality.jsonl"
    said = f"pasta: {quality} was begun with other settings: likelihood_under (another -> adapter "
    assert said in message
    assert hint == "Remove it to rate the answers again."


def test_an_endpoint_compares_in_both_orders_and_a_failed_request_loses(
    pasta: Pasta, runs: Path
) -> None:
    with chat_server(lambda _number, body: prefers("Two things", body)) as server:
        found = pasta("eval", "rate", runs, *JUDGED, server.base_url)
    assert (found.status, len(server.bodies)) == (0, 4)
    assert [row["preference"] for row in verdicts(runs)] == [2.0, 2.0, 1.0]
    first = verdicts(runs)[0]
    assert (first["generator_1"], first["generator_2"]) == ("sequential", "pasta")
    assert (first["output_1"], first["annotator"]) == ("This about 0.", "m, both orders")
    assert found.err.endswith("pasta: 3 verdicts of m, both orders, 0 missing\n")


def test_the_bars_of_rating_and_judging_reach_their_ends(
    pasta: Pasta, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three pairs has a failed answer, which nobody is asked about."""
    moved: dict[str, list[int]] = {}

    @contextmanager
    def counted(what: str, total: int) -> Iterator[Callable[[], None]]:
        moved[what] = [total, 0]

        def tick() -> None:
            moved[what][1] += 1

        yield tick

    monkeypatch.setattr("pasta_decoding.cli.rate.progress", counted)
    with chat_server(lambda _number, body: prefers("Two things", body)) as server:
        assert pasta("eval", "rate", runs, *JUDGED, server.base_url).status == 0
    assert moved == {"judging pasta": [4, 4]}


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (failure(429), "failed with status 429"),
        (failure(500), "failed with status 500"),
        ("I cannot say.", "a reply without a verdict"),
    ],
)
def test_what_brings_no_verdict_is_missing_and_asked_again(
    pasta: Pasta, runs: Path, act: Act, reason: str
) -> None:
    def stubborn(_number: int, body: Body) -> Act:
        about_1 = "What about 1?" in body["messages"][0]["content"]
        return act if about_1 else prefers("Two things", body)

    with chat_server(stubborn) as server:
        found = pasta("eval", "rate", runs, *JUDGED, server.base_url)
        assert [row["preference"] for row in verdicts(runs)] == [2.0, None, 1.0]
        assert reason in found.err
        assert "2 verdicts of m, both orders, 1 missing" in found.err
        server.script = lambda _number, body: prefers("Two things", body)
        asked = len(server.bodies)
        pasta("eval", "rate", runs, *JUDGED, server.base_url)
    assert [row["preference"] for row in verdicts(runs)] == [2.0, 2.0, 1.0]
    assert len(server.bodies) == asked + 2  # only the pair without a verdict, in both orders


def test_an_empty_answer_loses_also_to_an_empty_one(pasta: Pasta, runs: Path) -> None:
    write_run(runs / "sequential", "sequential", [record(0), record(1), failed(2)])
    with chat_server(lambda _number, body: prefers("Two things", body)) as server:
        pasta("eval", "rate", runs, *JUDGED, server.base_url)
    assert [row["preference"] for row in verdicts(runs)] == [2.0, 2.0, 1.0]


def test_a_refused_key_ends_the_command(pasta: Pasta, runs: Path) -> None:
    with chat_server(lambda _number, _body: failure(401)) as server:
        status, message, _hint = pasta("eval", "rate", runs, *JUDGED, server.base_url).complaint
    assert (status, "refuses the key" in message) == (2, True)
    assert not (runs / "pasta/annotations.json").exists()


def test_probabilities_of_the_endpoint_are_preferences(pasta: Pasta, runs: Path) -> None:
    def unsure(_number: int, body: Body) -> Raw:
        likely = 0.8 if prefers("Two things", body) == "A" else 0.4
        top = [{"token": "A", "logprob": math.log(likely)},
               {"token": "B", "logprob": math.log(1 - likely)}]  # fmt: skip
        first = {"token": "A", "logprob": -0.1, "top_logprobs": top}
        return Raw(completion("A", logprobs={"content": [first]}))

    with chat_server(unsure) as server:
        pasta("eval", "rate", runs, *JUDGED, server.base_url)
    # (0.8 + 1 - 0.4) / 2 of the way from 1 to 2.
    assert verdicts(runs)[0]["preference"] == pytest.approx(1.7)


def test_difficulties_are_found_by_alpaca_evals_numbers(
    pasta: Pasta, runs: Path, tmp_path: Path
) -> None:
    difficulty, prompts = tmp_path / "difficulty.csv", tmp_path / "prompts.jsonl"
    difficulty.write_text(",instruction_difficulty\n7,-1.5\n8,0.25\n")
    asked = [{"instruction": "What about 0?", "instruction_id": 8}]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in asked))
    options = ("--difficulty", difficulty, "--prompts", prompts)
    with chat_server(lambda _number, _body: "A") as server:
        pasta("eval", "rate", runs, *JUDGED, server.base_url, *options)
    assert [row["instruction_difficulty"] for row in verdicts(runs)] == [0.25, None, None]


def test_what_does_not_go_together_is_refused(pasta: Pasta, runs: Path) -> None:
    both = pasta("eval", "rate", runs, "--annotator", "x", "--base-url", "y", "--model", "z")
    assert both.complaint[1:] == (
        "pasta: several judges",
        "Give one of --base-url, --annotator and --judged.",
    )


def test_what_people_said_of_pairs_is_a_judgement(pasta: Pasta, runs: Path) -> None:
    """Two read the first pair and do not agree; nobody has come to the second."""
    out = runs.parent / "people.jsonl"
    pasta("judge", "pairs", runs, "-o", out, "--both-orders")
    read = lines(out)
    for number, line in enumerate(read):
        ours = "a" if line["response_a"].startswith("Two things") else "b"
        if line["prompt"] == "What about 0?":
            line["label"] = ours if number < 2 else "tie"
    out.write_text("".join(json.dumps(line) + "\n" for line in read))
    found = pasta("eval", "rate", runs, "--no-likelihood", "--judged", out)
    assert [row["preference"] for row in verdicts(runs)] == [1.75, None, 1.0]
    assert verdicts(runs)[0]["annotator"] == "people"
    assert found.err.endswith("pasta: 2 verdicts of people, 1 missing\n")


def test_broken_judgements_are_refused_before_anything_long(pasta: Pasta, runs: Path) -> None:
    """Reading every text comes first otherwise; the file then would be refused minutes later."""
    broken = runs.parent / "people.jsonl"
    broken.write_text('{"prompt": "What about 0?"}\n')
    status, message, _hint = pasta("eval", "rate", runs, "--judged", broken).complaint
    assert status == 2
    assert f"{broken}:1: " in message
    assert not list(runs.rglob("quality.jsonl"))


def test_runs_of_other_prompts_are_not_compared(pasta: Pasta, runs: Path) -> None:
    write_run(runs / "sequential", "sequential", [record(n) for n in range(1, 4)])
    status, message, _hint = pasta("eval", "rate", runs, "--no-likelihood").complaint
    assert status == 2
    assert f"{runs}/sequential and {runs}/pasta are of different prompts" in message


CONFIG = """local_test:
  prompt_template: "local_test/prompt.txt"
  fn_completions: "openai_completions"
  completions_kwargs: {model_name: "gpt-local", max_tokens: 5, temperature: 0}
  fn_completion_parser: "regex_parser"
  completion_parser_kwargs: {outputs_to_match: {1: '^one', 2: '^two'}}
  batch_size: 1
"""
PROMPT = "<|im_start|>user\n{instruction}\n[one]{output_1}\n[two]{output_2}\n<|im_end|>\n"


@pytest.fixture
def annotator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An annotator configuration of the package alpaca_eval."""
    folder = tmp_path / "configs/local_test"
    folder.mkdir(parents=True)
    (folder / "configs.yaml").write_text(CONFIG)
    (folder / "prompt.txt").write_text(PROMPT)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    return folder


def said(body: Body) -> str:
    """Return what the package asked."""
    found: str = body["messages"][0]["content"]
    return found


def prefer_ours(_number: int, body: Body) -> str:
    """Answer the package: our parallel text is better."""
    return "two" if "[two]Two things" in said(body) else "one"


PACKAGE = pytest.mark.filterwarnings(
    "ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning", "ignore::ResourceWarning"
)


@PACKAGE
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (failure(500), "InternalServerError"),
        (Raw(b'{"choices": null}'), "TypeError"),
        (Raw(b"<html>no such page</html>"), "JSONDecodeError"),
    ],
)
def test_an_annotator_of_the_package_that_answers_nonsense_gives_no_verdict(
    pasta: Pasta,
    runs: Path,
    annotator: Path,
    act: Raw,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with chat_server(lambda _number, _body: act) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        found = pasta(
            "eval", "rate", runs, "--no-likelihood", "--annotator", annotator, "--retries", 0
        )
    assert found.status == 0
    assert [row["preference"] for row in verdicts(runs)] == [None, None, 1.0]
    assert f"pasta: no verdict (2 times): {reason}" in found.err


@PACKAGE
@pytest.mark.parametrize("act", [failure(401), failure(404), None])
def test_an_annotator_of_the_package_that_nobody_answers_for_ends_the_command(
    pasta: Pasta,
    runs: Path,
    annotator: Path,
    act: Raw | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with chat_server(lambda _number, _body: act or "one") as server:
        address = server.base_url if act else "http://127.0.0.1:9/v1"
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        status, message, hint = pasta(
            "eval", "rate", runs, "--no-likelihood", "--annotator", annotator, "--retries", 0
        ).complaint
    assert (status, "local_test: " in message) == (2, True)
    assert hint == "The package takes key and address from OPENAI_API_KEY and OPENAI_BASE_URL."
    assert not (runs / "pasta/annotations.json").exists()


@PACKAGE
def test_an_annotator_of_the_package_is_asked_again_only_where_it_gave_no_verdict(
    pasta: Pasta, runs: Path, annotator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsure(number: int, body: Body) -> str:
        about_1 = "What about 1?" in said(body)
        return "neither" if about_1 else prefer_ours(number, body)

    with chat_server(unsure) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        command = ("eval", "rate", runs, "--no-likelihood", "--annotator", annotator)
        found = pasta(*command)
        assert found.err.endswith("pasta: 2 verdicts of local_test, 1 missing\n")
        assert [row["preference"] for row in verdicts(runs)] == [2.0, None, 1.0]
        server.script = prefer_ours
        pasta(*command)
    assert [row["preference"] for row in verdicts(runs)] == [2.0, 2.0, 1.0]
    assert len(server.bodies) == 3


@PACKAGE
def test_the_package_takes_the_answers_as_they_are_written(
    runs: Path, annotator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [question_of(f"What about {n}?", "koala") for n in range(3)]
    for label, told in (("sequential", record), ("pasta", parallel)):
        folder = RunFolder(runs.parent / "out" / label, {"method": label})
        for number, question in enumerate(questions):
            folder.append(replace(told(number), id=question.id))
        folder.finish(questions)
    read = importlib.import_module("alpaca_eval.utils").load_or_convert_to_dataframe
    outputs = [
        read(runs.parent / "out" / label / "model_outputs.json")
        for label in ("sequential", "pasta")
    ]
    judge = importlib.import_module("alpaca_eval.annotators").PairwiseAnnotator(
        annotators_config=str(annotator), caching_path=None
    )
    with chat_server(prefer_ours) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        found = judge.annotate_head2head(*outputs)
    assert [row["preference"] for row in found] == [2.0] * 3
    assert {(row["generator_1"], row["generator_2"]) for row in found} == {("sequential", "pasta")}
