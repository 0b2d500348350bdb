"""A model with several tokens that end an answer, as Llama 3 has: the one that was written counts.

Texts that bring no end with them get the tokenizer's own, in training and in rating alike.
"""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.answer.settings import Rules
from pasta_decoding.data.rows import question_of
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import MAIN, Layout, lay_out
from pasta_decoding.models.gguf_writer import write_gguf
from pasta_decoding.models.load import load_model
from pasta_decoding.scheduling.decoder import LocalDecoder
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.sample import decode_sample, encode_sample, sample_answers
from tests.checkpoint import END_ID, TinyCheckpoint, make_adapter, torch_decoder
from tests.law.watched import replay

OTHER_END = 256
"""Below the tokenizer's own end, so that taking the smallest would be a mistake."""
RULES = Rules(max_tokens=400)


@pytest.fixture(scope="module")
def two_ends(tiny_checkpoint: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the tiny checkpoint, as a model that ends its answers with either of two tokens."""
    folder = tmp_path_factory.mktemp("ends")
    base = Path(shutil.copytree(tiny_checkpoint.base, folder / "base"))
    settings = json.loads((base / "generation_config.json").read_text())
    settings["eos_token_id"] = [OTHER_END, END_ID]
    (base / "generation_config.json").write_text(json.dumps(settings))
    return TinyCheckpoint(base, make_adapter(base, folder / "adapter"))


@pytest.fixture(scope="module")
def decoder(two_ends: TinyCheckpoint) -> LocalDecoder:
    return torch_decoder(two_ends.base, two_ends.adapter)


def label_of_end(layout: Layout) -> int | None:
    last = max(row for row, thread in enumerate(layout.thread) if thread == MAIN)
    return layout.label[last]


def test_answers_layouts_samples_and_replays_keep_the_end_that_was_chosen(
    decoder: LocalDecoder, tmp_path: Path
) -> None:
    prompts = [question_of("Why?")]
    path = tmp_path / "samples.jsonl"
    samples = sample_answers(
        lambda: nullcontext(decoder),
        prompts,
        path,
        name="ends",
        count=12,
        rules=RULES,
        temperature=1.0,
        config=PreferenceConfig(),
    )
    by_end = {sample.end: sample for sample in samples}
    assert by_end.keys() >= {OTHER_END, END_ID}
    for end, sample in by_end.items():
        assert decode_sample(json.loads(json.dumps(encode_sample(sample)))).end == end
        close = decoder.vocabulary.control.async_close
        answer = (sample.prompt_ids, sample.segments, decoder.scheme)
        layout = lay_out(*answer, async_close=close, end=sample.end)
        assert label_of_end(layout) == end
        last = decoder.vocabulary.end if end is None else end
        again = decoder.answer(replay(decoder, sample.prompt_ids, sample.segments, last))
        assert sample.truncated or again.layouts[0] == layout


@pytest.mark.llama
def test_llama_cpp_stops_at_every_end(two_ends: TinyCheckpoint, tmp_path: Path) -> None:
    import llama_cpp

    from pasta_decoding.engines.llama import LlamaEngine

    write_gguf(load_model(two_ends.source), tmp_path / "tiny.gguf")
    engine = LlamaEngine(tmp_path / "tiny.gguf", cache_tokens=512, threads=1)
    model = llama_cpp.llama_get_model(engine.context)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    ends = {token for token in range(260) if llama_cpp.llama_vocab_is_eog(vocabulary, token)}
    assert ends == {OTHER_END, END_ID}


def test_a_model_without_an_end_is_refused(two_ends: TinyCheckpoint, tmp_path: Path) -> None:
    base = Path(shutil.copytree(two_ends.base, tmp_path / "base"))
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        record = json.loads((base / name).read_text())
        record.pop("eos_token_id", None)
        record.pop("eos_token", None)
        (base / name).write_text(json.dumps(record))
    (base / "chat_template.jinja").unlink()
    with pytest.raises(PastaError, match=r"names no token that ends an answer$"):
        torch_decoder(base, None)
