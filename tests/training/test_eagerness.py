"""Learned eagerness: its gradient, its limit, what it learns, and what decoding makes of it."""

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pasta_decoding.answer.constraints import main_constraint
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import open_local
from pasta_decoding.data.rows import question_of
from pasta_decoding.engines.base import Feed, FloatArray
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import (
    ChunkRun,
    Joining,
    MainRun,
    PromiseRun,
    Segment,
    SyncRun,
    lay_out,
)
from pasta_decoding.lang.positions import SHARED_MAX
from pasta_decoding.models.adapter import add_to_head
from pasta_decoding.models.catalog import BaseWithAdapter
from pasta_decoding.models.checkpoint import from_json, read_checkpoint, to_json, write_checkpoint
from pasta_decoding.models.load import load_base, load_model
from pasta_decoding.scheduling.decoder import LocalDecoder
from pasta_decoding.training import eagerness
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.eagerness import (
    MAX_DIVERGENCE,
    Choices,
    Features,
    LearnedTags,
    Place,
    Scale,
    capped_scores,
    features_of,
    find_places,
    gradient_at,
    head_pass,
    join_scores,
    learn,
    learn_eagerness,
    outcome_logprobs,
    shifts,
    taken_logprobs,
    write_adapter,
)
from pasta_decoding.training.lora import take_up
from pasta_decoding.training.preference import PreferenceRun, refuse_misfits
from pasta_decoding.training.sample import Sample, sample_answers
from pasta_decoding.training.score import ScoreParts
from tests.checkpoint import TinyCheckpoint, make_adapter, make_base, torch_decoder
from tests.golden.golden import talkative
from tests.tiny import OPERATORS, seeded
from tests.training.tiny_runs import files

INFINITY = float("inf")
PROMPTS = [question_of(question) for question in ("Why?", "How?", "What?")]
WIDTH = 4


def random_features(places: int, *, answers: int) -> Features:
    """Random places of some answers; a sync is not allowed at every third one."""
    with seeded(1):
        hidden_PD = torch.randn(places, WIDTH).bfloat16()
        logodds_PK = torch.randn(places, 2) - 1
        logodds_PK[::3, 1] = -INFINITY
        outcome_P = outcome_logprobs(logodds_PK).exp().multinomial(1)[:, 0]
    return Features(hidden_PD, logodds_PK, outcome_P, torch.arange(places) % answers)


def test_places_are_where_main_may_write_a_tag(tiny_checkpoint: TinyCheckpoint) -> None:
    control = read_checkpoint(tiny_checkpoint.adapter).control
    segments: list[Segment] = [
        MainRun((1,)),
        PromiseRun((control.promise_open, 3, control.promise_close[20]), 20),
        ChunkRun((control.async_open, 4)),
        SyncRun(control.sync),
        MainRun((5,)),
    ]
    layout = lay_out((9,), segments, SHARED_MAX, async_close=control.async_close, end=7)
    before_the_chunk = [
        Place(0, may_promise=True, may_sync=False, outcome=2),
        Place(1, may_promise=True, may_sync=False, outcome=0),
    ]
    # Labels 2 and 3 end the topic; labels 5 and 6 are the chunk's.
    sync = Place(4, may_promise=True, may_sync=True, outcome=1)
    after_the_sync = [
        Place(7, may_promise=True, may_sync=False, outcome=2),
        Place(8, may_promise=True, may_sync=False, outcome=2),
    ]
    places = find_places(layout, control, max_chunks=2)
    assert places == [*before_the_chunk, sync, *after_the_sync]
    places = find_places(layout, control, max_chunks=1)
    assert places == [*before_the_chunk, replace(sync, may_promise=False)]


