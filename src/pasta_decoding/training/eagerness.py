"""Learned eagerness: when to promise and when to sync, learned without a backward pass.

The model stays frozen. For promise and sync, a vector u and a number b are learned:

    logit' = logit + u . h + b      h: the hidden state in front of the head

Answers change only through the promises and syncs that are written. u is added to the tag's own row
w of the head, since u . h + w . h = (w + u) . h; b goes to `pasta.json`.

At each *place* where main may write a tag, it takes one of three outcomes: promise, sync, any other
token. Their logits are the log-odds of the tags against the other tokens, and 0. So the gradient of
the expected score has a closed form, a policy gradient (REINFORCE) with clipped importance weights:

    sum over places of  clip(p'(a) / p(a), 0.5, 2) A (1[a = tag] - p'(tag)) h

a: the outcome; p: its probability when it was sampled; p': with u and b; A: the answer's score
minus the mean score of the other answers to its prompt. The objective is the mean over answers,
minus 0.01 |u|^2 in the unit of `Scale`. The divergence KL(p' | policy), summed over the places of
an answer, stays at most 0.5 nats in the mean over answers.

Shapes: P places, L labels of an answer, D hidden width, K tags (promise, sync), V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from sys import maxsize
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole
from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.lang.layout import MAIN, Joining, Layout
from pasta_decoding.models.adapter import add_to_head
from pasta_decoding.models.catalog import adapter_on
from pasta_decoding.models.checkpoint import read_checkpoint, write_checkpoint
from pasta_decoding.models.load import LoadedModel, default_device, load_model, native_dtype
from pasta_decoding.training.config import PreferenceConfig, SftConfig
from pasta_decoding.training.examples import compile_answer
from pasta_decoding.training.loop import processes, share_of
from pasta_decoding.training.run import tracked
from pasta_decoding.training.sample import Sample, SampleKey
from pasta_decoding.training.score import ScoreParts
from pasta_decoding.training.view import label_logprobs

log = logging.getLogger(__name__)

OTHER = 2
"""The outcome at a place where neither tag was written; 0 is a promise, 1 a sync."""
WEIGHT_RANGE = (0.5, 2.0)
PENALTY = 0.01
MAX_DIVERGENCE = 0.5
"""Nats an answer."""
PASSES = 100
SHRINKING = 0.98
"""Factor of u and b, as often as needed, while the divergence exceeds its limit."""


def learn_eagerness(
    base: Path,
    samples: Sequence[Sample],
    scores: Mapping[SampleKey, float],
    folder: Path,
    *,
    policy: Path,
    config: PreferenceConfig,
) -> dict[str, float] | None:
    """Learn u and b from the samples of a round; write `adapter` into `folder`.

    samples: those of the policy; the answers to a prompt are neighbours.
    scores:  an answer without a score is left out.

    All processes call this together; the main one returns the figures of `learn`. Raises
    PastaError if there is nothing to learn from.
    """
    from safetensors.torch import load_file

    def load() -> LoadedModel:
        device = config.device or default_device()
        loaded = load_model(adapter_on(base, policy), dtype=native_dtype(device))
        return replace(loaded, model=loaded.model.to(device).eval())

    groups = [list(group) for _, group in groupby(samples, lambda sample: sample.prompt)]
    paths = collect(
        load,
        groups,
        folder / "features",
        joining=config.joining,
        max_chunks=config.rules.max_chunks,
    )
    figures = None
    if processes().is_main_process:
        own_eagerness = read_checkpoint(policy).eagerness
        extra_bias = {}
        for number in range(config.samples):
            eagerness = config.eagerness_of(number)
            if eagerness is not None:
                extra_bias[number] = eagerness - own_eagerness
        prompts = []
        for path, group in zip(paths, groups, strict=True):
            keys = [(sample.prompt, sample.number) for sample in group]
            group_scores = {key[1]: scores[key] for key in keys if key in scores}
            prompts.append((Features(**load_file(path)), group_scores))
        tags, figures = learn(join_scores(prompts, extra_bias))
        write_adapter(policy, folder / "adapter", tags)
    processes().wait_for_everyone()
    return figures


def capped_scores(
    parts: Sequence[ScoreParts], scores: Sequence[float | None]
) -> dict[SampleKey, float]:
    """Return the scores by sample; an unsound answer has at most that of the worst sound one.

    A prompt without a sound answer is left out.
    """
    scored_parts = zip(parts, scores, strict=True)
    capped = {}
    for _, group in groupby(scored_parts, lambda pair: pair[0].prompt):
        scored = [(part, value) for part, value in group if value is not None]
        sound = [value for part, value in scored if part.sound]
        if not sound:
            continue
        for part, value in scored:
            capped[part.prompt, part.number] = value if part.sound else min(value, *sound)
    return capped


def write_adapter(policy: Path, target: Path, tags: LearnedTags) -> None:
    """Write the policy's adapter with u in the head's rows and b in `pasta.json`."""
    checkpoint = read_checkpoint(policy)
    control = checkpoint.control
    promise_D, sync_D = tags.u_KD
    promise_bias, sync_bias = tags.b_K.tolist()
    with written_whole(target) as partial:
        add_to_head(policy, partial, {control.promise_open: promise_D, control.sync: sync_D})
        learned = replace(
            checkpoint,
            promise_bias=checkpoint.promise_bias + promise_bias,
            sync_bias=checkpoint.sync_bias + sync_bias,
        )
        write_checkpoint(learned, partial)


# Places, and what the frozen model computes there


@dataclass(frozen=True, slots=True)
class Place:
    """A main-thread label in front of which main might have written a tag.

    label_index: counts the labels of the layout.
    outcome:     what main wrote: 0 a promise, 1 a sync, 2 another token.
    """

    label_index: int
    may_promise: bool
    may_sync: bool
    outcome: int


def find_places(layout: Layout, control: ControlTokens, max_chunks: int) -> list[Place]:
    """Return the places of an answer: those where `answer.constraints` allows a tag."""
    closes = set(control.promise_close.values())
    outcomes = {control.promise_open: 0, control.sync: 1}
    places = []
    in_topic = False
    chunks = 0
    unjoined_chunks = 0
    label_index = 0
    for token, thread, label in zip(layout.tokens, layout.thread, layout.label, strict=True):
        if thread == MAIN:
            if token == control.promise_open:
                in_topic = True
            elif token in closes:
                in_topic = False
                chunks += 1
                unjoined_chunks += 1
            elif token == control.sync:
                unjoined_chunks = 0
        if label is None:
            continue
        may_promise = chunks < max_chunks
        may_sync = unjoined_chunks > 0
        if thread == MAIN and not in_topic and (may_promise or may_sync):
            outcome = outcomes.get(label, OTHER)
            places.append(Place(label_index, may_promise, may_sync, outcome))
        label_index += 1
    return places


@dataclass(frozen=True, slots=True)
class Features:
    """The places of all answers to one prompt.

    hidden_PD:  bfloat16, the hidden state in front of the head.
    logodds_PK: float32, log-odds of the tags against other tokens as the policy decodes; -inf
                where the tag is not allowed.
    outcome_P:  int64, as `Place` has it.
    number_P:   int64, the number of the answer.
    """

    hidden_PD: Tensor
    logodds_PK: Tensor
    outcome_P: Tensor
    number_P: Tensor


def collect(
    load: Callable[[], LoadedModel],
    groups: Sequence[Sequence[Sample]],
    folder: Path,
    *,
    joining: Joining,
    max_chunks: int,
) -> list[Path]:
    """Write the features of each group of samples into a file of `folder`; return the files.

    Files that are there are kept, so an interrupted run can go on. The processes share the work.

    load:   loads the policy, merged; called only if features are missing.
    groups: the answers to one prompt each.
    """
    from safetensors.torch import save_file

    paths = [folder / f"{index:05}.safetensors" for index in range(len(groups))]
    missing = [
        (path, group)
        for path, group in share_of(list(zip(paths, groups, strict=True)))
        if not path.exists()
    ]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        loaded = load()
        for path, group in tracked(missing, "features", len(missing)):
            features = features_of(loaded, group, joining=joining, max_chunks=max_chunks)
            with written_whole(path) as partial:
                save_file({name: getattr(features, name) for name in features.__slots__}, partial)
    processes().wait_for_everyone()
    return paths


def features_of(
    loaded: LoadedModel, samples: Sequence[Sample], *, joining: Joining, max_chunks: int
) -> Features:
    """Run the model over the answers to one prompt, and return the features of their places."""
    control = loaded.checkpoint.control
    settings = SftConfig(scheme=loaded.checkpoint.scheme, joins=(joining,), max_tokens=maxsize)
    hidden = []
    logodds = []
    outcomes: list[int] = []
    numbers: list[int] = []
    for sample in samples:
        layouts = compile_answer(
            sample.prompt_ids, sample.segments, control.async_close, sample.end, settings
        )
        for layout in layouts:
            places = find_places(layout, control, max_chunks)
            hidden_LD, logits_LV = head_pass(loaded.model, layout)
            index_P = torch.tensor([place.label_index for place in places], dtype=torch.long)
            hidden.append(hidden_LD[index_P].to("cpu", torch.bfloat16))
            logodds.append(tag_logodds(logits_LV[index_P], places, loaded))
            outcomes += [place.outcome for place in places]
            numbers += [sample.number] * len(places)
    return Features(
        torch.cat(hidden), torch.cat(logodds), torch.tensor(outcomes), torch.tensor(numbers)
    )


def head_pass(model: Any, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return what goes into the head and what comes out of it at each label of an answer."""
    passed = []

    def keep(_head: Any, inputs: tuple[Tensor], logits_1LV: Tensor) -> None:
        passed.append((inputs[0][0], logits_1LV[0]))

    hook = model.get_output_embeddings().register_forward_hook(keep)
    try:
        with torch.inference_mode():
            label_logprobs(model, [layout])
    finally:
        hook.remove()
    [(hidden_LD, logits_LV)] = passed
    return hidden_LD, logits_LV


