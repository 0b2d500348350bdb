"""Best and worst of a prompt: what may win, what may not, and by which scale terms are added."""

import math
from dataclasses import replace
from typing import Any

import pytest

from pasta_decoding.answer.text import tree_of
from pasta_decoding.data.rows import question_of
from pasta_decoding.lang.layout import ChunkRun, MainRun, PromiseRun, Segment, SyncRun
from pasta_decoding.lang.tree import text_form
from pasta_decoding.training.sample import Sample, decode_sample, encode_sample
from pasta_decoding.training.score import (
    PreferencePair,
    ScoreParts,
    choose_pairs,
    measure,
    score_parts,
)
from tests.law import world

ASKED = question_of("?")
SPACED = replace(world.VOCABULARY, decode=lambda ids: "".join(f"w{token} " for token in ids))


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
    """An answer as good as the baseline's, which has 100 tokens and the quality 0."""
    fields: dict[str, Any] = {
        "prompt": "p",
        "plain_tokens": tokens,
        "critical_path": steps,
        "quality": 0.0,
        "baseline_quality": 0.0,
        "baseline_tokens": 100,
        "finished": True,
        "sound": True,
    }
    scored = ScoreParts(number=number, **fields | changes)
    return replace(scored, sound=scored.sound and scored.finished)


def ranked(parts: list[ScoreParts], lambda_: float | None = 0.0) -> list[int]:
    """Return the numbers of the answers, the best first."""
    scores = score_parts(parts, lambda_, half_grade=0.5)
    order = sorted(zip(scores, parts, strict=True), key=lambda scored: -(scored[0] or 0.0))
    return [scored_part.number for _, scored_part in order]


def pairs_of(samples: list[Sample], parts: list[ScoreParts]) -> list[PreferencePair]:
    """Choose pairs by speed alone."""
    return choose_pairs(samples, parts, score_parts(parts, 0.0, half_grade=0.5))


@pytest.mark.parametrize(
    ("parts", "lambda_", "best"),
    [
        # The fewer steps, the better.
        ([part(0, 100, 100), part(1, 100, 60)], 0.0, 1),
        # Text beyond the baseline's length costs.
        ([part(0, 300, 60), part(1, 100, 70)], 0.0, 1),
        # An answer that is worse than the baseline's by more than half a grade earns no speed.
        ([part(0, 100, 60, quality=-0.6), part(1, 100, 90)], 0.0, 1),
        ([part(0, 100, 60, quality=-0.4), part(1, 100, 90)], 0.0, 0),
        # Beyond twice the speed, quality decides.
        ([part(0, 100, 10, quality=0.1), part(1, 100, 40, quality=0.2)], 1.0, 1),
        # Infinity is quality alone.
        ([part(0, 100, 100, quality=1.0), part(1, 100, 10)], None, 0),
    ],
)
def test_what_wins(parts: list[ScoreParts], lambda_: float | None, best: int) -> None:
    assert ranked(parts, lambda_)[0] == best


def test_a_score_by_hand() -> None:
    """Deviations within the prompt are -1, 0 and 1, so q is the quality over sqrt(2/3)."""
    parts = [
        part(0, 100, 80, quality=1.0),
        part(1, 200, 80, quality=2.0),
        part(2, 100, 80, quality=3.0),
    ]
    scores = score_parts(parts, 2.0, half_grade=0.5)
    speed = math.log(100 / 80)
    deviation = math.sqrt(2 / 3)
    length_cost = 0.5 * (math.log(2) - 0.1)
    expected = [2 * 1 / deviation, 2 * 2 / deviation - length_cost, 2 * 3 / deviation]
    assert scores == pytest.approx([term + speed for term in expected])


def test_an_answer_without_a_grade_has_no_score_and_is_in_no_pair() -> None:
    samples = [sample(number, [[20 + number]]) for number in range(3)]
    parts = [part(0, 100, 10, quality=None), part(1, 100, 50), part(2, 100, 90)]
    assert score_parts(parts, 1.0, half_grade=0.5)[0] is None
    assert [(pair.best, pair.worst) for pair in pairs_of(samples, parts)] == [(1, 2)]


@pytest.mark.parametrize(
    ("annotated", "sound"),
    [
        ("Four words are here.", True),
        ("", False),
        ("1. 1. 1.", False),
        ("again and again and again and again and again and again", False),
        (
            'It is: <promise topic="a" tokens="10"/><async>The sea is deep and blue.</async> '
            '<promise topic="b" tokens="10"/><async>The sea is deep and blue.</async>',
            False,
        ),
    ],
)
def test_an_answer_is_sound_if_it_ends_loops_nowhere_and_has_no_seam(
    annotated: str, sound: bool
) -> None:
    answer = replace(sample(0, [[20, 21]]), annotated=annotated, segments=())
    cut = replace(answer, truncated=True)
    parts = measure(ASKED, [answer, cut], answer, [0.0, 0.0], 0.0)
    assert [scored_part.sound for scored_part in parts] == [sound, False]


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
    assert {(pair.best, pair.worst, pair.worst_of) for pair in pairs} == {(2, 0, 4), (2, 1, 3)}
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
