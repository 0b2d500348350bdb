"""Answers damaged on purpose: each kind is what it says, and about as long as the answer was."""

from __future__ import annotations

from dataclasses import replace

from pasta_decoding.eval.judge.base import Pair, fold
from pasta_decoding.eval.judge.damage import damaged_pairs
from tests.judging import made_up


def damaged(pairs: list[Pair]) -> dict[str, dict[str, Pair]]:
    """Pairs by kind and prompt."""
    found: dict[str, dict[str, Pair]] = {"shuffled": {}, "swapped": {}, "looped": {}}
    for pair in damaged_pairs(pairs):
        kind = found[pair.source.removeprefix("damaged-")]
        assert pair.prompt not in kind
        kind[pair.prompt] = pair
    return found


def test_the_better_answer_beats_every_damage_done_to_it() -> None:
    pairs = made_up(30)
    better = {(p.prompt, p.a if p.preference == 1 else p.b) for p in pairs}
    for kind in damaged(pairs).values():
        assert kind
        for pair in kind.values():
            assert (pair.prompt, pair.a) in better
            assert (pair.b != pair.a, pair.preference) == (True, 1.0)


def test_shuffled_words_are_the_same_words_in_the_same_gaps() -> None:
    answer = " ".join(f"word{n}" for n in range(30)) + ".\n\n" + "The end. " * 5
    pair = damaged([Pair("s", "p", answer, "", 1.0)])["shuffled"]["p"]
    assert sorted(pair.b.split()) == sorted(answer.split())
    assert pair.b.count("\n\n") == 1
    assert len(pair.b) == len(answer.strip())


def test_a_swapped_answer_is_one_to_another_prompt_of_the_same_fold() -> None:
    pairs = made_up(60)
    prompts_of: dict[str, set[str]] = {}
    for pair in pairs:
        for answer in (pair.a, pair.b):
            prompts_of.setdefault(answer, set()).add(pair.prompt)
    swapped = damaged(pairs)["swapped"]
    assert len(swapped) >= 60 - 4  # one of each fold may find no partner
    for prompt, pair in swapped.items():
        [owner] = prompts_of[pair.b]
        assert (owner != prompt, fold(owner)) == (True, fold(prompt))
        assert swapped[owner].b == pair.a


def test_a_looped_answer_is_its_first_sentence_up_to_its_length() -> None:
    answer = "One short sentence here. " + "Then there is much more to say about it all. " * 6
    pair = damaged([Pair("s", "p", "", answer, 0.0)])["looped"]["p"]
    start = "One short sentence here. Then there is much more to say about it all. "
    assert pair.b.startswith(start * 2)
    assert abs(len(pair.b) - len(answer)) <= 2


def test_short_answers_are_left_alone_and_the_damage_is_the_same_every_time() -> None:
    assert list(damaged_pairs([Pair("s", "p", "too short to break", "no", 1.0)])) == []
    pairs = made_up(10)
    assert list(damaged_pairs(pairs)) == list(damaged_pairs(map(replace, pairs)))
