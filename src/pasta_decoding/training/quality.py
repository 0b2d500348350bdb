"""Grades of sampled answers: the quality term of the score.

A grade belongs to a prompt and the number of a sample, or `baseline` for the baseline's greedy
answer. Larger is better. The sources:

    judge        P(the answer is preferred to the baseline's), by a model behind an endpoint
    checks       share of the prompt's checks that the answer passes; none for prompts without
    FILE         grades by anybody, one JSON object a line: prompt, number, grade
    likelihood   ln p a token under the baseline's model: a guard against broken text, which agrees
                 with people in about half of all pairs (docs/log.md)
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pasta_decoding.data.checks import Check, share_passed
from pasta_decoding.data.endpoint import Endpoint
from pasta_decoding.data.judge import AnswerPair, judge_pairs
from pasta_decoding.data.lines import read_lines, write_lines
from pasta_decoding.data.rows import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.lang import measures
from pasta_decoding.lang.layout import MainRun, lay_out
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import read, strip
from pasta_decoding.models.catalog import ModelSource
from pasta_decoding.models.load import default_device, load_model, native_dtype
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.models.template import Message
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.loop import processes
from pasta_decoding.training.run import tracked
from pasta_decoding.training.sample import JsonLine, Sample, grow
from pasta_decoding.training.view import score_layouts

BASELINE = "baseline"
"""Stands for a number in grades: the baseline's answer."""
_HALF_GRADES = {"judge": 0.05, "checks": 0.05, "likelihood": 0.05}
_HALF_GRADE_OF_FILES = 0.5

GradeKey = tuple[str, int | str]
"""(id of the prompt, number of the sample or `BASELINE`)"""
Grades = Mapping[GradeKey, float | None]
"""None: the source has no verdict on the answer."""
Answers = Mapping[GradeKey, str]
"""The plain texts to be graded."""
Rate = Callable[[str, Sequence[str]], Sequence[float]]
"""(instruction, plain texts) -> the quality of each text."""

REP_4_COST = 4.0
"""Quality, in nats per token, that a text loses if all its runs of four words are repeated.

A new token costs a model about two nats, a repeated one almost none. A share r of repetitions thus
raises the likelihood by about 2 r, and the penalty must be larger.
"""


def half_grade(source: str) -> float:
    """Return half the smallest difference that counts, in the unit of the source."""
    return _HALF_GRADES.get(source, _HALF_GRADE_OF_FILES)


def answers_to_grade(baseline: Iterable[Sample], samples: Iterable[Sample]) -> dict[GradeKey, str]:
    """Return the plain text of each answer; those to one prompt are neighbours."""
    answers: dict[GradeKey, str] = {}
    samples_by_prompt: dict[str, list[Sample]] = {}
    for sample in samples:
        samples_by_prompt.setdefault(sample.prompt, []).append(sample)
    for baseline_answer in baseline:
        prompt = baseline_answer.prompt
        answers[prompt, BASELINE] = strip(read(baseline_answer.annotated))
        for sample in samples_by_prompt.get(prompt, []):
            answers[prompt, sample.number] = strip(read(sample.annotated))
    return answers


def encode_grade(item: tuple[GradeKey, float | None]) -> dict[str, Any]:
    """Return a grade as the line of a file; `decode_grade` is the inverse."""
    (prompt, number), grade = item
    return {"prompt": prompt, "number": number, "grade": grade}


def decode_grade(line: Mapping[str, Any]) -> tuple[GradeKey, float | None]:
    return (line["prompt"], line["number"]), line["grade"]


def write_answers(path: Path, answers: Answers, questions: Mapping[str, Question]) -> None:
    """Write the answers for whoever grades them, one JSON object a line."""
    lines = [
        {
            "prompt": prompt,
            "number": number,
            "instruction": questions[prompt].instruction,
            "answer": answer,
        }
        for (prompt, number), answer in answers.items()
    ]
    write_lines(path, lines)


def read_grades(path: Path, answers: Answers, answers_path: Path) -> dict[GradeKey, float | None]:
    """Read a file of grades.

    answers_path: where the answers stand, for the error that waits for their grades.

    Raises PastaError with the line of a grade that is no finite number, belongs to no answer, or is
    there twice, and PastaError if an answer has no grade yet.
    """
    grades: dict[GradeKey, float | None] = {}
    for line_number, line in enumerate(read_lines(path, hint="Mend the line."), start=1):
        where = f"{path}:{line_number}"
        key: Any = (line.get("prompt"), line.get("number"))
        grade: Any = line.get("grade")
        if key not in answers:
            raise PastaError(f"{where}: no answer has prompt {key[0]!r} and number {key[1]!r}")
        if key in grades:
            raise PastaError(f"{where}: a second grade of prompt {key[0]!r}, number {key[1]!r}")
        if (
            isinstance(grade, bool)
            or not isinstance(grade, int | float)
            or not math.isfinite(grade)
        ):
            raise PastaError(f"{where}: the grade {grade!r} is no finite number")
        grades[key] = float(grade)
    missing = len(answers.keys() - grades.keys())
    if missing:
        raise PastaError(
            f"waiting for {path}: {missing} of {len(answers)} answers have no grade there",
            hint=f"Grade the answers in {answers_path}, one line each: prompt, number, grade. "
            "Then give the same command again.",
        )
    return grades