def test_gradient_is_that_of_the_weighted_log_probabilities() -> None:
    features = random_features(12, answers=3)
    choices = join_scores([(features, {0: 1.0, 1: -0.5, 2: 0.25})], {0: 2.0})
    with seeded(2):
        u_KD = torch.randn(2, WIDTH).requires_grad_()
        b_K = torch.randn(2).requires_grad_()
    shift_PK = shifts(choices, LearnedTags(u_KD, b_K))
    gradient = gradient_at(choices, shift_PK.detach())
    chosen_P = taken_logprobs(features.logodds_PK + shift_PK, features.outcome_P)
    weight_P = (chosen_P - choices.sampled_P).exp().clamp(0.5, 2).detach()
    objective = (weight_P * choices.advantage_P * chosen_P).sum() / 3
    expected_KD, expected_K = torch.autograd.grad(objective, [u_KD, b_K])
    torch.testing.assert_close(gradient.u_KD, expected_KD)
    torch.testing.assert_close(gradient.b_K, expected_K)


def test_advantage_is_against_the_other_answers_and_an_eager_choice_is_weighed_as_such() -> None:
    features = Features(
        torch.zeros(3, WIDTH).bfloat16(),
        torch.tensor([[0.0, -INFINITY]] * 3),
        torch.tensor([0, 0, 0]),
        torch.tensor([0, 1, 2]),
    )
    choices = join_scores([(features, {0: 3.0, 1: 1.0})], {0: 2.0})
    assert choices.advantage_P.tolist() == [2, -2]  # the third has no score
    expected_P = torch.tensor([2.0, 0.0]).sigmoid().log()
    torch.testing.assert_close(choices.sampled_P, expected_P)


def test_a_step_is_taken_on_centred_and_scaled_states() -> None:
    choices = join_scores([(random_features(12, answers=3), {0: 1.0, 1: -0.5, 2: 0.25})], {})
    scale = Scale.of(choices)
    centred_PD = (choices.hidden[0].float() - scale.mean_D) / scale.size
    assert centred_PD.square().sum(1).mean() == pytest.approx(1)
    zero_PK = torch.zeros(12, 2)
    start = LearnedTags(torch.zeros(2, WIDTH), torch.zeros(2))
    tags = scale.step(start, gradient_at(choices, zero_PK), rate=1.0)
    centred_step = gradient_at(replace(choices, hidden=(centred_PD,)), zero_PK)
    expected_PK = centred_PD @ centred_step.u_KD.T + centred_step.b_K
    torch.testing.assert_close(shifts(choices, tags), expected_PK)


def toy_choices(payoff: float) -> Choices:
    """Answers with one place each, promises in half of them, as an eager policy draws them.

    A promise earns `payoff` where h[0] is 1, and costs as much elsewhere.
    """
    prompts = []
    for seed in range(40):
        with seeded(seed):
            hidden_PD = torch.randn(4, WIDTH)
        pays = seed % 2 == 1
        hidden_PD[:, 0] = float(pays)
        outcome_P = torch.tensor([0, 2, 0, 2])
        logodds_PK = torch.tensor([[-1.0, -INFINITY]] * 4)
        features = Features(hidden_PD.bfloat16(), logodds_PK, outcome_P, torch.arange(4))
        gain = payoff if pays else -payoff
        prompts.append((features, {0: gain, 1: 0.0, 2: gain, 3: 0.0}))
    return join_scores(prompts, dict.fromkeys(range(4), 1.0))


def promise_probability(tags: LearnedTags, *, first: float) -> float:
    shift_K = tags.u_KD @ torch.tensor([first, 0.0, 0.0, 0.0]) + tags.b_K
    return float((shift_K[0] - 1.0).sigmoid())


def test_promises_become_likelier_where_they_pay_within_the_limit() -> None:
    tags, figures = learn(toy_choices(payoff=1.0))
    untrained = torch.tensor(-1.0).sigmoid()
    where_it_pays = promise_probability(tags, first=1.0)
    assert where_it_pays > untrained + 0.3
    assert where_it_pays > promise_probability(tags, first=0.0) + 0.2
    assert 0 < figures["divergence"] <= MAX_DIVERGENCE
    assert figures["syncs_after"] == 0


def test_the_divergence_stays_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagerness, "MAX_DIVERGENCE", 0.02)
    tags, figures = learn(toy_choices(payoff=3.0))
    assert 0.019 < figures["divergence"] <= 0.02
    assert promise_probability(tags, first=1.0) > promise_probability(tags, first=0.0) + 0.1


