"""Skeleton-of-Thought, on a model that says what the test wants; `generate` of transformers."""

from collections.abc import Sequence

import pytest
import torch

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import question_of
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.evaluation.generate import Plan, ask_all
from pasta_decoding.evaluation.methods import Method, make_method
from pasta_decoding.evaluation.records import Record
from pasta_decoding.evaluation.skeleton import points_of
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import read, strip
from pasta_decoding.scheduling.decoder import LocalDecoder
from tests.checkpoint import TinyCheckpoint, torch_decoder
from tests.evaluation.puppet import puppet

OUTLINE = "1. Sleep\n2. Walk daily\n3. Eat"
POINTS = {
    "1": "1. Sleep: Enough.",
    "2": "2. Walk daily: A mile.",
    "3": "3. Eat: Greens, and fruit.",
}


def model(question: str, outline: str = OUTLINE) -> str:
    """Reply to a skeleton prompt, to the prompt of a point, or to a question."""
    if question.endswith("Outline:"):
        return outline
    if question.endswith(" only."):
        return POINTS[question.removesuffix(" only.").rpartition(" ")[2]]
    return "Plainly."


def answered(decoder: LocalDecoder, *, max_tokens: int = 200) -> Record:
    method = make_method("sot", decoder, GenerationConfig(max_tokens=max_tokens))
    [record] = ask_all(method, [question_of("How to live?", "blog")], Plan())
    assert decoder.engine.slots_in_use == 0
    return record


def test_an_answer_is_its_points_in_order_each_with_its_text() -> None:
    record = answered(puppet(model))
    assert record.text == "1. Sleep: Enough.\n2. Walk daily: A mile.\n3. Eat: Greens, and fruit."
    assert (record.instruction, record.dataset, record.error) == ("How to live?", "blog", None)
    assert record.chunks == 3
    assert not record.hit_limit
    assert not record.truncated_chunks
    assert strip(read(record.annotated)) == record.text
    assert not check(record.annotated)
    assert '2. Walk daily: <promise topic="Walk daily" tokens="10"/><async>A mile.' in (
        record.annotated
    )


def test_the_critical_path_is_the_skeleton_a_prefill_and_the_longest_point() -> None:
    record = answered(puppet(model))
    skeleton = len(OUTLINE) - len("1.")
    points = [len(" Enough."), len(" A mile."), len(" Greens, and fruit.")]
    assert record.critical_path == skeleton + 1 + max(points)
    assert record.fed_tokens == skeleton + sum(points)
    assert record.plain_tokens == len(record.text)


@pytest.mark.parametrize("outline", ["1. Just one thing", "1.", "1. Twice\n2. twice"])
def test_without_two_points_the_plain_answer_is_asked_for_and_the_skeleton_counts(
    outline: str,
) -> None:
    record = answered(puppet(lambda question: model(question, outline)))
    assert record.text == record.annotated == "Plainly."
    assert record.chunks == 0
    steps = len(outline) - len("1.")
    assert record.critical_path == steps + 1 + len("Plainly.")
    assert record.fed_tokens == steps + len("Plainly.")


def test_skeleton_and_points_stay_within_the_budget_together() -> None:
    """27 tokens of skeleton leave 57, which are 19 a point; the third one wants to say more."""

    def chatty(question: str) -> str:
        return model(question) + " Daily." * question.endswith("3 only.")

    record = answered(puppet(chatty), max_tokens=84)
    assert record.text == "1. Sleep: Enough.\n2. Walk daily: A mile.\n3. Eat: Greens, and fruit."
    assert (record.truncated_chunks, record.hit_limit) == (1, True)


@pytest.mark.parametrize("next_point", ["\n2. Walk", "\n\n**3) Eat"])
def test_a_text_ends_where_another_point_begins(next_point: str) -> None:
    record = answered(
        puppet(lambda question: model(question) + next_point * question.endswith("1 only."))
    )
    assert record.text == "1. Sleep: Enough.\n2. Walk daily: A mile.\n3. Eat: Greens, and fruit."
    assert not record.hit_limit


# Reading a skeleton


@pytest.mark.parametrize(
    ("outline", "points"),
    [
        ("1. A b\n2. C", [(1, "A b"), (2, "C")]),
        ("1.A\n 2) B:\n\n- 3. **C d**: ", [(1, "A"), (2, "B"), (3, "C d")]),
        ("Sure!\n**1.** A\n# 2. B.", [(1, "A"), (2, "B")]),
        ("1. A\n3. a\n4. C", [(1, "A"), (4, "C")]),
        ("1. A\n2. B\n\n1. C\n3. D", [(1, "A"), (2, "B")]),
        ("1. \n2. B\n3. ...", [(2, "B")]),
        ("1. In 2019. Then\n2. B", [(1, "In 2019. Then"), (2, "B")]),
        ("1. <sync/>\n2. \u00fc", [(1, "<sync/>"), (2, "\u00fc")]),
        ("no list", []),
        ("\n".join(f"{n}. P{n}" for n in range(1, 30)), [(n, f"P{n}") for n in range(1, 11)]),
    ],
)
def test_points_are_numbered_lines_with_rising_numbers_and_new_headings(
    outline: str, points: Sequence[tuple[int, str]]
) -> None:
    assert list(points_of(outline).items()) == points
    complete_points = points_of(f"{outline}\n99. Cut", cut_off=True)
    assert complete_points == points_of(outline), "a last line that was cut off is none"


# transformers' own `generate` writes what sequential decoding writes, and says what it took


CONFIG = GenerationConfig(max_tokens=60)
QUESTIONS = [question_of(text) for text in ("Hello", "Two cities, two cities, two", "x")]


@pytest.fixture(scope="module")
def decoder(tiny_checkpoint: TinyCheckpoint) -> LocalDecoder:
    """Return the tiny model without tags: `generate` does not ban them where they are wrong."""
    decoder = torch_decoder(tiny_checkpoint.base, None)
    assert isinstance(decoder.engine, TorchEngine)
    rows_VD = decoder.engine.model.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        rows_VD[sorted(decoder.vocabulary.control.ids)] = 0
    return decoder


def answers_of(method: Method) -> list[Record]:
    answers = ask_all(method, QUESTIONS, Plan(max_concurrency=2))
    by_id = {record.id: record for record in answers}
    records = [by_id[question.id] for question in QUESTIONS]
    assert [record.error for record in records] == [None] * len(QUESTIONS)
    return records


@pytest.mark.parametrize("name", ["hf", "lookup"])
def test_the_answers_are_those_of_sequential_decoding(decoder: LocalDecoder, name: str) -> None:
    sequential = answers_of(make_method("sequential", decoder, CONFIG))
    theirs = answers_of(make_method(name, decoder, CONFIG))
    for answer, expected in zip(theirs, sequential, strict=True):
        assert (answer.text, answer.hit_limit) == (expected.text, expected.hit_limit)
    steps = [answer.critical_path for answer in theirs]
    if name == "hf":
        assert steps == [answer.fed_tokens - 1 for answer in theirs]
    else:
        assert sum(steps) < sum(answer.critical_path for answer in sequential)


def test_sampled_answers_follow_from_the_seed(decoder: LocalDecoder) -> None:
    def texts(seed: int) -> list[str]:
        sampled = GenerationConfig(max_tokens=20, temperature=1.0, top_p=0.9, seed=seed)
        return [answer.text for answer in answers_of(make_method("hf", decoder, sampled))]

    before = torch.random.get_rng_state()
    assert texts(1) == texts(1) != texts(2)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's noise is left alone"
