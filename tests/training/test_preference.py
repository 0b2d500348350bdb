"""Stage 2 on a tiny model: a whole round, and every stage resumed to the same result."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import open_local
from pasta_decoding.data.lines import read_lines
from pasta_decoding.data.rows import Row, question_of
from pasta_decoding.errors import PastaError
from pasta_decoding.models.catalog import adapter_on
from pasta_decoding.models.load import load_model
from pasta_decoding.scheduling.decoder import LocalDecoder
from pasta_decoding.training import pairs as pairs_module
from pasta_decoding.training import preference, quality, score
from pasta_decoding.training import sample as sample_module
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.lora import save
from pasta_decoding.training.preference import PreferenceRun, share_samples
from pasta_decoding.training.run import write_settings
from tests.checkpoint import TinyCheckpoint, make_adapter, make_base, torch_decoder
from tests.golden.golden import talkative
from tests.training.tiny_runs import files, losses

PROMPTS = [question_of(question) for question in ("Why?", "How?", "What?")]
WEIGHTS = "adapter_model.safetensors"
PART = '<promise topic="a" tokens="10"/><async>Aha.</async>'
REPLAY = [
    Row("r1", "", "Why?", f"Two: {PART} and more.<sync/> So it is."),
    Row("r2", "", "How?", "Like this."),
]


class World:
    """A tiny policy and what a run over it needs."""

    def __init__(self, checkpoint: TinyCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.config = PreferenceConfig(
            prompts=("three.jsonl",),
            policy=str(checkpoint.adapter),
            baseline=str(checkpoint.adapter),
            engine="torch",
            dtype="float32",
            samples=4,
            quality="likelihood",
            replay=("rows.jsonl",),
            max_tokens=40,
            learning_rate=1e-3,
            warmup_steps=0,
            pairs_per_step=1,
            save_every_steps=1,
            bf16=False,
        )

    def train(
        self, out: Path, config: PreferenceConfig | None = None, prompts: Any = PROMPTS
    ) -> Path:
        config = config or self.config
        run = PreferenceRun(config, self.checkpoint.base, out, out / "cache", replay=REPLAY)
        return run.train(prompts)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return a list of the adapters that are decoded with from now on."""
    adapters: list[str | None] = []

    def noting(config: EngineConfig, cache: Path) -> LocalDecoder:
        adapters.append(config.adapter)
        return open_local(config, cache)

    monkeypatch.setattr(preference, "open_local", noting)
    return adapters


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a tiny policy that ends its answers now and then."""
    folder = tmp_path_factory.mktemp("talkative")
    base = talkative(make_base(folder / "base"))
    return World(TinyCheckpoint(base, make_adapter(base, folder / "adapter")))


@pytest.fixture(scope="module")
def finished_run(tiny: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of one round without a break."""
    out = tmp_path_factory.mktemp("run") / "out"
    tiny.train(out)
    return out


@pytest.fixture
def sampled(tiny: World, finished_run: Path, tmp_path: Path) -> Path:
    """Return the folder of a round that is sampled and measured, and not trained."""
    share_samples(finished_run, tmp_path / "sampled", tiny.config)
    return tmp_path / "sampled"


def outcome(out: Path) -> dict[str, Any]:
    """What a round leaves, without the clock and the order in which answers ended."""
    folder = out / "round-1"
    names = ("parts", "scores", "pairs")
    results: dict[str, Any] = {name: read_lines(folder / f"{name}.jsonl") for name in names}
    for name in ("baseline", "round-1/samples"):
        lines = read_lines(out / f"{name}.jsonl")
        results[name] = sorted(lines, key=lambda s: (s["prompt"], s["number"]))
    results["summary"] = json.loads((folder / "summary.json").read_text())
    return results | {"metrics": losses(folder / "train"), "adapter": files(out / "adapter")}


def test_a_round_leaves_all_samples_scores_pairs_and_an_adapter(
    finished_run: Path, tiny: World
) -> None:
    results = outcome(finished_run)
    samples = results["round-1/samples"]
    assert len(samples) == len(results["parts"]) == len(results["scores"]) == 3 * 4
    assert len({sample["seed"] for sample in samples}) == 3 * 4
    assert any(segment["kind"] == "ChunkRun" for s in samples for segment in s["segments"])
    assert not any("<promise" in answer["annotated"] for answer in results["baseline"])
    assert 2 <= len(results["pairs"]) <= 3
    before = files(tiny.checkpoint.adapter)
    assert results["adapter"][WEIGHTS] != before[WEIGHTS]
    assert results["adapter"]["pasta.json"] == before["pasta.json"]