def test_equal_scores_teach_nothing() -> None:
    with pytest.raises(PastaError, match="eagerness cannot be learned"):
        learn(toy_choices(payoff=0.0))


# A tiny model


@dataclass(frozen=True, slots=True)
class Round:
    """The samples of a tiny policy; the score of each is its number of promises."""

    checkpoint: TinyCheckpoint
    config: PreferenceConfig
    samples: list[Sample]

    def learn(self, folder: Path) -> dict[str, float]:
        scores = {
            (sample.prompt, sample.number): float(sample.annotated.count("<promise"))
            for sample in self.samples
        }
        figures = learn_eagerness(
            self.checkpoint.base,
            self.samples,
            scores,
            folder,
            policy=self.checkpoint.adapter,
            config=self.config,
        )
        assert figures is not None, "this is the main process"
        return figures


@pytest.fixture(scope="module")
def tiny_round(tmp_path_factory: pytest.TempPathFactory) -> Round:
    folder = tmp_path_factory.mktemp("eagerness")
    base = talkative(make_base(folder / "base"))
    checkpoint = TinyCheckpoint(base, make_adapter(base, folder / "adapter"))
    config = PreferenceConfig(
        policy=str(checkpoint.adapter),
        baseline=str(checkpoint.adapter),
        objective="eagerness",
        quality="likelihood",
        engine="torch",
        dtype="float32",
        samples=4,
        max_tokens=40,
        device="cpu",
    )
    samples = sample_answers(
        lambda: nullcontext(torch_decoder(base, checkpoint.adapter)),
        PROMPTS,
        folder / "samples.jsonl",
        name="round-1",
        count=config.samples,
        rules=config.rules,
        temperature=1.0,
        config=config,
    )
    return Round(checkpoint, config, samples)


def test_half_of_the_samples_are_eager(tiny_round: Round) -> None:
    assert [tiny_round.config.eagerness_of(number) for number in range(4)] == [2, 2, None, None]
    assert PreferenceConfig(samples=4).eagerness_of(0) is None
    promises = [0] * 4
    for sample in tiny_round.samples:
        promises[sample.number] += sample.annotated.count("<promise")
    assert promises[0] + promises[1] > promises[2] + promises[3]


def test_features_are_what_decoding_computes(tiny_round: Round) -> None:
    checkpoint = tiny_round.checkpoint
    sample = tiny_round.samples[0]
    features = features_of(
        load_model(checkpoint.source), [sample], joining=Joining.kv, max_chunks=16
    )
    decoder = torch_decoder(checkpoint.base, checkpoint.adapter)
    control = decoder.vocabulary.control
    logits_V = torch.from_numpy(first_logits(decoder, sample.prompt_ids))
    others_V = logits_V.index_fill(0, torch.tensor(sorted(control.ids)), -torch.inf)
    expected = logits_V[control.promise_open] - others_V.logsumexp(0)
    torch.testing.assert_close(features.logodds_PK[0, 0], expected, rtol=1e-4, atol=1e-4)
    assert features.logodds_PK[0, 1] == -torch.inf
    promises = sample.annotated.count("<promise")
    assert int((features.outcome_P == 0).sum()) == promises > 0


def test_a_policy_learns_to_promise_and_a_resumed_run_is_equal_to_the_bit(
    tiny_round: Round, tmp_path: Path
) -> None:
    tiny_round.learn(tmp_path / "again")
    figures = tiny_round.learn(tmp_path / "first")
    assert figures["answers"] == 12
    assert figures["promises_after"] > 1.2 * figures["promises_before"]
    (tmp_path / "again" / "features" / "00001.safetensors").unlink()
    tiny_round.learn(tmp_path / "again")
    assert files(tmp_path / "again" / "adapter") == files(tmp_path / "first" / "adapter")