def judge_grades(
    endpoint: Endpoint,
    answers: Answers,
    questions: Mapping[str, Question],
    path: Path,
    progress: Callable[[int], object],
) -> dict[GradeKey, float | None]:
    """Return P(preferred to the baseline's answer) of each answer; the baseline's is a half.

    path: file of the judge's replies. Raises EndpointError, as `judge_pairs` does.
    """
    samples = [key for key in answers if key[1] != BASELINE]
    pairs = [
        AnswerPair(
            id=prompt,
            instruction=questions[prompt].instruction,
            answer=answers[prompt, number],
            rival=answers[prompt, BASELINE],
        )
        for prompt, number in samples
    ]
    preferences = judge_pairs(endpoint, pairs, path, progress=progress)
    grades: dict[GradeKey, float | None] = {key: 0.5 for key in answers if key[1] == BASELINE}
    for key, preference in zip(samples, preferences, strict=True):
        grades[key] = preference.probability
    return grades


def check_grades(
    checks: Mapping[str, Sequence[Check]], answers: Answers
) -> dict[GradeKey, float | None]:
    """Return the share of checks that each answer passes; None if its prompt has no checks."""
    return {
        (prompt, number): share_passed(checks[prompt], answer) if prompt in checks else None
        for (prompt, number), answer in answers.items()
    }


def likelihood_rate(source: ModelSource, *, dtype: str, device: str = "cpu") -> Rate:
    """Load a model, and return a function that rates plain texts.

    A rating is the mean log-probability per token in nats, less the cost of repetitions.
    """
    loaded = load_model(source, dtype=dtype)
    loaded.model.to(device).eval()
    control = loaded.checkpoint.control
    scheme = scheme_named(loaded.checkpoint.scheme)
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=control.ids)

    def rate(instruction: str, texts: Sequence[str]) -> list[float]:
        prompt = encoder.encode([Message("user", instruction)])
        runs = [MainRun(tuple(encoder.encode_text(text)) if text else ()) for text in texts]
        layouts = [
            lay_out(prompt, [run], scheme, async_close=control.async_close, end=loaded.end)
            for run in runs
        ]
        logprobs_by_text = score_layouts(loaded.model, layouts)
        return [
            float(logprobs_L.mean()) - REP_4_COST * measures.rep_4(text)
            for logprobs_L, text in zip(logprobs_by_text, texts, strict=True)
        ]

    return rate


@dataclass(frozen=True, slots=True)
class Grader:
    """Grades the answers of a round, whose files are in `folder`.

    baseline: the model whose likelihood grades, if the source is `likelihood`.
    judge:    its endpoint, if the source is `judge`.
    checks:   those of each prompt that has some, if the source is `checks`.
    """

    config: PreferenceConfig
    baseline: ModelSource
    folder: Path
    judge: Endpoint | None
    checks: Mapping[str, Sequence[Check]]

    def grade(
        self, prompts: Sequence[Question], baseline: Sequence[Sample], samples: Sequence[Sample]
    ) -> Grades:
        """Return the grades of all answers, and write them to `grades.jsonl`.

        The main process grades, and the others read its file; only likelihoods are shared out.
        Raises PastaError if grades are missing, and EndpointError if the judge is down.
        """
        questions = {prompt.id: prompt for prompt in prompts}
        answers = answers_to_grade(baseline, samples)
        path = self.folder / "grades.jsonl"
        if self.config.quality == "likelihood":
            return self._likelihoods(path, answers, questions)
        distributed_state = processes()
        if distributed_state.is_main_process:
            grades = self._grades_of_source(answers, questions)
            write_lines(path, map(encode_grade, grades.items()))
        distributed_state.wait_for_everyone()
        return dict(map(decode_grade, read_lines(path)))

    def _grades_of_source(self, answers: Answers, questions: Mapping[str, Question]) -> Grades:
        answers_path = self.folder / "answers.jsonl"
        write_answers(answers_path, answers, questions)
        if self.config.quality == "checks":
            return check_grades(self.checks, answers)
        if self.config.quality != "judge":
            return read_grades(Path(self.config.quality), answers, answers_path)
        assert self.judge is not None, "a judge has an endpoint"
        comparisons = 2 * (len(answers) - len(questions))
        with tqdm(desc="judging", total=comparisons) as bar:
            verdicts = self.folder / "verdicts.jsonl"
            return judge_grades(self.judge, answers, questions, verdicts, bar.update)

    def _likelihoods(
        self, path: Path, answers: Answers, questions: Mapping[str, Question]
    ) -> Grades:
        """Grade by likelihood. The processes share the work, and resume it."""

        def grade_missing(missing: Sequence[GradeKey]) -> Iterator[JsonLine]:
            device = self.config.device or default_device()
            rate = likelihood_rate(self.baseline, dtype=native_dtype(device), device=device)
            groups = {prompt: list(keys) for prompt, keys in groupby(missing, itemgetter(0))}
            for prompt, keys in tracked(groups.items(), "scoring", len(groups)):
                texts = [answers[key] for key in keys]
                ratings = rate(questions[prompt].instruction, texts)
                for item in zip(keys, ratings, strict=True):
                    yield encode_grade(item)

        return dict(map(decode_grade, grow(path, list(answers), grade_missing)))
