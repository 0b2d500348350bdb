"""Runs of several methods: what is kept, resumed, refused, timed and counted as failed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import Question, question_of
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.ask import Ask
from pasta_decoding.evaluation.generate import Job, Plan, answer_all, ask_all
from pasta_decoding.evaluation.methods import Method, make_method
from pasta_decoding.evaluation.records import Record, begin_run, read_records
from pasta_decoding.scheduling.asking import DecodingTask
from pasta_decoding.scheduling.decoder import LocalDecoder
from tests.cli.conftest import interrupted
from tests.evaluation.puppet import puppet
from tests.scheduling.machine import FakeClock

QUESTIONS = [question_of("One?", "koala"), question_of("Two?"), question_of("Three?")]
CONFIG = GenerationConfig(max_tokens=50)
SETTINGS = {"max_tokens": 50, "adapter": {"name": "a", "sha256": "0"}}


def echo(question: str) -> str:
    return f"On {question}"


def sequential(decoder: LocalDecoder) -> Method:
    return make_method("sequential", decoder, CONFIG)


class Runs:
    """Runs methods into one folder; `questions_asked` has label and text of each question."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.questions_asked: list[tuple[str, str]] = []
        self.ticks: list[int] = []

    def __call__(
        self,
        labels: Sequence[str] = ("a",),
        *,
        load: Callable[[], Method] | None = None,
        settings: dict[str, Any] | None = None,
        **plan: Any,
    ) -> dict[str, list[Record]]:
        self.questions_asked.clear()
        self.ticks.clear()
        jobs = [
            Job(label, SETTINGS | {"method": label} | (settings or {}), load or self.loader(label))
            for label in labels
        ]
        return answer_all(
            jobs, QUESTIONS, self.out, Plan(clock=FakeClock(), **plan), self.ticks.append
        )

    def loader(self, label: str) -> Callable[[], Method]:
        inner = sequential(puppet(echo))

        def answer(question: Question, ask: Ask) -> DecodingTask[Record]:
            self.questions_asked.append((label, question.instruction))
            return inner.ask(question, ask)

        return lambda: Method(inner.decoder, answer)

    def lines(self, label: str = "a") -> list[str]:
        return (self.out / label / "records.jsonl").read_text().splitlines()

    def json(self, name: str, label: str = "a") -> Any:
        return json.loads((self.out / label / name).read_text())


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "out")


def test_every_prompt_has_a_record_and_the_answers_are_in_alpaca_evals_shape(runs: Runs) -> None:
    records = runs()["a"]
    assert [record.text for record in records] == ["On One?", "On Two?", "On Three?"]
    assert all(record.seconds > 0 and record.turns is None for record in records)
    assert records == sorted(read_records(runs.out / "a" / "records.jsonl"), key=records.index)
    outputs = [
        {"instruction": text, "output": f"On {text}", "generator": "a"}
        for text in ("One?", "Two?", "Three?")
    ]
    assert runs.json("model_outputs.json") == [{"dataset": "koala"} | outputs[0], *outputs[1:]]
    run = runs.json("run.json")
    assert run | SETTINGS == run
    assert (run["method"], run["resumed"]) == ("a", [])
    assert {"machine", "commit", "versions"} <= run.keys()
    assert sum(runs.ticks) == 3
    assert runs(load=interrupted)["a"] == records, "the same run again loads nothing"
    assert runs.ticks == [3]


def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(runs: Runs) -> None:
    records = runs(max_concurrency=1)["a"]
    lines = runs.lines()
    path = runs.out / "a" / "records.jsonl"
    path.write_text(lines[0] + "\n" + lines[1][:20])
    (runs.out / "a" / "model_outputs.json").unlink()
    assert runs(max_concurrency=1)["a"] == records
    assert runs.questions_asked == [("a", "Two?"), ("a", "Three?")]
    assert runs.lines()[0] == lines[0]
    assert len(runs.json("model_outputs.json")) == 3


def test_other_settings_are_refused_before_anything_is_loaded(runs: Runs) -> None:
    runs()
    with pytest.raises(PastaError) as caught:
        runs(("b", "a"), load=interrupted, settings={"max_tokens": 60, "seed": 1})
    assert str(caught.value) == (
        f"{runs.out / 'a'} was begun with other settings: max_tokens (50 -> 60), seed (None -> 1)"
    )
    assert caught.value.hint == "Give the settings it was begun with, or another --out."


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("{}\n")
    with pytest.raises(PastaError, match=r"holds records without a run\.json"):
        begin_run(tmp_path, SETTINGS)
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(PastaError, match=r"cannot read .*run\.json: Expecting value"):
        begin_run(tmp_path, SETTINGS)


# Failures


