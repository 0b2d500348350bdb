"""`pasta train preference` on a tiny model: what it prints, keeps and refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.training.quality import GradeKey, read_grades
from tests.chatserver import Act, Body, ChatServer, chat_server, failure
from tests.checkpoint import TinyCheckpoint
from tests.cli.conftest import Outcome, Pasta

FLAGS = ["--samples", "4", "--max-tokens", "40", "--engine", "torch", "--quality", "likelihood"]
SAMPLING = {"dtype": "float32", "max_prompt_chars": 50}
TRAINING = {"pairs_per_step": 1, "bf16": False}
ROW = {"instruction": "Two?", "response": 'Rome <promise topic="a" tokens="10"/><async>is.</async>'}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    prompts = ["Why?", "How?", "What?", "x" * 300]
    path.write_text("".join(json.dumps({"instruction": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def train(pasta: Pasta, tiny_checkpoint: TinyCheckpoint, prompts: Path, tmp_path: Path) -> Pasta:
    """Return a function that trains a round into `run`; named options take the place of its own."""

    def run(*flags: object, out: str = "run") -> Outcome:
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps(SAMPLING | TRAINING))
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps(ROW))
        adapters = ["--policy", tiny_checkpoint.adapter, "--baseline", tiny_checkpoint.adapter]
        where = ["--prompts", prompts, "--out", tmp_path / out, "--model", tiny_checkpoint.base]
        where += ["--replay", rows]
        return pasta("train", "preference", *where, *adapters, "--config", file, *FLAGS, *flags)

    return run


def chunk(topic: str) -> str:
    return f'<promise topic="{topic}" tokens="10"/><async>{topic}.</async>'


CITIES = f"1. {chunk('Paris')} 2. {chunk('Rome')}"
ASKED = {"role": "user", "content": "Two?"}
ANSWER = {"role": "assistant", "content": "Rome."}
PAIRS: list[dict[str, object]] = [
    {"instruction": "Two?", "chosen": CITIES, "rejected": "1. Paris. 2. Rome."},
    {"prompt": [ASKED], "chosen": [ANSWER | {"content": CITIES}], "rejected": [ANSWER]},
    {"chosen": [ASKED, ANSWER | {"content": CITIES}], "rejected": [ASKED, ANSWER]},
    {"id": "same", "prompt": "Two?", "chosen": CITIES, "rejected": CITIES.replace("10", "20")},
    {"id": "broken", "prompt": "Two?", "chosen": CITIES, "rejected": "<async>Paris."},
    {"id": "long", "prompt": "Two?", "chosen": "Rome. " * 99, "rejected": "Paris."},
]


def test_pairs_that_somebody_has_are_trained_on_without_a_sample(
    pasta: Pasta, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    pairs, file, out = (tmp_path / name for name in ("pairs.jsonl", "run.yaml", "run"))
    pairs.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    file.write_text(json.dumps(TRAINING))
    where = ["--pairs", pairs, "--out", out, "--model", tiny_checkpoint.base]
    command = ["train", "preference", *where, "--policy", tiny_checkpoint.adapter]
    command += ["--config", file, "--max-tokens", "250", "--objective", "square"]
    outcome = pasta(*command)
    assert (outcome.status, outcome.out) == (0, f"{out / 'adapter'}\n"), outcome.err
    for line in (
        "1 rows left out, the first is same: both answers are the same",
        "1 rows left out, the first is broken: broken tags (async-without-promise)",
        "1 rows left out, the first is long: longer than 250 tokens",
        "round-1: 3 pairs, 265 tokens",
    ):
        assert line in outcome.err.splitlines()
    steps = read_lines(out / "round-1" / "train" / "metrics.jsonl")
    assert [step["target"] for step in steps] == [1, 1, 1]  # nats: the gap of the better one of two
    assert (steps[0]["ratio_best"], steps[0]["ratio_worst"]) == (0, 0)
    assert {path.name for path in out.glob("*.json*")} == {"config.json", "inputs.json"}
    again = pasta(*command)
    assert (again.status, "step 1/3" in again.err) == (0, False)
    pairs.write_text(json.dumps(PAIRS[1]))
    other = pasta(*command)
    assert (other.status, "was begun with other settings: pairs (" in other.err) == (2, True)


def test_a_round_prints_the_folder_of_the_adapter_and_another_lambda_takes_its_samples(
    train: Pasta, tmp_path: Path
) -> None:
    outcome = train()
    assert (outcome.status, outcome.out) == (0, f"{tmp_path / 'run' / 'adapter'}\n")
    assert (tmp_path / "run" / "adapter" / "pasta.json").is_file()
    prompt_lines = (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()
    assert len(prompt_lines) == 3, "the long prompt is left out"
    for line in (
        r"sampling baseline: 100%.* 3/3 .*",
        r"sampling round-1: 100%.* 12/12 .*",
        r"scoring: 100%.* 3/3 .*",
        r"reference: 100%.* (\d)/\1 .*",
        r"step (\d+)/\1, loss \S+, \d+ tokens/s, 0:00:00 left",
        "finished: 1 rounds",
    ):
        assert re.search(f"^{line}$", outcome.err.replace("\r", "\n"), re.M), line
    assert outcome.err.count("sampling round-1: ") == 2, "none for each answer"
    flags = ["--lambda", "inf", "--samples-from", tmp_path / "run"]
    assert train(*flags, out="inf").status == 0
    settings = json.loads((tmp_path / "inf" / "config.json").read_text())
    assert settings["lambda_"] is None
    samples = [tmp_path / name / "round-1" / "samples.jsonl" for name in ("run", "inf")]
    assert samples[0].read_text() == samples[1].read_text()


def test_a_run_waits_for_grades_and_goes_on_when_they_are_there(
    train: Pasta, tmp_path: Path
) -> None:
    grades = tmp_path / "grades.jsonl"
    waiting = train("--quality", grades)
    answers = tmp_path / "run" / "round-1" / "answers.jsonl"
    assert waiting.status == 2
    assert f"waiting for {grades}: 15 of 15 answers have no grade there" in waiting.err
    assert str(answers) in waiting.err
    keys = [{"prompt": line["prompt"], "number": line["number"]} for line in read_lines(answers)]
    assert [key["number"] for key in keys[:5]] == ["baseline", 0, 1, 2, 3]
    lines = [key | {"grade": index % 7} for index, key in enumerate(keys)]
    grades.write_text("".join(json.dumps(line) + "\n" for line in lines))
    finished = train("--quality", grades)
    assert finished.status == 0, finished.err
    assert "sampling" not in finished.err, "the samples of the first call serve"
    assert read_lines(tmp_path / "run" / "round-1" / "grades.jsonl") == lines


def test_checks_grade_the_answers_to_prompts_that_have_some(
    train: Pasta, prompts: Path, tmp_path: Path
) -> None:
    checks = [{"kind": "without", "arguments": {"characters": "e"}}, {"kind": "lower"}]
    lines = [
        {"instruction": "Why?", "checks": checks},
        {"instruction": "What?", "checks": checks},
        {"instruction": "How?"},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    finished = train("--quality", "checks")
    assert finished.status == 0, finished.err
    answers = read_lines(tmp_path / "run" / "round-1" / "answers.jsonl")
    grades = read_lines(tmp_path / "run" / "round-1" / "grades.jsonl")
    for line, grade in zip(answers, grades, strict=True):
        answer = line["answer"]
        passed = ["e" not in answer.lower(), answer.islower()]
        share = sum(passed) / 2 if answer.strip() else 0.0
        assert grade["grade"] == (None if line["instruction"] == "How?" else share), answer


def prefers_the_shorter(_number: int, body: Body) -> str:
    question = body["messages"][0]["content"]
    first, second = (
        question.partition(f"<answer_{letter}>")[2].partition(f"</answer_{letter}>")[0]
        for letter in "AB"
    )
    return "A" if len(first) < len(second) else "B"


def test_a_judge_grades_and_what_it_said_before_it_was_down_is_not_asked_again(
    train: Pasta, tmp_path: Path
) -> None:
    def dies(number: int, body: Body) -> Act:
        return prefers_the_shorter(number, body) if number < 6 else failure(401)

    def judge(server: ChatServer) -> list[str]:
        return ["--judge-base-url", server.base_url, "--judge-model", "m", "--quality", "judge"]

    verdicts = tmp_path / "run" / "round-1" / "verdicts.jsonl"
    with chat_server(dies) as server:
        broken = train(*judge(server))
    assert broken.status == 2
    assert "Traceback" not in broken.err
    lines_before = read_lines(verdicts)
    assert lines_before
    with chat_server(prefers_the_shorter) as server:
        assert train(*judge(server)).status == 0
    assert read_lines(verdicts)[: len(lines_before)] == lines_before
    answers = read_lines(tmp_path / "run" / "round-1" / "answers.jsonl")
    lengths = {(line["prompt"], line["number"]): len(line["answer"].strip()) for line in answers}
    for grade in read_lines(tmp_path / "run" / "round-1" / "grades.jsonl"):
        excess = lengths[grade["prompt"], grade["number"]] - lengths[grade["prompt"], "baseline"]
        expected = 0.5 if excess == 0 else float(excess < 0)
        if excess or grade["number"] == "baseline":
            assert grade["grade"] == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"prompt": "?", "number": 0, "grade": 1}, "no answer has prompt '?' and number 0"),
        ({"grade": "good"}, "the grade 'good' is no finite number"),
        ({"grade": None}, "the grade None is no finite number"),
        ({"grade": True}, "the grade True is no finite number"),
        ({"grade": float("inf")}, "the grade inf is no finite number"),
        ({}, "a second grade of prompt "),
    ],
)
def test_a_wrong_grade_is_told_with_its_line(line: Any, complaint: str, tmp_path: Path) -> None:
    answers: dict[GradeKey, str] = {("p", "baseline"): "Yes.", ("p", 0): "No."}
    first = {"prompt": "p", "number": "baseline", "grade": 1}
    grades = tmp_path / "grades.jsonl"
    second = {"prompt": "p", "number": 0} | line if line else first
    grades.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    with pytest.raises(PastaError, match=re.escape(f"{grades}:2: {complaint}")):
        read_grades(grades, answers, tmp_path / "answers.jsonl")


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (["--lambda", "nan"], "greater than or equal to 0"),
        (["--samples-from", "nowhere"], "pasta: cannot read nowhere/config.json"),
        (["--engine", "llama"], "pasta: the llama engine needs llama-cpp-python"),
        (["--policy", ""], "pasta: --policy is missing"),
        (["--quality", ""], "pasta: --quality is missing"),
        (["--quality", "checks"], "no prompt has `checks`, which --quality checks grades by"),
        (["--quality", "judge"], "pasta: --judge-base-url is missing"),
        (["--quality", "grades.jsonl", "--rounds", "2"], "a file of grades is for one round"),
        (["--engine", "remote"], "was not trained for the join text, under which stage 2"),
        (["--pairs", "x"], "sampled with --pairs: leave out prompts, baseline, engine, quality"),
    ],
)
def test_what_cannot_work_is_told_in_a_line(wrong: list[str], complaint: str, train: Pasta) -> None:
    outcome = train(*wrong)
    assert (outcome.status, outcome.out) == (2, "")
    assert complaint in outcome.err
