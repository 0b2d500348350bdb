"""Stage 2 on a tiny model: a whole round, and every stage resumed to the same result."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from pasta_decoding.data.lines import read_lines
from pasta_decoding.data.questions import question_of
from pasta_decoding.errors import PastaError
from pasta_decoding.models.load import load_base
from pasta_decoding.runtime.local import LocalDecoder, torch_decoder
from pasta_decoding.training import pairs as pairs_module
from pasta_decoding.training import preference
from pasta_decoding.training import sample as sample_module
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.likelihood import likelihood_rate, load_nll
from pasta_decoding.training.loop import GOES_ON
from pasta_decoding.training.pairs import Reference
from pasta_decoding.training.preference import Surroundings, share_samples, train_preference
from pasta_decoding.training.run import begin_run
from pasta_decoding.training.score import Quality
from tests.checkpoint import TinyCheckpoint, make_adapter, make_base
from tests.training.test_guard import spoil

Item = TypeVar("Item")
INSTRUCTIONS = ["Why?", "How?", "What?", "Who?", "When?", "Where?"]


def quietly(items: Iterable[Item], _doing: str, _total: int) -> Iterable[Item]:
    return items


def length_rate(_instruction: str, texts: Sequence[str]) -> list[float]:
    """A quality that needs no model: how many different characters a text has."""
    return [float(len(set(text))) for text in texts]


class World:
    """A tiny policy and what a run over it needs; notes which adapters were decoded with."""

    def __init__(self, checkpoint: TinyCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.loaded: list[Path] = []
        self.config = PreferenceConfig(
            prompts=("six.jsonl",),
            policy=str(checkpoint.adapter),
            baseline=str(checkpoint.adapter),
            samples=6,
            baseline_samples=2,
            max_tokens=80,
            learning_rate=1e-3,
            warmup_steps=0,
            pairs_per_step=1,
            save_every_steps=1,
            bf16=False,
        )

    def around(self, out: Path) -> Surroundings:
        return Surroundings(
            base=self.checkpoint.base,
            out=out,
            load_decoder=self.load_decoder,
            load_quality=lambda: Quality("characters", length_rate, idle_cost=2.0),
            say=lambda _line: None,
            track=quietly,
            draw=lambda _doing: nullcontext(lambda _progress: None),
        )

    def load_decoder(self, adapter: Path) -> LocalDecoder:
        self.loaded.append(adapter)
        return torch_decoder(self.checkpoint.base, adapter)

    def train(self, out: Path, config: PreferenceConfig | None = None) -> dict[str, Any]:
        prompts = [question_of(one) for one in INSTRUCTIONS]
        return train_preference(config or self.config, prompts, self.around(out))


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a tiny policy that ends its answers now and then: its end weighs more."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("talkative")
    base = shutil.copytree(tiny_checkpoint.base, folder / "base")
    model, tokenizer = load_base(base, dtype="float32")
    weights = load_file(base / "model.safetensors")
    weights["model.embed_tokens.weight"][tokenizer.eos_token_id] *= 2.5
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    del model
    return World(TinyCheckpoint(base, make_adapter(base, folder / "adapter")))


@pytest.fixture(scope="module")
def finished(tiny: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of one round without a break."""
    out = tmp_path_factory.mktemp("run") / "out"
    tiny.train(out)
    return out


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def outcome(out: Path) -> dict[str, Any]:
    """What a round leaves, without the clock and the order in which answers ended."""
    folder = out / "round-1"
    found: dict[str, Any] = {
        name: lines(folder / f"{name}.jsonl") for name in ("parts", "scores", "pairs", "reference")
    }
    for name in ("baseline", "round-1/samples"):
        found[name] = sorted(lines(out / f"{name}.jsonl"), key=lambda s: (s["prompt"], s["number"]))
    found["summary"] = json.loads((folder / "summary.json").read_text())
    found["metrics"] = [
        {k: v for k, v in line.items() if k != "seconds"}
        for line in read_lines(folder / "train" / "metrics.jsonl")
    ]
    found["adapter"] = {path.name: path.read_bytes() for path in (out / "adapter").iterdir()}
    return found


def test_a_round_leaves_all_samples_scores_pairs_and_an_adapter(
    finished: Path, tiny: World
) -> None:
    found = outcome(finished)
    assert len(found["round-1/samples"]) == 6 * 6
    assert len(found["baseline"]) == 6 * 2
    assert len(found["parts"]) == len(found["scores"]) == 6 * 6
    assert len({sample["seed"] for sample in found["round-1/samples"]}) == 6 * 6
    assert 2 <= len(found["pairs"]) == len(found["reference"]) <= 6
    assert any(
        segment["kind"] == "chunk" for s in found["round-1/samples"] for segment in s["segments"]
    )
    assert not any("<promise" in answer["annotated"] for answer in found["baseline"])
    before = {path.name: path.read_bytes() for path in tiny.checkpoint.adapter.iterdir()}
    weights = "adapter_model.safetensors"
    assert found["adapter"][weights] != before[weights]
    assert found["adapter"]["pasta.json"] == before["pasta.json"]