def test_a_run_samples_scores_and_learns_and_goes_on_where_it_stopped(
    tiny_round: Round, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run = PreferenceRun(tiny_round.config, tiny_round.checkpoint.base, out, tmp_path / "cache")
    adapter = run.train(PROMPTS)
    learned = files(adapter)
    assert json.loads(learned["pasta.json"])["promise_bias"] != 0
    summary = json.loads((out / "round-1" / "summary.json").read_text())
    assert summary["all"]["answers"] == 12
    assert 0 < summary["eagerness"]["divergence"] <= MAX_DIVERGENCE
    samples = out / "round-1" / "samples.jsonl"
    samples.write_text("".join(samples.read_text().splitlines(keepends=True)[:5]))
    for folder in (adapter, out / "round-1" / "adapter", out / "round-1" / "features"):
        shutil.rmtree(folder)
    assert files(run.train(PROMPTS)) == learned


def test_an_unsound_answer_has_at_most_the_score_of_the_worst_sound_one() -> None:
    part = ScoreParts("a", 0, 10, 5, 0.0, 0.0, 10, finished=True, sound=True)
    parts = [
        part,
        replace(part, number=1, sound=False),
        replace(part, number=2),
        replace(part, number=3),
        replace(part, prompt="b", sound=False),
    ]
    capped = capped_scores(parts, [1.0, 3.0, 2.0, None, 1.0])
    assert capped == {("a", 0): 1.0, ("a", 1): 1.0, ("a", 2): 2.0}


def test_answers_without_a_score_are_left_out(tiny_round: Round, tmp_path: Path) -> None:
    sample = tiny_round.samples[0]
    with pytest.raises(PastaError, match="eagerness cannot be learned"):
        learn_eagerness(
            tiny_round.checkpoint.base,
            tiny_round.samples,
            {(sample.prompt, sample.number): 1.0},
            tmp_path,
            policy=tiny_round.checkpoint.adapter,
            config=tiny_round.config,
        )


# Decoding with what was learned


def first_logits(decoder: LocalDecoder, prompt: Sequence[int]) -> FloatArray:
    """Return the logits behind a prompt."""
    engine = decoder.engine
    branch = engine.open(reserved_tokens=len(prompt))
    [logits_V] = engine.step([Feed((branch,), tuple(prompt), tuple(range(len(prompt))))])
    engine.close(branch)
    return logits_V


def some_tags() -> LearnedTags:
    with seeded(5):
        return LearnedTags(torch.randn(2, 32), torch.tensor([1.5, -0.5]))


@pytest.mark.parametrize("engine", ["torch", "fast"])
def test_decoding_adds_u_times_h_and_b(
    engine: Any, tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint.base
    policy = tiny_checkpoint.adapter
    tags = some_tags()
    write_adapter(policy, tmp_path / "learned", tags)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "operators").symlink_to(OPERATORS)
    prompt = tuple(range(40, 60))

    def opened(adapter: Path) -> LocalDecoder:
        return open_local(EngineConfig(str(adapter), base, engine, dtype="float32"), cache)

    before = opened(policy)
    after = opened(tmp_path / "learned")
    control = before.vocabulary.control
    layout = lay_out(prompt, [], SHARED_MAX, async_close=control.async_close, end=257)
    hidden_LD, _ = head_pass(load_model(BaseWithAdapter(base, policy)).model, layout)
    difference_V = first_logits(after, prompt) - first_logits(before, prompt)
    expected_V = torch.zeros(len(difference_V))
    expected_V[[control.promise_open, control.sync]] = tags.u_KD @ hidden_LD[-1]
    torch.testing.assert_close(torch.from_numpy(difference_V), expected_V, rtol=1e-3, atol=1e-3)

    # The dial comes on top of b.
    for dial, promise_bias in ((None, 1.5), (2.0, 3.5)):
        rules = after.request(prompt, Rules(eagerness=dial), SamplingParams()).rules
        allowed = main_constraint(
            after.vocabulary,
            promise=True,
            sync=True,
            eagerness=rules.eagerness or 0.0,
            sync_bias=rules.sync_bias,
        )
        assert allowed.bias == {control.promise_open: promise_bias, control.sync: -0.5}


def test_the_bias_of_a_sync_is_added_where_a_sync_is_allowed(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    policy = tiny_checkpoint.adapter
    biases = torch.tensor([50.0, 100.0])
    write_adapter(policy, tmp_path / "eager", LearnedTags(torch.zeros(2, 32), biases))
    decoder = torch_decoder(tiny_checkpoint.base, tmp_path / "eager")
    request = decoder.request("Why?", Rules(max_tokens=100, max_topic_tokens=2), SamplingParams())
    assert decoder.answer(request).annotated.count("<sync/>") > 1
    sequential = decoder.request("Why?", Rules(max_tokens=60, parallel=False), SamplingParams())
    assert "<sync/>" not in decoder.answer(sequential).annotated


def test_u_is_added_to_the_head_and_leaves_tied_embeddings_alone(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    policy = tiny_checkpoint.adapter
    record = read_checkpoint(policy)
    before = load_model(BaseWithAdapter(tiny_checkpoint.base, policy)).model
    ones_D = torch.ones(32)
    # The second adapter is made from one that has rows for the head.
    for name, total in (("first", 1.0), ("second", 2.0)):
        add_to_head(policy, tmp_path / name, {record.control.sync: ones_D})
        write_checkpoint(record, tmp_path / name)
        policy = tmp_path / name
        after = load_model(BaseWithAdapter(tiny_checkpoint.base, policy)).model
        difference_VD = after.lm_head.weight - before.lm_head.weight
        expected_VD = torch.zeros_like(difference_VD)
        expected_VD[record.control.sync] = total
        torch.testing.assert_close(difference_VD, expected_VD, rtol=0, atol=1e-5)
        assert torch.equal(after.model.embed_tokens.weight, before.model.embed_tokens.weight)


def test_biases_stand_in_pasta_json_only_if_they_were_learned(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    record = read_checkpoint(tiny_checkpoint.adapter)
    assert "bias" not in to_json(record)
    write_adapter(tiny_checkpoint.adapter, tmp_path / "learned", some_tags())
    learned = read_checkpoint(tmp_path / "learned")
    assert learned == replace(record, promise_bias=1.5, sync_bias=-0.5)
    with pytest.raises(PastaError, match="promise_bias is nan, not a number"):
        from_json(to_json(learned).replace("1.5", "NaN"), "pasta.json")


def test_a_learned_eagerness_is_refused_on_another_base_and_for_further_training(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    write_adapter(tiny_checkpoint.adapter, tmp_path / "learned", some_tags())
    other = make_base(tmp_path / "other", seed=1)
    with pytest.raises(PastaError, match="the adapter was trained on"):
        torch_decoder(other, tmp_path / "learned")
    source = BaseWithAdapter(tiny_checkpoint.base, tmp_path / "learned")
    with pytest.raises(PastaError, match="cannot be trained further"):
        take_up(load_base(source).model, source.adapter, seed=0)


def test_settings_that_cannot_teach_eagerness_are_refused(
    tiny_round: Round, tmp_path: Path
) -> None:
    with pytest.raises(PastaError, match="--pairs"):
        PreferenceConfig(objective="eagerness", pairs=("pairs.jsonl",))
    with pytest.raises(PastaError, match="temperature of 1"):
        PreferenceConfig(objective="eagerness", temperature=0.7)
    learned = tmp_path / "learned"
    write_adapter(tiny_round.checkpoint.adapter, learned, some_tags())
    config = replace(tiny_round.config, policy=str(learned))
    refuse_misfits(config)  # a second round
    with pytest.raises(PastaError, match="cannot be trained further"):
        refuse_misfits(replace(config, objective="square"))
    whole = shutil.copytree(tiny_round.checkpoint.adapter, tmp_path / "whole")
    shutil.copytree(tiny_round.checkpoint.base, whole, dirs_exist_ok=True)
    (whole / "adapter_config.json").unlink()
    with pytest.raises(PastaError, match="eagerness is learned for adapters"):
        refuse_misfits(replace(tiny_round.config, policy=str(whole), baseline=str(whole)))