def test_at_the_first_step_nothing_has_moved_away_from_the_reference(finished_run: Path) -> None:
    """The ratios are 0 there, exactly: reference and training compute the same forward."""
    first = read_lines(finished_run / "round-1" / "train" / "metrics.jsonl")[0]
    assert (first["ratio_best"], first["ratio_worst"]) == (0, 0)


def test_training_brings_the_ratios_towards_their_targets(tiny: World, sampled: Path) -> None:
    config = replace(tiny.config, epochs=12, save_every_steps=1000)
    tiny.train(sampled, config)
    lines = read_lines(sampled / "round-1" / "train" / "metrics.jsonl")
    assert lines[-1]["ratio_best"] > 0.2
    assert lines[-1]["ratio_worst"] < -0.5


def test_what_was_watched_stands_in_the_summary(finished_run: Path) -> None:
    summary = json.loads((finished_run / "round-1" / "summary.json").read_text())
    assert summary["watched"] == read_lines(finished_run / "round-1" / "watch.jsonl")
    assert summary["watched"][0].keys() == {"step", "end", "sync"}
    assert summary["stopped"] is None


@pytest.mark.parametrize("objective", ["square", "sigmoid"])
def test_bonbon_s_gap_grows(objective: Any, tiny: World, sampled: Path) -> None:
    config = replace(tiny.config, epochs=8, objective=objective, save_every_steps=1000)
    tiny.train(sampled, config)
    lines = read_lines(sampled / "round-1" / "train" / "metrics.jsonl")
    assert (lines[0]["gap"], lines[-1]["gap"] > 1) == (0, True)


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


MOMENTS = {
    "in the baseline's sampling": (sample_module, "append_line", 2),
    "in sampling": (sample_module, "append_line", 3 + 5),
    "in grading": (quality, "encode_grade", 2),
    "before pairs are written": (score, "summarise", 1),
    "in the reference": (pairs_module, "label_logprobs", 2),
    "in training": (torch.optim.AdamW, "step", 2),
    "before the adapter is written": (preference, "save", 1),
    "before the last copy": (preference, "copy_whole", 1),
}
QUICK = ["in sampling", "in training"]
SLOW = [pytest.param(moment, marks=pytest.mark.slow) for moment in MOMENTS if moment not in QUICK]


@pytest.mark.parametrize("moment", [*QUICK, *SLOW])
def test_a_round_killed_anywhere_goes_on_to_the_same_result(
    moment: str, tiny: World, finished_run: Path, tmp_path: Path
) -> None:
    module, name, calls = MOMENTS[moment]
    with pytest.MonkeyPatch.context() as context:
        context.setattr(module, name, dying(getattr(module, name), calls))
        with pytest.raises(KeyboardInterrupt):
            tiny.train(tmp_path)
    assert not (tmp_path / "adapter").exists()
    grown = [tmp_path / "baseline.jsonl", tmp_path / "round-1" / "samples.jsonl"]
    last = next(path for path in reversed(grown) if path.exists())
    with last.open("a") as torn:  # what a kill may leave
        torn.write('{"prompt": "')
    tiny.train(tmp_path)
    assert outcome(tmp_path) == outcome(finished_run)


def test_a_finished_run_is_left_as_it_is_and_refuses_other_settings_and_prompts(
    tiny: World, finished_run: Path, loaded: list[str | None]
) -> None:
    before = outcome(finished_run)
    assert tiny.train(finished_run) == finished_run / "adapter"
    with pytest.raises(PastaError, match="other settings"):
        tiny.train(finished_run, replace(tiny.config, alpha=0.5))
    with pytest.raises(PastaError, match="the prompts are not those") as caught:
        tiny.train(finished_run, prompts=[question_of("Else?")])
    assert caught.value.hint == "Choose another --out, or restore the files of --prompts."
    assert outcome(finished_run) == before
    assert not loaded


def test_another_lambda_takes_over_samples_and_what_was_measured(
    tiny: World, finished_run: Path, sampled: Path, loaded: list[str | None]
) -> None:
    """Here by rejection sampling, which finetunes on the best answers alone."""
    source = finished_run / "round-1" / "samples.jsonl"
    assert (sampled / "round-1" / "samples.jsonl").read_bytes() == source.read_bytes()
    tiny.train(sampled, replace(tiny.config, lambda_=None, objective="rejection"))
    assert not loaded
    ours, theirs = (read_lines(out / "round-1" / "scores.jsonl") for out in (sampled, finished_run))
    assert ours != theirs
    first = losses(sampled / "round-1" / "train")[0]
    assert first["sft"] == pytest.approx(first["loss"])
    assert "ratio_best" not in first