def test_the_best_is_never_one_that_a_limit_cut_and_scores_more_than_a_finished_worst(
    finished: Path,
) -> None:
    scores = {
        (one["part"]["prompt"], one["part"]["number"]): one
        for one in lines(finished / "round-1" / "scores.jsonl")
    }
    for pair in lines(finished / "round-1" / "pairs.jsonl"):
        best, worst = (scores[pair["prompt"], pair[name]] for name in ("best", "worst"))
        assert best["part"]["finished"]
        cut = not worst["part"]["finished"]
        assert cut or best["score"] > worst["score"]
        own = [one for (prompt, _), one in scores.items() if prompt == pair["prompt"]]
        assert len(own) == 6
        finished_ones = sum(one["part"]["finished"] for one in own)
        assert pair["candidates"] == (6 if cut else finished_ones)


def test_at_the_first_step_nothing_has_moved_away_from_the_reference(finished: Path) -> None:
    """The gap is 0 there, exactly: reference and training compute the same forward."""
    first = read_lines(finished / "round-1" / "train" / "metrics.jsonl")[0]
    assert first["gap"] == 0
    assert first["drift"] == 0
    assert first["square"] == pytest.approx(first["target"] ** 2)
    expected = 0.005 * first["sft"] + 0.995 * first["square"]
    assert first["loss"] == pytest.approx(expected, rel=1e-3)


def test_training_brings_the_gap_towards_its_target(tiny: World, tmp_path: Path) -> None:
    longer = replace(tiny.config, epochs=12, save_every_steps=1000)
    share_samples(tiny_run(tiny, tmp_path / "first"), tmp_path / "out", longer)
    tiny.train(tmp_path / "out", longer)
    metrics = read_lines(tmp_path / "out" / "round-1" / "train" / "metrics.jsonl")
    assert metrics[-1]["gap"] > 0.5 * metrics[-1]["target"]
    assert metrics[-1]["accuracy"] == 1


def tiny_run(tiny: World, out: Path) -> Path:
    tiny.train(out)
    return out