def tag_logodds(logits_PV: Tensor, places: Sequence[Place], loaded: LoadedModel) -> Tensor:
    """Return logodds_PK, the biases of the checkpoint included."""
    checkpoint = loaded.checkpoint
    control = checkpoint.control
    logits_PV = logits_PV.float().cpu()
    bias_K = torch.tensor([checkpoint.eagerness + checkpoint.promise_bias, checkpoint.sync_bias])
    tag_PK = logits_PV[:, [control.promise_open, control.sync]] + bias_K
    others_PV = logits_PV.index_fill(1, torch.tensor(sorted(control.ids)), -torch.inf)
    logodds_PK = tag_PK - others_PV.logsumexp(1, keepdim=True)
    allowed = [(place.may_promise, place.may_sync) for place in places]
    allowed_PK = torch.tensor(allowed, dtype=torch.bool).view(-1, 2)
    return logodds_PK.masked_fill(~allowed_PK, -torch.inf)


# The objective and its gradient


@dataclass(frozen=True, slots=True)
class LearnedTags:
    """u_KD and b_K in float32: logit' = logit + u . h + b."""

    u_KD: Tensor
    b_K: Tensor


@dataclass(frozen=True, slots=True)
class Choices:
    """The places of all scored answers, with what the scores say of their outcomes.

    answers:     number of scored answers.
    hidden:      by prompt, hidden_PD in bfloat16; the other columns have all places in this order.
    advantage_P: the score of the place's answer minus the mean of the others.
    sampled_P:   log-probability of the outcome under the policy that sampled it.
    """

    answers: int
    hidden: tuple[Tensor, ...]
    logodds_PK: Tensor
    outcome_P: Tensor
    advantage_P: Tensor
    sampled_P: Tensor


