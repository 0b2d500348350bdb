"""Best and worst of a prompt: what may win, what may not, and by which scale terms are added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pasta_decoding.data.questions import question_of
from pasta_decoding.lang.layout import ChunkRun, PromiseRun, Segment
from pasta_decoding.lang.tree import read, show, strip
from pasta_decoding.runtime.text import tree_of
from pasta_decoding.training.sample import Sample, decode_sample, encode_sample
from pasta_decoding.training.score import (
    QUALITY_SPREAD,
    Quality,
    ScoreParts,
    Scores,
    baseline_tokens,
    centre,
    choose_pairs,
    efficiency_of,
    measure,
    score_parts,
)
from tests.law import world

FLAT = Quality("flat", lambda _instruction, texts: [0.0] * len(texts), idle_cost=2.0)
ASKED = question_of("?")


def by_speed(parts: Sequence[ScoreParts], baseline: dict[str, float]) -> Scores:
    """Score by efficiency alone."""
    return score_parts(parts, baseline, 0.0, length_control=False)


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
        annotated=show(tree_of(segments, SPACED)),
        plain_tokens=sum(map(len, bodies)),
        critical_path=steps,
        truncated=False,
        hit_limit=False,
        interventions=0,
        fed_tokens=sum(map(len, bodies)),
    )


SPACED = replace(world.VOCABULARY, decode=lambda ids: "".join(f"w{token} " for token in ids))


def part(number: int, tokens: int, steps: int, **changes: object) -> ScoreParts:
    plain = ScoreParts(
        prompt="p",
        number=number,
        plain_tokens=tokens,
        new_tokens=tokens,
        critical_path=steps,
        chunks=2,
        repeated_chunks=0,
        idle_chunks=0,
        rep_4=0.0,
        quality=0.0,
        finished=True,
        sound=True,
        hit_limit=False,
    )
    changed = replace(plain, **changes)  # type: ignore[arg-type]
    return replace(changed, sound=changed.sound and changed.finished)


def best_of(parts: list[ScoreParts], lambda_: float | None = 0.0, *, baseline: float = 100) -> int:
    scores = score_parts(parts, {"p": baseline}, lambda_, length_control=False)
    return max(scores.scored, key=lambda one: one.score).part.number


def test_efficiency_is_the_baselines_tokens_a_step() -> None:
    assert efficiency_of(part(0, 200, 50), 100) == 2
    assert efficiency_of(part(0, 0, 0), 100) == 0


def test_a_short_answer_does_not_win_by_being_short() -> None:
    """Ten tokens in eight steps: the bare quotient of 100 and 8 would be by far the largest."""
    assert best_of([part(0, 10, 8), part(1, 100, 50)]) == 1


def test_nor_does_length_control_let_it_win() -> None:
    """Among answers of usual lengths, of which the longer ones bring a little more a step."""
    usual = [part(n + 1, t, round(t / (1.8 + t / 500))) for n, t in enumerate(range(70, 140, 10))]
    short = part(0, 10, 8)
    scores = score_parts([short, *usual], {"p": 100}, 0.0)
    assert scores.length_slope > 0
    assert min(scores.scored, key=lambda one: one.score).part.number == 0


def test_text_beyond_the_baselines_length_earns_nothing() -> None:
    assert best_of([part(0, 300, 75), part(1, 100, 40)]) == 1


def test_ten_chunks_that_say_the_same_lose_to_one() -> None:
    """The same critical path, and ten times the text; but none of it new."""
    body = list(range(20, 40))
    repeated = sample(0, [body] * 10)
    single = sample(1, [body])
    other = sample(2, [[20 + 2 * n, 21 + 2 * n, 50 + n] for n in range(10)])
    parts = measure(ASKED, [repeated, single, other], FLAT)
    assert [one.repeated_chunks for one in parts] == [9, 0, 0]
    assert [one.new_tokens for one in parts] == [20, 20, 30]
    assert parts[0].quality == pytest.approx(-2.0 * 9 / 10)
    # The repeats' promises take steps of the main thread, about four each.
    parts[0] = replace(parts[0], critical_path=50 + 9 * 4)
    scores = by_speed(parts, {"p": 200})
    ranked = sorted(scores.scored, key=lambda one: one.score)
    assert [one.part.number for one in ranked] == [0, 1, 2]


def test_repeated_runs_of_words_are_no_text_either() -> None:
    (one,) = measure(ASKED, [sample(0, [[20, 21, 22, 23] * 5])], FLAT)
    assert one.rep_4 == pytest.approx(1 - 4 / 17)
    assert one.new_tokens == round(20 * 4 / 17)


def test_a_chunk_that_echoes_the_main_text_is_no_text() -> None:
    body = list(range(20, 30))
    one = sample(0, [body, [40, 41, 42]])
    echoed = replace(one, annotated=strip(read(one.annotated))[:30] + one.annotated)
    parts = measure(ASKED, [one, echoed], FLAT)
    assert [part.idle_chunks for part in parts] == [0, 1]
    assert [part.repeated_chunks for part in parts] == [0, 0]
    assert parts[1].new_tokens < parts[0].new_tokens == 13
    assert [part.quality for part in parts] == pytest.approx([0, -1])


def test_an_answer_is_sound_if_it_ends_and_has_no_empty_item() -> None:
    plain = replace(sample(0, [[20, 21]]), annotated="Four words are here.", segments=())
    scaffold = replace(plain, annotated="1. 1. 1.")
    answers = [plain, scaffold, replace(plain, truncated=True)]
    assert [part.sound for part in measure(ASKED, answers, FLAT)] == [True, False, False]


def test_an_unsound_answer_is_never_the_best() -> None:
    samples = [sample(n, [[20 + n]]) for n in range(3)]
    parts = [part(0, 100, 20, sound=False), part(1, 100, 50), part(2, 100, 60)]
    (pair,) = choose_pairs(samples, by_speed(parts, {"p": 100}))
    assert pair.best == 1


def test_promises_get_the_lengths_that_their_chunks_came_to() -> None:
    """Of a chunk that was cut, and of a promise that was forced, nothing is known."""
    control = world.VOCABULARY.control
    promise, chunk = sample(0, [list(range(20, 60))]).segments
    assert isinstance(promise, PromiseRun)
    assert isinstance(chunk, ChunkRun)
    cut = replace(chunk, closed=False)
    forced = replace(promise, forced=1)
    one = replace(sample(0, []), segments=(promise, chunk, promise, cut, forced, chunk))
    changed = one.with_true_lengths(control).segments
    true = control.bucket(40)
    assert true != promise.promised
    assert changed[0] == PromiseRun((*promise.ids[:-1], control.promise_close[true]), true)
    assert changed[1:] == (chunk, promise, cut, forced, chunk)


def test_what_a_limit_cut_is_the_worst_as_often_as_it_was_sampled() -> None:
    prompts = [f"p{number}" for number in range(400)]
    samples, parts = [], []
    for prompt in prompts:
        samples += [replace(sample(n, [[20 + n]]), prompt=prompt) for n in range(4)]
        cut = part(0, 100, 20, finished=False), part(1, 100, 60), part(2, 100, 50), part(3, 100, 55)
        parts += [replace(one, prompt=prompt) for one in cut]
    pairs = choose_pairs(samples, by_speed(parts, dict.fromkeys(prompts, 100.0)))
    assert {(pair.best, pair.worst, pair.candidates) for pair in pairs} == {(2, 0, 4), (2, 1, 3)}
    assert sum(pair.worst == 0 for pair in pairs) / 400 == pytest.approx(1 / 4, abs=0.05)


def test_what_a_limit_cut_is_never_the_best_and_the_worst_beside_a_single_finished_answer() -> None:
    samples = [sample(n, [[20 + n]]) for n in range(3)]
    parts = [part(0, 100, 20, finished=False), part(1, 100, 50), part(2, 100, 200, finished=False)]
    (pair,) = choose_pairs(samples, by_speed(parts, {"p": 100}))
    assert (pair.best, pair.worst, pair.candidates) == (1, 2, 3)
    cut = [replace(one, finished=False, sound=False) for one in parts]
    assert choose_pairs(samples, by_speed(cut, {"p": 100})) == []


def pairs_of(samples: list[Sample], scores: Scores) -> int:
    return len(choose_pairs(samples, scores))


def test_ties_are_skipped() -> None:
    parts = [part(0, 100, 50), part(1, 100, 50)]
    different = [sample(0, [[20]]), sample(1, [[30]])]
    same = [sample(0, [[20]]), sample(1, [[20]])]
    assert pairs_of(different, by_speed(parts, {"p": 100})) == 0
    parts[1] = part(1, 100, 40)
    assert pairs_of(different, by_speed(parts, {"p": 100})) == 1
    assert pairs_of(same, by_speed(parts, {"p": 100})) == 0
    assert pairs_of(different[:1], by_speed(parts[:1], {"p": 100})) == 0


def test_infinity_is_quality_alone() -> None:
    slow = part(0, 100, 100, quality=-1.0)
    fast = part(1, 100, 10, quality=-2.0)
    assert best_of([slow, fast], None) == 0
    assert best_of([slow, fast], 0.0) == 1


def test_lambda_two_weighs_speed_and_quality_alike() -> None:
    """Quality in any unit: its spread within prompts decides, not what it is counted in."""
    parts = [
        part(0, 100, 100, quality=-30.0),
        part(1, 100, 50, quality=-10.0),
        part(2, 100, 25, quality=-70.0, finished=False),
        part(3, 100, 80, prompt="q", quality=500.0),
    ]
    scores = score_parts(parts, {"p": 100, "q": 100}, 2.0, length_control=False)
    # Finished in p: efficiencies 1 and 2, qualities -30 and -10: spreads 1/2 and 10; q has none.
    assert scores.quality_scale == pytest.approx(QUALITY_SPREAD * 0.5 / 10)
    assert 2 * scores.quality_scale * 20 == pytest.approx(2 - 1)


def test_equal_qualities_or_efficiencies_leave_the_scale_alone() -> None:
    scores = by_speed([part(0, 100, 50), part(1, 100, 40)], {"p": 100})
    assert scores.quality_scale == 1


def test_length_control_takes_the_slope_over_length_out_of_the_scores() -> None:
    """Here every score is a function of length alone, within the band: nothing is left of it."""
    lengths = [80, 100, 125]
    parts = [
        part(n, tokens, 50, new_tokens=50, quality=-math.log(tokens))
        for n, tokens in enumerate(lengths)
    ]
    free = score_parts(parts, {"p": 100}, None, length_control=False)
    held = score_parts(parts, {"p": 100}, None)
    assert free.scored[0].score > free.scored[2].score
    finished = [one.part for one in held.scored]
    assert centre(finished, [one.score for one in held.scored]) == pytest.approx([0, 0, 0])
    assert held.length_slope < 0


def test_far_shorter_answers_get_no_more_of_the_length_term_than_half_as_long_ones() -> None:
    lengths = [2, 50, 100, 150, 200]
    parts = [part(n, t, 50, quality=float(t)) for n, t in enumerate(lengths)]
    found = score_parts(parts, {"p": 100}, None).scored
    assert found[0].length_term == pytest.approx(found[1].length_term)


def test_the_baselines_tokens_are_the_median_of_its_finished_answers() -> None:
    def of(prompt: str, tokens: int, *, truncated: bool = False) -> Sample:
        one = sample(0, [list(range(20, 20 + tokens))], prompt=prompt)
        return replace(one, truncated=truncated)

    answers = [of("a", 10), of("a", 20), of("a", 60, truncated=True), of("b", 50, truncated=True)]
    assert baseline_tokens(answers) == {"a": 15, "b": 15}
    assert baseline_tokens([of("b", 50, truncated=True)]) == {"b": 50}


def test_a_sample_reads_back_as_it_was_written() -> None:
    one = sample(3, [[20, 21], [30]])
    assert decode_sample(encode_sample(one)) == one