def dying(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Return a function that does what `function` does, until it is killed at a later call."""
    made = 0

    def die(*arguments: Any, **settings: Any) -> Any:
        nonlocal made
        made += 1
        if made == calls:
            raise KeyboardInterrupt
        return function(*arguments, **settings)

    return die


PLACES = {
    "in the baseline's sampling": (sample_module, "_sample", 5),
    "in sampling": (sample_module, "_sample", 6 * 2 + 9),
    "in scoring": (preference, "measure", 3),
    "before pairs are written": (preference, "summarise", 1),
    "in the reference": (pairs_module, "log_probabilities", 2),
    "before the reference is written": (preference, "reference_sums", 1),
    "in training": (torch.optim.AdamW, "step", 2),
    "before the adapter is written": (preference, "save_adapter", 1),
    "before the last copy": (preference, "copy_whole", 1),
}
QUICK = ["in sampling", "in training", "before the last copy"]
SLOW = [pytest.param(place, marks=pytest.mark.slow) for place in PLACES if place not in QUICK]


@pytest.mark.parametrize("place", [*QUICK, *SLOW])
def test_a_round_killed_anywhere_goes_on_to_the_same_result(
    place: str,
    tiny: World,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, name, calls = PLACES[place]
    out = tmp_path / "out"
    with monkeypatch.context() as context:
        context.setattr(module, name, dying(getattr(module, name), calls))
        with pytest.raises(KeyboardInterrupt):
            tiny.train(out)
    assert not (out / "adapter").exists()
    grown = [out / "baseline.jsonl", out / "round-1" / "samples.jsonl"]
    last = next(path for path in reversed(grown) if path.exists())
    with last.open("a") as torn:  # what a kill may leave
        torn.write('{"prompt": "')
    tiny.train(out)
    assert outcome(out) == outcome(finished)


def test_a_finished_run_is_left_as_it_is(tiny: World, finished: Path) -> None:
    before, loaded = outcome(finished), len(tiny.loaded)
    found = tiny.train(finished)
    assert outcome(finished) == before
    assert len(tiny.loaded) == loaded
    assert found["adapter"] == str(finished / "adapter")


def test_the_compute_of_every_stage_is_noted_once(tiny: World, finished: Path) -> None:
    tiny.train(finished)
    spent = lines(finished / "spent.jsonl")
    stages = [(line["round"], line["stage"]) for line in spent if line["tokens"]]
    wanted = [(0, "baseline"), (1, "sample"), (1, "parts"), (1, "reference"), (1, "train")]
    assert stages == wanted


def test_a_run_folder_refuses_other_settings_and_other_prompts(tiny: World, finished: Path) -> None:
    before = outcome(finished)
    with pytest.raises(PastaError, match="other settings"):
        tiny.train(finished, replace(tiny.config, alpha=0.5))
    with pytest.raises(PastaError, match="the prompts are not those") as caught:
        train_preference(tiny.config, [question_of("Else?")], tiny.around(finished))
    assert caught.value.hint == "Choose another --out, or restore the files of --prompts."
    assert outcome(finished) == before


def test_another_lambda_takes_over_samples_and_what_was_measured(
    tiny: World, finished: Path, tmp_path: Path
) -> None:
    loaded = len(tiny.loaded)
    quality_only = replace(tiny.config, lambda_=None)
    share_samples(finished, tmp_path / "inf", quality_only)
    tiny.train(tmp_path / "inf", quality_only)
    assert len(tiny.loaded) == loaded
    ours, theirs = outcome(tmp_path / "inf"), outcome(finished)
    for name in ("baseline", "round-1/samples", "parts"):
        assert ours[name] == theirs[name]
    assert ours["scores"] != theirs["scores"]
    shared = lines(finished / "spent.jsonl")[:3]
    assert lines(tmp_path / "inf" / "spent.jsonl")[:3] == shared, "what it cost counts for both"


def test_rejection_sampling_finetunes_on_the_best_answers_alone(
    tiny: World, finished: Path, tmp_path: Path
) -> None:
    rejection = replace(tiny.config, objective="rejection")
    share_samples(finished, tmp_path, rejection)
    tiny.train(tmp_path, rejection)
    ours, theirs = (
        lines(out / "round-1" / "train" / "metrics.jsonl") for out in (tmp_path, finished)
    )
    assert ours[0]["sft"] == ours[0]["loss"] == pytest.approx(theirs[0]["sft"])
    assert "gap" not in ours[0]
    assert not (tmp_path / "round-1" / "reference.jsonl").exists()
    assert (tmp_path / "round-1" / "pairs.jsonl").read_text() == (
        finished / "round-1" / "pairs.jsonl"
    ).read_text()


def test_samples_made_with_other_settings_are_not_taken_over(
    tiny: World, finished: Path, tmp_path: Path
) -> None:
    other = replace(tiny.config, seed=1, max_tokens=90, learning_rate=1.0)
    with pytest.raises(PastaError) as caught:
        share_samples(finished, tmp_path / "out", other)
    assert str(caught.value) == (f"the samples of {finished} were made with other max_tokens, seed")
    with pytest.raises(PastaError, match="holds no run"):
        share_samples(tmp_path / "nothing", tmp_path / "out", tiny.config)
    assert not (tmp_path / "out").exists()


def test_a_second_round_samples_from_the_first_ones_adapter(tiny: World, tmp_path: Path) -> None:
    two = replace(tiny.config, rounds=2)
    tiny.loaded.clear()
    tiny.train(tmp_path, two)
    policy, first = tiny.checkpoint.adapter, tmp_path / "round-1" / "adapter"
    second = tmp_path / "round-2" / "adapter"
    assert tiny.loaded == [policy, policy, first], "baseline, round 1, round 2"
    seeds = [{s["seed"] for s in lines(tmp_path / f"round-{n}/samples.jsonl")} for n in (1, 2)]
    assert not seeds[0] & seeds[1]
    weights = "adapter_model.safetensors"
    assert (tmp_path / "adapter" / weights).read_bytes() == (second / weights).read_bytes()


def test_a_loss_that_is_no_number_stops_training_and_keeps_what_was_saved(
    tiny: World, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_samples(finished, tmp_path, tiny.config)

    def no_numbers(_model: Any, examples: Iterable[Any], **_settings: Any) -> list[Reference]:
        count = len(list(examples))
        return [Reference(-1.0, -2.0)] + [Reference(float("nan"), -1.0)] * (count - 1)

    monkeypatch.setattr(preference, "reference_sums", no_numbers)
    with pytest.raises(PastaError, match=r"^the loss is not a number at step [12]$") as caught:
        tiny.train(tmp_path)
    assert "--samples-from" in caught.value.hint
    assert not (tmp_path / "adapter").exists()
    assert len(lines(tmp_path / "round-1" / "samples.jsonl")) == 6 * 6


def test_weights_that_are_no_numbers_are_not_saved(
    tiny: World, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_samples(finished, tmp_path, tiny.config)
    spoil(monkeypatch, after=len(lines(finished / "round-1" / "pairs.jsonl")))  # the last step
    with pytest.raises(PastaError, match="weights are no longer numbers"):
        tiny.train(tmp_path)
    assert not (tmp_path / "round-1" / "adapter").exists()


def test_control_c_in_the_last_step_stops_behind_the_rounds_adapter(
    tiny: World, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_samples(finished, tmp_path, tiny.config)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    last = len(lines(finished / "round-1" / "pairs.jsonl"))
    step, steps = torch.optim.AdamW.step, 0

    def interrupted(self: torch.optim.AdamW, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *arguments)

    try:
        with monkeypatch.context() as context:
            context.setattr(torch.optim.AdamW, "step", interrupted)
            with pytest.raises(KeyboardInterrupt, match=GOES_ON):
                tiny.train(tmp_path)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (tmp_path / "round-1" / "adapter").is_dir()
    assert not (tmp_path / "adapter").exists()
    tiny.train(tmp_path)
    assert outcome(tmp_path) == outcome(finished)


def test_another_runs_folder_is_left_alone_by_samples_from(
    tiny: World, finished: Path, tmp_path: Path
) -> None:
    begin_run(tmp_path, replace(tiny.config, seed=7))
    before = {path.name for path in tmp_path.rglob("*")}
    with pytest.raises(PastaError, match=r"was begun with other settings: seed \(7 -> 0\)"):
        share_samples(finished, tmp_path, tiny.config)
    assert {path.name for path in tmp_path.rglob("*")} == before


def test_of_a_torn_file_the_whole_lines_are_shared(
    tiny: World, finished: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(finished, tmp_path / "source"))
    samples = source / "round-1" / "samples.jsonl"
    whole = samples.read_bytes()
    samples.write_bytes(whole + '{"prompt": "é'.encode()[:-1])
    share_samples(source, tmp_path / "out", tiny.config)
    assert (tmp_path / "out" / "round-1" / "samples.jsonl").read_bytes() == whole


def test_nothing_to_learn_from_is_an_error(tiny: World, tmp_path: Path) -> None:
    cut = replace(tiny.config, max_tokens=1)
    with pytest.raises(PastaError, match="no pair of a better and a worse answer") as caught:
        tiny.train(tmp_path / "out", cut)
    assert "--max-tokens" in caught.value.hint
    with pytest.raises(PastaError, match="no prompt to answer"):
        train_preference(tiny.config, [], tiny.around(tmp_path / "none"))


def test_adapters_that_do_not_fit_are_refused_before_the_work(tiny: World, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", seed=1)
    stranger = make_adapter(base, tmp_path / "stranger")
    with pytest.raises(PastaError, match="trained on different base models"):
        tiny.train(tmp_path / "out", replace(tiny.config, baseline=str(stranger)))
    with pytest.raises(PastaError, match="holds a whole model"):
        tiny.train(tmp_path / "out", replace(tiny.config, policy=str(base)))
    assert not (tmp_path / "out").exists()


def test_nats_quality_prefers_what_the_baseline_would_write_and_no_repetition(
    tiny: World,
) -> None:
    nll = load_nll(tiny.checkpoint.base, tiny.checkpoint.adapter, dtype="float32")
    quality = Quality("nats", likelihood_rate(nll), idle_cost=2.0)
    decoder = torch_decoder(tiny.checkpoint.base, tiny.checkpoint.adapter)
    rated = quality.rate("Why?", ["", "abc", "a b c d " * 6])
    prompt = decoder.prompt_ids("Why?", 10)
    with torch.no_grad():
        ids = [*prompt, *decoder.encoder.encode_text("abc")]
        loaded, tokenizer = load_quality_model(tiny)
        logprobs_TV = loaded(torch.tensor([ids])).logits[0].log_softmax(-1)
    labels = [*ids[len(prompt) :], tokenizer.eos_token_id]
    each = [float(logprobs_TV[len(prompt) - 1 + n, label]) for n, label in enumerate(labels)]
    assert rated[1] == pytest.approx(sum(each) / 4, abs=1e-4)
    assert rated[2] < rated[1] - 2, "most of its runs of four words are repeated"


def load_quality_model(tiny: World) -> tuple[Any, Any]:
    from pasta_decoding.models.load import load_model

    loaded = load_model(tiny.checkpoint.base, tiny.checkpoint.adapter)
    return loaded.model, loaded.tokenizer
