"""Stage 2 with answers that a server samples, which holds the round's adapter meanwhile."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.catalog import BaseAlone, BaseWithAdapter
from pasta_decoding.models.checkpoint import read_checkpoint
from pasta_decoding.models.load import load_base, load_model
from pasta_decoding.training.preference import PreferenceRun
from pasta_decoding.training.sample import sample_answers
from tests.checkpoint import END_ID, TinyCheckpoint, make_adapter, make_base, torch_decoder
from tests.golden.golden import talkative
from tests.remote.fake import Fake, by_model, serving
from tests.scripted import Script
from tests.training.test_preference import PROMPTS, REPLAY, WEIGHTS, World
from tests.training.tiny_runs import losses


def with_lora(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a base model with the LoRA of a folder, as vLLM reads it."""
    weights = dict(load_base(BaseAlone(base)).model.state_dict())
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        layer, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        if part.rpartition("embedding_")[2].startswith("A"):
            added = tensors[name.replace("_A", "_B")].float() @ tensor.float()
            added = added.T if part == "embedding_A" else added
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + added
    return weights


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[PreferenceRun, Fake]]:
    """Return a run whose policy knows the join of servers, and a server of its base model."""
    base = talkative(make_base(tmp_path / "base"))
    adapter = make_adapter(base, tmp_path / "adapter")
    record = json.loads((adapter / "pasta.json").read_text())
    (adapter / "pasta.json").write_text(json.dumps(record | {"joins": ["text"]}))
    merged = load_model(BaseWithAdapter(base, adapter)).model

    def adapted(folder: Path) -> Script:
        ours = with_lora(base, folder)
        theirs = merged.state_dict()
        for name in theirs:  # what is sent is rounded to bfloat16
            torch.testing.assert_close(ours[name], theirs[name], atol=1e-3, rtol=1e-2)
        return by_model(merged)

    fake = Fake(by_model(merged), merged.config.vocab_size, END_ID, adapted=adapted)
    config = replace(World(TinyCheckpoint(base, adapter)).config, engine="remote", samples=6)
    with serving(fake):
        config = replace(config, base_url=(fake.url,))
        yield PreferenceRun(config, base, tmp_path / "run", tmp_path, replay=REPLAY), fake


def test_greedy_samples_of_a_server_are_in_all_those_of_an_engine_here(
    run: tuple[PreferenceRun, Fake], tmp_path: Path
) -> None:
    config = replace(run[0].config, temperature=0.0, samples=2)
    with pytest.raises(PastaError, match="no pair of a better"):  # all are the same
        replace(run[0], config=config).train(PROMPTS)
    decoder = torch_decoder(run[0].base, Path(config.policy), join=Joining.text)
    settings: Any = {"name": "round-1", "count": 2, "rules": config.rules, "config": config}
    settings["temperature"] = 0.0
    here = tmp_path / "here.jsonl"
    there = tmp_path / "run" / "round-1" / "samples.jsonl"
    sample_answers(lambda: nullcontext(decoder), PROMPTS, here, **settings)
    both = (sorted(read_lines(path), key=itemgetter("prompt", "number")) for path in (here, there))
    ours, theirs = both
    assert ours == theirs
    assert any(segment["kind"] == "ChunkRun" for sample in ours for segment in sample["segments"])


def test_a_round_trains_what_a_server_sampled_with_the_adapter_that_it_held(
    run: tuple[PreferenceRun, Fake],
) -> None:
    training, fake = run
    adapter = training.train(PROMPTS)
    calls = fake.calls
    first = losses(training.out / "round-1" / "train")[0]
    assert (first["ratio_best"], first["ratio_worst"]) == (0, 0)
    assert read_checkpoint(adapter).joins == ("text",)
    names = [name for _, name in calls]
    assert calls == list(zip(["load", "unload"] * 2, names, strict=True))
    assert [name.rpartition("-")[0] for name in names[::2]] == ["run-baseline", "run-round-1"]
    assert {body["model"] for body in fake.bodies} == set(names)
    assert not list(training.out.glob("run-*")), "what the server read is gone"


def test_a_server_that_loads_no_adapters_is_refused_before_anything_is_computed(
    run: tuple[PreferenceRun, Fake],
) -> None:
    run[1].adapted = None
    with pytest.raises(PastaError) as caught:
        run[0].train(PROMPTS)
    message = f'{run[1].url} loads no adapters, or not this one: {{"detail":"Not Found"}}'
    start = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora"
    assert (str(caught.value), caught.value.hint) == (message, f"{start} --max-lora-rank 14")
    assert not run[1].bodies