def join_scores(
    prompts: Iterable[tuple[Features, Mapping[int, float]]], extra_bias: Mapping[int, float]
) -> Choices:
    """Join the features of each prompt with the scores of its answers, by their numbers.

    A prompt with fewer than two scores, or an answer without one, is left out.

    extra_bias: by number, what was added to the promise's logit beyond what the policy adds.
    """
    answers = 0
    hidden = []
    columns = []
    for features, scores in prompts:
        if len(scores) < 2:
            continue
        answers += len(scores)
        total = sum(scores.values())
        is_scored_P = torch.isin(features.number_P, torch.tensor(list(scores)))
        numbers = features.number_P[is_scored_P].tolist()
        others = [(total - scores[number]) / (len(scores) - 1) for number in numbers]
        hidden.append(features.hidden_PD[is_scored_P])
        columns.append(
            (
                features.logodds_PK[is_scored_P],
                features.outcome_P[is_scored_P],
                torch.tensor([scores[number] for number in numbers]) - torch.tensor(others),
                torch.tensor([extra_bias.get(number, 0.0) for number in numbers]),
            )
        )
    if not answers:
        raise PastaError("no prompt has two answers with a score: eagerness cannot be learned")
    logodds_PK, outcome_P, advantage_P, bias_P = map(torch.cat, zip(*columns, strict=True))
    bias_PK = torch.stack([bias_P, torch.zeros_like(bias_P)], 1)
    sampled_P = taken_logprobs(logodds_PK + bias_PK, outcome_P)
    return Choices(answers, tuple(hidden), logodds_PK, outcome_P, advantage_P, sampled_P)


def outcome_logprobs(logodds_PK: Tensor) -> Tensor:
    """Return the log-probabilities of promise, sync and other, [P, 3]."""
    other_P1 = torch.zeros_like(logodds_PK[:, :1])
    return torch.cat([logodds_PK, other_P1], 1).log_softmax(1)


def taken_logprobs(logodds_PK: Tensor, outcome_P: Tensor) -> Tensor:
    return outcome_logprobs(logodds_PK).gather(1, outcome_P[:, None])[:, 0]


def shifts(choices: Choices, tags: LearnedTags) -> Tensor:
    """Return shift_PK, u . h + b."""
    products = [hidden_PD.float() @ tags.u_KD.T for hidden_PD in choices.hidden]
    return torch.cat(products) + tags.b_K