def test_a_request_that_cannot_be_asked_is_a_record_and_an_empty_output(runs: Runs) -> None:
    narrow = puppet(echo, max_positions=74)  # 19 tokens are the chat's own
    records = runs(load=lambda: sequential(narrow), max_seconds=70)["a"]
    assert [record.error is None for record in records] == [True, True, False]
    assert records[2].error == "the prompt is too long: 25 tokens, at most 24 tokens fit"
    assert (records[2].seconds, records[2].tokens_per_step) == (70, 1.0)
    assert [output["output"] for output in runs.json("model_outputs.json")] == [
        "On One?",
        "On Two?",
        "",
    ]


def test_an_answer_that_stands_still_has_failed_and_one_that_is_slow_or_waits_has_not(
    runs: Runs,
) -> None:
    narrow = puppet(echo, max_slots=90)  # room for one answer, and each takes far longer than 12 s
    records = runs(load=lambda: sequential(narrow), max_seconds=12)["a"]
    assert [record.error for record in records] == [None] * 3
    still: Any = SimpleNamespace(computed=1, result=lambda: None)
    stuck: Any = SimpleNamespace(
        add=lambda _: still, step=lambda: None, cancel=lambda _: None, close=lambda: None
    )

    def answer(_: Question, ask: Ask) -> DecodingTask[Record]:
        yield from ask([stuck])
        raise AssertionError("there is no answer")

    decoder: Any = SimpleNamespace(scheduler=lambda **_: stuck)
    plan = Plan(clock=FakeClock(), max_seconds=12)
    [failed] = ask_all(Method(decoder, answer), QUESTIONS[:1], plan)
    assert (failed.error, failed.seconds) == ("nothing was computed for 12 s", 12)


@pytest.mark.parametrize("error", [PastaError("out of memory"), RuntimeError("out of memory")])
def test_an_engine_that_breaks_in_a_step_fails_those_in_it_and_the_others_go_on(
    error: Exception, runs: Runs
) -> None:
    decoder = puppet(echo)
    step = decoder.engine.step
    steps = 0

    def breaking(feeds: Sequence[object]) -> object:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise error
        return step(feeds)  # type: ignore[arg-type]

    decoder.engine.step = breaking  # type: ignore[method-assign, assignment]
    records = runs(load=lambda: sequential(decoder), max_concurrency=2)["a"]
    assert [record.error for record in records] == ["out of memory", "out of memory", None]
    assert decoder.engine.slots_in_use == 0


def test_leaving_early_frees_what_is_under_way() -> None:
    decoder = puppet(echo)
    asking = ask_all(sequential(decoder), QUESTIONS, Plan())
    next(asking)
    assert decoder.engine.slots_in_use > 0
    asking.close()  # type: ignore[attr-defined]
    assert decoder.engine.slots_in_use == 0


# Timing


def test_timing_asks_prompt_by_prompt_in_turns_after_a_warm_up(runs: Runs) -> None:
    records = runs(("a", "b"), repeats=3, seed=5)
    warm_up = runs.questions_asked[:2]
    timed = runs.questions_asked[2:]
    assert warm_up == [("a", "One?"), ("b", "One?")]
    turns = [timed[start : start + 2] for start in range(0, len(timed), 2)]
    assert [turn[0][1] for turn in turns] == ["One?"] * 3 + ["Two?"] * 3 + ["Three?"] * 3
    assert all({label for label, _ in turn} == {"a", "b"} for turn in turns)
    assert len({turn[0][0] for turn in turns}) == 2, "the order is mixed"
    turn_ids = [record.turns for record in records["a"]]
    assert turn_ids == [record.turns for record in records["b"]]
    assert len({*turn_ids} - {None}) == 3
    for record in [*records["a"], *records["b"]]:
        assert len(record.repeats) == 3
        assert record.seconds == sorted(record.repeats)[1]
    first_run = list(runs.questions_asked)
    runs.out = runs.out.with_name("again")
    runs(("a", "b"), repeats=3, seed=5)
    assert runs.questions_asked == first_run


def test_a_method_that_comes_later_is_timed_together_with_the_others(runs: Runs) -> None:
    runs(("a", "b"), repeats=1)
    runs(("a", "c"), repeats=1)
    assert {question for label, question in runs.questions_asked if label == "a"} == {
        question.instruction for question in QUESTIONS
    }
    # Now b is of other turns than a, though nothing is missing.
    records = runs(("a", "b", "c"), repeats=1)
    turns = [[record.turns for record in records[label]] for label in ("a", "b", "c")]
    assert turns[0] == turns[1] == turns[2]


# Records


def test_a_record_of_an_earlier_version_is_read_without_what_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"id": "a", "instruction": "One?", "syncs": 1, "fallback": false}\n')
    assert read_records(path) == [Record("a", "One?")]
