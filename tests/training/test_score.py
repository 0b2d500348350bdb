"""Best and worst of a prompt: what may win, what may not, and by which scale terms are added."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from pasta_decoding.answer.text import tree_of
from pasta_decoding.data.rows import question_of
from pasta_decoding.lang.layout import ChunkRun, MainRun, PromiseRun, Segment, SyncRun
from pasta_decoding.lang.tree import read, strip, text_form
from pasta_decoding.training.sample import Sample, decode_sample, encode_sample
from pasta_decoding.training.score import (
    QUALITY_SPREAD,
    PreferencePair,
    ScoreParts,
    baseline_tokens,
    choose_pairs,
    measure,
    raw_scores,
    score_parts,
)
from tests.law import world

ASKED = question_of("?")
SPACED = replace(world.VOCABULARY, decode=lambda ids: "".join(f"w{token} " for token in ids))


def flat(_instruction: str, texts: Sequence[str]) -> list[float]:
    """All texts are equally good."""
    return [0.0] * len(texts)


def sample(number: int, bodies: list[list[int]], *, prompt: str = "p", steps: int = 50) -> Sample:
    """An answer of nothing but chunks, given by their word ids."""
    segments: list[Segment] = []
    for body in bodies:
        topic = body[0]
        segments.append(PromiseRun((world.OPEN, topic, world.P20), 20))
        segments.append(ChunkRun((world.ASYNC, *body)))
    return Sample(
        prompt=prompt,
        number=number,
        seed=0,
        prompt_ids=(11, 12),
        segments=tuple(segments),
        end=world.END,
        annotated=text_form(tree_of(segments, SPACED)),
        plain_tokens=sum(map(len, bodies)),
        critical_path=steps,
        truncated=False,
    )


def part(number: int, tokens: int, steps: int, **changes: Any) -> ScoreParts:
    plain: dict[str, Any] = {"prompt": "p", "new_tokens": tokens, "quality": 0.0}
    plain |= {"plain_tokens": tokens, "critical_path": steps, "finished": True, "sound": True}
    scored = ScoreParts(number=number, **plain | changes)
    return replace(scored, sound=scored.sound and scored.finished)


def ranked(parts: list[ScoreParts], lambda_: float | None = 0.0, baseline: int = 100) -> list[int]:
    """Return the numbers of the answers, the best first."""
    scores = raw_scores(parts, {"p": baseline}, lambda_)
    return [parts[index].number for index in scores.argsort()[::-1]]


def pairs_of(samples: list[Sample], parts: list[ScoreParts]) -> list[PreferencePair]:
    """Choose pairs by efficiency alone."""
    prompts = {part.prompt for part in parts}
    return choose_pairs(samples, parts, list(raw_scores(parts, dict.fromkeys(prompts, 100.0), 0)))


SLOW = part(0, 100, 100, quality=-1.0)
FAST = part(1, 100, 10, quality=-2.0)


@pytest.mark.parametrize(
    ("parts", "lambda_", "best"),
    [
        # A short answer does not win by being short: 100 tokens in 8 steps would be far the most.
        ([part(0, 10, 8), part(1, 100, 50)], 0.0, 1),
        # Text beyond the baseline's length earns nothing.
        ([part(0, 300, 75), part(1, 100, 40)], 0.0, 1),
        # Infinity is quality alone.
        ([SLOW, FAST], None, 0),
        ([SLOW, FAST], 0.0, 1),
    ],
)
def test_what_wins(parts: list[ScoreParts], lambda_: float | None, best: int) -> None:
    assert ranked(parts, lambda_)[0] == best


def test_ten_chunks_that_say_the_same_lose_to_one() -> None:
    """The same critical path, and ten times the text; but none of it new."""
    body = list(range(20, 40))
    other = [[20 + 2 * n, 21 + 2 * n, 50 + n] for n in range(10)]
    answers = [sample(0, [body] * 10), sample(1, [body]), sample(2, other)]
    parts = measure(ASKED, answers, flat)
    assert [score_part.new_tokens for score_part in parts] == [20, 20, 30]
    assert parts[0].quality == pytest.approx(-2.0 * 9 / 10)
    # The repeats' promises take steps of the main thread, about four each.
    parts[0] = replace(parts[0], critical_path=50 + 9 * 4)
    assert ranked(parts, baseline=200) == [2, 1, 0]


def test_repeated_runs_of_words_and_chunks_that_echo_the_main_text_are_no_text_either() -> None:
    (echo,) = measure(ASKED, [sample(0, [[20, 21, 22, 23] * 5])], flat)
    assert echo.new_tokens == round(20 * 4 / 17)
    answer = sample(0, [list(range(20, 30)), [40, 41, 42]])
    echoed = replace(answer, annotated=strip(read(answer.annotated))[:30] + answer.annotated)
    parts = measure(ASKED, [answer, echoed], flat)
    assert parts[1].new_tokens < parts[0].new_tokens == 13
    assert [part.quality for part in parts] == pytest.approx([0, -1])


def test_an_answer_is_sound_if_it_ends_and_has_no_empty_item() -> None:
    plain = replace(sample(0, [[20, 21]]), annotated="Four words are here.", segments=())
    scaffold = replace(plain, annotated="1. 1. 1.")
    answers = [plain, scaffold, replace(plain, truncated=True)]
    assert [part.sound for part in measure(ASKED, answers, flat)] == [True, False, False]


def test_promises_get_the_lengths_that_their_chunks_came_to() -> None:
    """Of a chunk that was cut, and of a promise that was forced, nothing is known."""
    control = world.VOCABULARY.control
    promise, chunk = sample(0, [list(range(20, 60))]).segments
    assert isinstance(promise, PromiseRun)
    assert isinstance(chunk, ChunkRun)
    cut = replace(chunk, closed=False)
    forced = replace(promise, forced=1)
    original = replace(sample(0, []), segments=(promise, chunk, promise, cut, forced, chunk))
    changed = original.with_true_lengths(control).segments
    true = control.bucket(40)
    assert true != promise.promised
    assert changed[0] == PromiseRun((*promise.ids[:-1], control.promise_close[true]), true)
    assert changed[1:] == (chunk, promise, cut, forced, chunk)


def test_files_of_samples_keep_their_words_for_segments() -> None:
    promise, chunk = sample(0, [[20, 21]]).segments
    segments = (MainRun((20,)), promise, chunk, SyncRun(world.SYNC))
    original = replace(sample(0, []), segments=segments)
    line = encode_sample(original)
    kinds = [segment["kind"] for segment in line["segments"]]
    assert kinds == ["Run", "PromiseRun", "ChunkRun", "SyncRun"]
    assert decode_sample(line) == original


def test_what_a_limit_cut_is_the_worst_as_often_as_it_was_sampled() -> None:
    samples = []
    parts = []
    for prompt in (f"p{number}" for number in range(400)):
        samples += [replace(sample(n, [[20 + n]]), prompt=prompt) for n in range(4)]
        answers = (
            part(0, 100, 20, finished=False),
            part(1, 100, 60),
            part(2, 100, 50),
            part(3, 100, 55),
        )
        parts += [replace(answer, prompt=prompt) for answer in answers]
    pairs = pairs_of(samples, parts)
    assert {(pair.best, pair.worst, pair.candidates) for pair in pairs} == {(2, 0, 4), (2, 1, 3)}
    assert sum(pair.worst == 0 for pair in pairs) / 400 == pytest.approx(1 / 4, abs=0.05)


CUT = part(0, 100, 20, finished=False)


@pytest.mark.parametrize(
    ("words", "parts", "expected"),
    [
        ([20, 21, 22], [part(0, 100, 20, sound=False), part(1, 100, 50), part(2, 100, 60)], 1),
        ([20, 21, 22], [CUT, part(1, 100, 50), part(2, 100, 200, finished=False)], 1),
        ([20, 21], [CUT, part(1, 100, 50, finished=False)], None),
        ([20, 30], [part(0, 100, 50), part(1, 100, 50)], None),  # a tie
        ([20, 30], [part(0, 100, 50), part(1, 100, 40)], 1),
        ([20, 20], [part(0, 100, 50), part(1, 100, 40)], None),  # the same text
        ([20], [part(0, 100, 50)], None),
    ],
)
def test_the_best_is_sound_and_what_teaches_nothing_makes_no_pair(
    words: list[int], parts: list[ScoreParts], expected: int | None
) -> None:
    samples = [sample(number, [[word]]) for number, word in enumerate(words)]
    assert [pair.best for pair in pairs_of(samples, parts)] == ([] if expected is None else [1])


def test_lambda_two_weighs_speed_and_quality_alike() -> None:
    """Quality in any unit: its spread within prompts decides, not what it is counted in."""
    parts = [
        part(0, 100, 100, quality=-30.0),
        part(1, 100, 50, quality=-10.0),
        part(2, 100, 25, quality=-70.0, finished=False),
        part(3, 100, 80, prompt="q", quality=500.0),
    ]
    # Finished in p: efficiencies 1 and 2, qualities -30 and -10: spreads 1/2 and 10; q has none.
    scale = QUALITY_SPREAD * 0.5 / 10
    baseline = {"p": 100.0, "q": 100.0}
    scores = raw_scores(parts, baseline, 2.0)
    assert scores[:2].tolist() == pytest.approx([1 - 2 * scale * 30, 2 - 2 * scale * 10])
    assert 2 * scale * 20 == pytest.approx(2 - 1)
    # Where all are equally fast, quality stays as it is.
    parts = [part(0, 100, 50, quality=3.0), part(1, 100, 50, quality=4.0)]
    assert raw_scores(parts, baseline, None).tolist() == [3.0, 4.0]
    assert raw_scores([CUT], baseline, None).tolist() == [0.0]


def test_length_control_takes_the_slope_over_length_out_of_the_scores() -> None:
    """Here every score is a function of length alone, within the band: nothing is left of it."""
    parts = [
        part(n, tokens, 50, new_tokens=50, quality=-math.log(tokens))
        for n, tokens in enumerate([80, 100, 125])
    ]
    raw = raw_scores(parts, {"p": 100}, None)
    assert raw[0] > raw[2]
    controlled = score_parts(parts, {"p": 100}, None)
    assert controlled == pytest.approx([fmean(controlled)] * 3)
    # Far shorter answers get no more of it than half as long ones.
    parts = [part(n, t, 50, quality=float(t)) for n, t in enumerate([2, 50, 100, 150, 200])]
    raw = raw_scores(parts, {"p": 100}, None)
    controlled = score_parts(parts, {"p": 100}, None)
    assert controlled[0] - raw[0] == pytest.approx(controlled[1] - raw[1])


def test_the_baselines_tokens_are_the_median_of_its_finished_answers() -> None:
    def of(prompt: str, tokens: int, *, truncated: bool = False) -> Sample:
        answer = sample(0, [list(range(20, 20 + tokens))], prompt=prompt)
        return replace(answer, truncated=truncated)

    answers = [of("a", 10), of("a", 20), of("a", 60, truncated=True), of("b", 50, truncated=True)]
    assert baseline_tokens(answers) == {"a": 15, "b": 15}
    assert baseline_tokens([of("b", 50, truncated=True)]) == {"b": 50}
