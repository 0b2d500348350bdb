"""transformers' `generate` with Pasta's decoding: the same answers as Pasta's own, or a refusal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import pasta_decoding as pasta
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.engines import torch as torch_engine
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import ChunkRun, MainRun
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.load import load_model
from pasta_decoding.scheduling.decoder import LocalDecoder
from tests.checkpoint import TinyCheckpoint, torch_decoder
from tests.tiny import tiny_llama

QUESTION = "What are three good habits?"
TOKENS = 120


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export") / "merged"
    export_hf(load_model(tiny_checkpoint.source), target)
    return target


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> LocalDecoder:
    return torch_decoder(folder, folder)


def prompt(folder: Path, question: str) -> dict[str, Any]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return dict(encoded)


def pasta_answer(decoder: LocalDecoder, question: str) -> Answer:
    rules = Rules(max_tokens=TOKENS)
    return decoder.answer(decoder.request(question, rules, SamplingParams()))


def plain(decoder: LocalDecoder, answer: Answer) -> list[int]:
    control = decoder.vocabulary.control.ids
    parts = [part.ids for part in answer.segments if isinstance(part, MainRun | ChunkRun)]
    ids = [token for part in parts for token in part if token not in control]
    return ids + ([] if answer.end is None else [answer.end])


def test_it_writes_what_pasta_writes(folder: Path, model: Any, decoder: LocalDecoder) -> None:
    inputs = prompt(folder, QUESTION)
    answer = pasta_answer(decoder, QUESTION)
    settings = {"max_new_tokens": TOKENS, "do_sample": False}
    by_name = model.generate(**inputs, **settings, custom_generate=pasta.generate)
    alone = pasta.generate(model, **inputs, **settings, return_dict_in_generate=True)
    by_folder = model.generate(
        **inputs, **settings, custom_generate=str(folder), trust_remote_code=True
    )
    start = inputs["input_ids"].shape[1]
    assert torch.equal(by_name[:, :start], inputs["input_ids"])
    assert by_name[0, start:].tolist() == plain(decoder, answer)
    assert torch.equal(by_name, alone.sequences)
    assert torch.equal(by_name, by_folder)
    (result,) = alone.results
    assert result.text == answer.text
    assert len(result.threads) == answer.chunks > 0, "else nothing was parallel"


class RecordingStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.prompt: list[int] | None = None
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt is None:
            self.prompt = value.flatten().tolist()
        else:
            self.ids += value.tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_text_in_reading_order_up_to_a_stop_string(
    folder: Path, model: Any, decoder: LocalDecoder
) -> None:
    inputs = prompt(folder, QUESTION)
    text = pasta_answer(decoder, QUESTION).text
    stop = text[5:8]
    text_before_stop = text[: text.index(stop)]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for stops, expected in ((None, text), ([stop], text_before_stop)):
        streamer = RecordingStreamer()
        output = pasta.generate(
            model,
            **inputs,
            max_new_tokens=TOKENS,
            do_sample=False,
            stop_strings=stops,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        assert streamer.prompt == inputs["input_ids"][0].tolist()
        assert tokenizer.decode(streamer.ids) == output.results[0].text == expected
        assert streamer.ended


def test_rows_of_one_length_are_answered_together(folder: Path, model: Any) -> None:
    first = prompt(folder, QUESTION)["input_ids"]
    other = torch.cat([first[:, :-3], first[:, -3:].flip(1)], dim=1)
    settings = {"max_new_tokens": 60, "do_sample": False, "custom_generate": pasta.generate}
    both = model.generate(torch.cat([first, other]), **settings)
    for row, ids in zip(both, (first, other), strict=True):
        (alone,) = model.generate(ids, **settings)
        assert row[: len(alone)].tolist() == alone.tolist()


def test_samples_come_from_the_seed_of_torch(folder: Path, model: Any) -> None:
    inputs = prompt(folder, QUESTION)
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        sampled = model.generate(
            **inputs,
            max_new_tokens=60,
            do_sample=True,
            temperature=1.5,
            num_return_sequences=2,
            custom_generate=pasta.generate,
        )
        samples.append(sampled.tolist())
    first, first_again, second = samples
    assert first == first_again != second
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "beam search cannot be done in parallel"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation cannot be done"),
        ({"suppress_tokens": [1, 60]}, "suppress_tokens 1 is not applied"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor is not applied"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores is not returned"),
    ],
)
def test_what_would_be_ignored_is_refused_and_the_model_stays_as_it_was(
    settings: dict[str, Any], message: str, folder: Path, model: Any
) -> None:
    before = model.config._attn_implementation
    with pytest.raises(PastaError, match=message):
        model.generate(
            **prompt(folder, "x"), **settings, max_new_tokens=5, custom_generate=pasta.generate
        )
    assert model.config._attn_implementation == before


def test_padded_rows_caches_and_other_models_are_refused(folder: Path, model: Any) -> None:
    ids = prompt(folder, QUESTION)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(PastaError, match="different lengths"):
        model.generate(ids, attention_mask=mask, max_new_tokens=5, custom_generate=pasta.generate)
    cache = model(ids[:, :4], use_cache=True).past_key_values
    with pytest.raises(PastaError, match="past_key_values"):
        model.generate(ids, past_key_values=cache, max_new_tokens=5, custom_generate=pasta.generate)
    with pytest.raises(PastaError, match="assistant_model has no meaning"):
        pasta.generate(model, ids, assistant_model=model, max_new_tokens=5)
    with pytest.raises(PastaError, match=r"it has no pasta\.json"):
        pasta.generate(tiny_llama(), ids, max_new_tokens=5)


def test_an_error_on_the_way_leaves_the_model_and_ends_the_stream(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    model.train()
    model.model.norm.eval()
    before = model.config._attn_implementation
    streamer = RecordingStreamer()
    monkeypatch.setattr(torch_engine.TorchEngine, "step", broken)
    monkeypatch.setattr(torch_engine.TorchEngine, "step_kept", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        pasta.generate(model, **prompt(folder, "x"), max_new_tokens=5, streamer=streamer)
    assert (model.config._attn_implementation, model.training) == (before, True)
    assert not model.model.norm.training
    assert streamer.ended


def test_plain_generate_writes_what_pasta_writes_sequentially(
    folder: Path, model: Any, decoder: LocalDecoder
) -> None:
    inputs = prompt(folder, QUESTION)
    prompt_tokens = inputs["input_ids"].shape[1]
    control = decoder.vocabulary.control.ids
    settings = {"max_new_tokens": TOKENS, "do_sample": False}
    with_tags = model.generate(**inputs, **settings, suppress_tokens=None)[0, prompt_tokens:]
    plain_ids = model.generate(**inputs, **settings)[0, prompt_tokens:].tolist()
    assert control & {*with_tags.tolist()}, "this model would write tags if it could"
    assert not control & {*plain_ids}
    rules = Rules(max_tokens=TOKENS, parallel=False)
    answer = decoder.answer(decoder.request(QUESTION, rules, SamplingParams()))
    expected = plain(decoder, answer)
    assert plain_ids[: len(expected)] == expected