def test_samples_are_shared_whole_and_only_between_runs_that_would_make_the_same(
    tiny: World, finished_run: Path, tmp_path: Path
) -> None:
    other = replace(tiny.config, seed=1, max_tokens=90, learning_rate=1.0)
    with pytest.raises(PastaError) as caught:
        share_samples(finished_run, tmp_path / "out", other)
    assert str(caught.value) == (
        f"{finished_run} was begun with other settings: seed (0 -> 1), max_tokens (40 -> 90)"
    )
    with pytest.raises(PastaError, match=r"^cannot read .*config\.json"):
        share_samples(tmp_path / "nothing", tmp_path / "out", tiny.config)
    assert not (tmp_path / "out").exists()
    write_settings(tmp_path / "another", replace(tiny.config, seed=7))
    with pytest.raises(PastaError, match=r"was begun with other settings: seed \(7 -> 0\)"):
        share_samples(finished_run, tmp_path / "another", tiny.config)
    assert [path.name for path in (tmp_path / "another").iterdir()] == ["config.json"]
    source = Path(shutil.copytree(finished_run, tmp_path / "source"))
    samples = source / "round-1" / "samples.jsonl"
    lines = samples.read_bytes()
    samples.write_bytes(lines + '{"prompt": "é'.encode()[:-1])
    share_samples(source, tmp_path / "out", tiny.config)
    assert (tmp_path / "out" / "round-1" / "samples.jsonl").read_bytes() == lines


def test_a_second_round_samples_from_the_first_ones_adapter(
    tiny: World, sampled: Path, loaded: list[str | None]
) -> None:
    tiny.train(sampled, replace(tiny.config, rounds=2))
    assert loaded == [str(sampled / "round-1" / "adapter")]
    seeds = [{s["seed"] for s in read_lines(sampled / f"round-{n}/samples.jsonl")} for n in (1, 2)]
    assert not seeds[0] & seeds[1]
    second = sampled / "round-2" / "adapter"
    assert (sampled / "adapter" / WEIGHTS).read_bytes() == (second / WEIGHTS).read_bytes()


def test_a_policy_that_is_a_whole_model_is_trained_in_all_its_weights(
    tiny: World, tmp_path: Path
) -> None:
    loaded = load_model(tiny.checkpoint.source)
    policy = tmp_path / "policy"
    save(loaded, policy)
    config = replace(tiny.config, policy=str(policy), baseline=str(policy), samples=8)
    config = replace(config, learning_rate=0.1)  # what is saved is rounded to bfloat16
    trained = tiny.train(tmp_path / "out", config)
    before, after = (
        load_model(adapter_on(tiny.checkpoint.base, adapter)) for adapter in (policy, trained)
    )
    assert after.checkpoint.joins == ("kv",)
    pairs = zip(before.model.parameters(), after.model.parameters(), strict=True)
    assert all(not torch.equal(*pair) for pair in pairs)


def test_nothing_to_learn_from_is_an_error(tiny: World, tmp_path: Path) -> None:
    with pytest.raises(PastaError, match="no pair of a better and a worse answer") as caught:
        tiny.train(tmp_path / "out", replace(tiny.config, max_tokens=1))
    assert "--max-tokens" in caught.value.hint
    with pytest.raises(PastaError, match="no prompt to answer"):
        tiny.train(tmp_path / "none", prompts=[])


def test_adapters_that_do_not_fit_and_idle_gpus_are_refused_before_the_work(
    tiny: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path / "base", seed=1)
    stranger = make_adapter(base, tmp_path / "stranger")
    with pytest.raises(PastaError, match="trained on different base models"):
        tiny.train(tmp_path / "out", replace(tiny.config, baseline=str(stranger)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PastaError, match="one process sees 2 GPUs") as caught:
        tiny.train(tmp_path / "out")
    assert "-m pasta_decoding train preference" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_quality_is_what_the_baseline_would_write_and_no_repetition(tiny: World) -> None:
    source = tiny.checkpoint.source
    rated = quality.likelihood_rate(source, dtype="float32")("Why?", ["", "abc", "a b c d " * 6])
    decoder = torch_decoder(source.weights, source.adapter)
    loaded = load_model(source)
    prompt = decoder.prompt_ids("Why?", 10)
    ids = [*prompt, *decoder.encoder.encode_text("abc")]
    with torch.no_grad():
        logprobs_TV = loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    labels = [*ids[len(prompt) :], loaded.tokenizer.eos_token_id]
    each = [float(logprobs_TV[len(prompt) - 1 + n, label]) for n, label in enumerate(labels)]
    assert rated[1] == pytest.approx(sum(each) / 4, abs=1e-4)
    assert rated[2] < rated[1] - 2, "most of its runs of four words are repeated"
