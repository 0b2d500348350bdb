"""Composed answers do what they are asked, and the file that ships is what the script writes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from pasta_decoding.data.asked import read_asked
from pasta_decoding.data.checks import count_sentences, make_check
from pasta_decoding.data.dataset import read_rows
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Node, read, strip, valid_topic
from scripts.compose_demands import (
    MAKERS,
    Draw,
    Maker,
    Sources,
    compose,
    includes,
    main,
    read_parts,
)

FILE = Path(__file__).parents[2] / "data/annotated_demands.jsonl.gz"
COUNT = 1600
# Their answers stay with one thread.
SHORT = (
    "json_array", "json_object", "sentences", "one_paragraph", "most_words", "lines", "cased",
    "quoted", "total", "fact", "one_word", "rewritten",
)  # fmt: skip


def count_words(text: str) -> int:
    return len(text.split())


def without_lengths(response: str) -> list[Node]:
    """Return the parts of a response; promised lengths follow from what counts tokens."""
    return [replace(one, tokens=0) if isinstance(one, Chunk) else one for one in read(response)]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return read_parts()


def test_every_part_has_a_name_that_is_a_topic_and_two_sentences(sources: Sources) -> None:
    assert (len(sources.lists), len(sources.subjects)) == (35, 27)
    for written in (*sources.lists, *sources.subjects):
        names = [part.name for part in written.parts]
        assert len(names) >= 5, written.what
        assert len(set(names)) == len(names), written.what
        for part in written.parts:
            assert valid_topic(part.name) == part.name
            assert count_sentences(part.both) == 2, part


@pytest.mark.parametrize("maker", MAKERS, ids=lambda one: one.__name__)
def test_each_kind_passes_its_own_checks_nearly_always(sources: Sources, maker: Maker) -> None:
    draw = Draw(3)
    made = [maker(sources, draw) for _ in range(40)]
    passed = [
        all(make_check(kind, arguments).passes(strip(one.tree)) for kind, arguments in one.checks)
        for one in made
    ]
    assert sum(passed) >= 36
    if maker.__name__ in SHORT:
        assert not any(isinstance(node, Chunk) for one in made for node in one.tree)


def test_the_rows_that_ship_are_those_of_the_script_and_do_what_is_asked(sources: Sources) -> None:
    shipped = list(read_rows(FILE))
    written = list(compose(sources, COUNT, 1, count_words))
    assert [row.instruction for row in shipped] == [one.instruction for one in written]
    assert [without_lengths(row.response) for row in shipped] == [
        without_lengths(one.response) for one in written
    ]
    asked = read_asked(FILE)
    assert len(asked) == COUNT
    assert all(one.is_met(read(row.response)) for one, row in zip(asked, shipped, strict=True))
    assert [row.id for row in shipped if check(row.response)] == []


def test_the_script_writes_a_packed_file_that_reads_back(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "demands.jsonl.gz"
    monkeypatch.setattr("scripts.compose_demands.token_counter", lambda: count_words)
    monkeypatch.setattr("sys.argv", ["compose_demands.py", "--count", "20", "-o", str(out)])
    main()
    assert list(read_rows(out)) == list(compose(sources, 20, 1, count_words))


def test_words_that_are_asked_for_are_found_in_the_shortest_text(sources: Sources) -> None:
    draw = Draw(27)
    for _ in range(1500):
        ((_, asked),) = includes(sources, draw).checks
        assert asked["strings"]


def test_another_seed_writes_other_rows_of_the_same_kinds(sources: Sources) -> None:
    one, other = (list(compose(sources, 300, seed, count_words)) for seed in (1, 2))
    assert {row.instruction for row in one} != {row.instruction for row in other}
    for rows in (one, other):
        kinds = Counter(asked["kind"] for row in rows for asked in row.extra["checks"])  # type: ignore[attr-defined]
        assert min(kinds[kind] for kind in ("bullets", "numbered", "sentences", "words")) >= 5