def gradient_at(choices: Choices, shift_PK: Tensor) -> LearnedTags:
    """Return the gradient of the objective without its penalty, the mean over answers."""
    logodds_PK = choices.logodds_PK + shift_PK
    ratio_P = (taken_logprobs(logodds_PK, choices.outcome_P) - choices.sampled_P).exp()
    weight_P = ratio_P.clamp(*WEIGHT_RANGE) * choices.advantage_P
    taken_PK = one_hot(choices.outcome_P, OTHER + 1)[:, :OTHER]
    probability_PK = outcome_logprobs(logodds_PK).exp()[:, :OTHER]
    pull_PK = weight_P[:, None] * (taken_PK - probability_PK) / choices.answers
    u_KD = torch.zeros(OTHER, choices.hidden[0].shape[1])
    pulls = torch.split(pull_PK, [len(hidden_PD) for hidden_PD in choices.hidden])
    for hidden_PD, pull_of_prompt_PK in zip(choices.hidden, pulls, strict=True):
        u_KD += pull_of_prompt_PK.T @ hidden_PD.float()
    return LearnedTags(u_KD, pull_PK.sum(0))


def divergence(choices: Choices, shift_PK: Tensor) -> float:
    """Return KL(p' | policy) in nats, summed over places, the mean over answers."""
    policy_PO = outcome_logprobs(choices.logodds_PK)
    learned_PO = outcome_logprobs(choices.logodds_PK + shift_PK)
    terms_PO = learned_PO.exp() * (learned_PO - policy_PO)
    is_possible_PO = policy_PO > -torch.inf
    return float(terms_PO[is_possible_PO].sum()) / choices.answers


def expected_tags(choices: Choices, shift_PK: Tensor) -> list[float]:
    """Return how many promises and syncs p' expects at the places of an answer."""
    probability_PO = outcome_logprobs(choices.logodds_PK + shift_PK).exp()
    return (probability_PO.sum(0) / choices.answers).tolist()[:OTHER]


# Learning


@dataclass(frozen=True, slots=True)
class Scale:
    """The unit of learning: (h - mean) / size has a mean square length of 1.

    Hidden states have a large constant part that would slow learning down, and lengths that differ
    between models. b takes up the mean.
    """

    mean_D: Tensor
    size: float

    @classmethod
    def of(cls, choices: Choices) -> Scale:
        count = len(choices.outcome_P)
        sums = [hidden_PD.float().sum(0) for hidden_PD in choices.hidden]
        mean_D = torch.stack(sums).sum(0) / count
        squares = [
            float((hidden_PD.float() - mean_D).square().sum()) for hidden_PD in choices.hidden
        ]
        return cls(mean_D, (sum(squares) / count) ** 0.5)

    def step(self, tags: LearnedTags, gradient: LearnedTags, rate: float) -> LearnedTags:
        """Return `tags` after a step of gradient ascent that is taken in this unit."""
        centred_KD = gradient.u_KD - gradient.b_K[:, None] * self.mean_D
        change_KD = rate * (centred_KD / self.size**2 - 2 * PENALTY * tags.u_KD)
        change_K = rate * gradient.b_K - change_KD @ self.mean_D
        return LearnedTags(tags.u_KD + change_KD, tags.b_K + change_K)


def learn(choices: Choices) -> tuple[LearnedTags, dict[str, float]]:
    """Learn u and b by gradient ascent; return them and the figures of the round.

    Raises PastaError if no two answers to a prompt differ in score.
    """
    if not choices.advantage_P.any():
        raise PastaError(
            "no two answers to a prompt differ in their score: eagerness cannot be learned",
            hint="Give more --prompts or --samples.",
        )
    tags = LearnedTags(torch.zeros(OTHER, choices.hidden[0].shape[1]), torch.zeros(OTHER))
    scale = Scale.of(choices)
    shift_PK = shifts(choices, tags)
    before = expected_tags(choices, shift_PK)
    probability_PK = outcome_logprobs(choices.logodds_PK).exp()[:, :OTHER]
    curvature = float((probability_PK * (1 - probability_PK)).sum()) / choices.answers
    for _ in tracked(range(PASSES), "eagerness", PASSES):
        tags = scale.step(tags, gradient_at(choices, shift_PK), 1 / curvature)
        shift_PK = shifts(choices, tags)
        while divergence(choices, shift_PK) > MAX_DIVERGENCE:
            tags = LearnedTags(SHRINKING * tags.u_KD, SHRINKING * tags.b_K)
            shift_PK *= SHRINKING
    after = expected_tags(choices, shift_PK)
    figures = {
        "answers": choices.answers,
        "divergence": divergence(choices, shift_PK),
        "promises_before": before[0],
        "promises_after": after[0],
        "syncs_before": before[1],
        "syncs_after": after[1],
    }
    log.info("eagerness: %s", ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return tags, figures
