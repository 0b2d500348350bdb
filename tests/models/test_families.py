"""The families of the README, tiny, with the settings, tokenizers and templates of their files."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    TextStreamer,
)

import pasta_decoding as pasta
from pasta_decoding.engines.fast import obstacle
from pasta_decoding.errors import PastaError
from pasta_decoding.models.catalog import BaseWithAdapter
from pasta_decoding.models.checkpoint import choose_tokens
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.gguf_writer import has_translation, write_gguf
from pasta_decoding.models.load import load_model
from pasta_decoding.models.pretrained import load_config
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.models.template import Message
from tests.checkpoint import torch_decoder
from tests.models.test_gguf import qwen_tokenizer, smollm_tokenizer
from tests.server.running import CHAT, GOOD, running
from tests.shapes import TEMPLATES, gemma_tokenizer, llama3_tokenizer
from tests.tiny import SHAPE, seeded
from tests.training.tiny_runs import CONFIG, files, train

TRAINING = replace(CONFIG, max_steps=2, save_every_steps=1, packs_per_step=1, lora_rank=2)
ASKED: dict[str, Any] = {"max_tokens": 40, "eagerness": 9.0}
QUESTION = " What are two good habits?\n"

# Qwen 3 leaves thoughts out of the history. SmolLM 3 has a switch in the system message: it changes
# the text around that message, and behind all messages.
LLAMA2, PHI3, GEMMA3, QWEN3, SMOLLM3 = (
    (TEMPLATES / f"{name}-tiny.jinja").read_text(encoding="utf-8")
    for name in ("llama2", "phi3", "gemma3", "qwen3", "smollm3")
)


def sentencepiece(template: str, turns: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Characters, other bytes by name, and a blank before every text; no spare tokens."""
    special = ["<unk>", "<s>", "</s>"]
    characters = ["\u2581", *(chr(n) for n in range(33, 127)), "\u2581t", "he"]
    texts = [*special, *(f"<0x{n:02X}>" for n in range(256)), *characters]
    vocabulary = {text: n for n, text in enumerate(texts)}
    merges = [("\u2581", "t"), ("h", "e")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in [*special, *turns]])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def templated(make: Callable[[], Any], template: str) -> Callable[[], Any]:
    def made() -> Any:
        tokenizer = make()
        tokenizer.chat_template = template
        return tokenizer

    return made


@dataclass(frozen=True)
class Family:
    """A model's kind and settings, its tokenizer, and the token that its template ends turns with.

    spare: rows of the weights beyond the tokenizer's.
    nested: the kind of the model that also sees images, whose text model this is.
    """

    kind: str
    tokenizer: Callable[[], Any]
    end: str
    settings: dict[str, Any] = field(default_factory=dict)
    spare: int = 0
    nested: str | None = None


SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**SLIDING, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28,
          "num_attention_heads": 2, "patch_size": 14}  # fmt: skip


def phi_tokenizer() -> Any:
    return sentencepiece(PHI3, ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"])


FAMILIES = {
    "llama2": Family("llama", lambda: sentencepiece(LLAMA2), "</s>"),
    "llama3": Family("llama", llama3_tokenizer, "<|eot_id|>", {"rope_parameters": SCALED}),
    "mistral": Family("mistral", lambda: sentencepiece(LLAMA2, ["[INST]", "[/INST]"]), "</s>",
                      {"sliding_window": 16}),
    "qwen2": Family("qwen2", qwen_tokenizer, "<|im_end|>", {"tie_word_embeddings": True}, 20),
    "qwen3": Family("qwen3", templated(qwen_tokenizer, QWEN3), "<|im_end|>", {}, 20),
    "gemma3": Family("gemma3_text", templated(gemma_tokenizer, GEMMA3), "<end_of_turn>", GEMMA),
    "smollm2": Family("llama", smollm_tokenizer, "<|im_end|>", {"tie_word_embeddings": True}),
    "smollm3": Family("smollm3", templated(qwen_tokenizer, SMOLLM3), "<|im_end|>",
                      {"no_rope_layers": [1, 0]}),
    "phi3": Family("phi3", phi_tokenizer, "<|end|>", {"sliding_window": 16}),
    "mixtral": Family("mixtral", lambda: sentencepiece(LLAMA2), "</s>", EXPERTS),
    "gemma3-4b": Family("gemma3_text", templated(gemma_tokenizer, GEMMA3), "<end_of_turn>", GEMMA,
                        nested="gemma3"),
    "mistral3": Family("mistral", lambda: sentencepiece(LLAMA2), "</s>", nested="mistral3"),
}  # fmt: skip


def make_base(family: Family, folder: Path) -> Path:
    tokenizer: Any = family.tokenizer()
    ends = sorted({tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(family.end)})
    settings = SHAPE | {"vocab_size": len(tokenizer) + family.spare, **family.settings}
    settings |= {"tie_word_embeddings": False} | family.settings
    if family.nested is None:
        config = AutoConfig.for_model(family.kind, **settings)
    else:
        text = {key: value for key, value in settings.items() if not key.startswith("attn")}
        vision = VISION | ({"model_type": "pixtral"} if family.nested == "mistral3" else {})
        config = AutoConfig.for_model(
            family.nested,
            text_config={"model_type": family.kind, **text},
            vision_config=vision,
            tie_word_embeddings=settings["tie_word_embeddings"],
        )
    with seeded(0):
        model = _kind(family).from_config(config)
        _make_readable(model, tokenizer)
        model.generation_config.eos_token_id = ends
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _kind(family: Family) -> Any:
    return AutoModelForImageTextToText if family.nested else AutoModelForCausalLM


def _make_readable(model: Any, tokenizer: Any) -> None:
    """Let it write whole characters, not bytes of some."""
    readable = {
        f"{mark}{chr(code)}" for code in range(33, 127) for mark in ("", "\u2581", "\u0120")
    }
    table = model.get_output_embeddings().weight.data
    for text, token in tokenizer.get_vocab().items():
        if text not in readable:
            table[token] = 0.0


def theirs(base: Path, family: Family, messages: list[dict[str, str]]) -> str:
    """Return the text that transformers writes greedily, with the control tokens banned."""
    model = _kind(family).from_pretrained(base)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    prompt: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    rows = len(model.get_input_embeddings().weight)
    banned = [token for token in choose_tokens(tokenizer).ids if token < rows]
    output = model.generate(
        **prompt, max_new_tokens=16, do_sample=False, suppress_tokens=banned or None
    )
    answer_ids = output[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(answer_ids, skip_special_tokens=True))


# One family of each kind of tokenizer and of weights
FEW = ("llama2", "qwen3", "gemma3-4b", "mixtral")


@pytest.fixture(
    scope="module",
    params=[
        name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
    ],
)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def base(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(family, tmp_path_factory.mktemp("family") / "base")


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    out = base.parent / "run"
    train(base, out, TRAINING)
    return out


TALKS = [
    [QUESTION],
    ["Be brief. /no_think", "Hello "],
    ["Why?", "hm\n</think>\n\nthe he\n\n- 3", "t (x)\n 1."],
]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_and_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    base = make_base(family, tmp_path / "base")
    with pasta.load("none", model=base, engine="torch", dtype="float32", device="cpu") as model:
        for contents in TALKS:
            roles = ["user", "assistant", "user"] if len(contents) == 3 else ["system", "user"]
            messages = [
                {"role": role, "content": content}
                for role, content in zip(roles[-len(contents) :], contents, strict=True)
            ]
            result = model.answer(messages, max_tokens=16)
            assert result.text.strip() == theirs(base, family, messages).strip(), contents


def test_a_blank_at_the_end_of_a_prompt_stays() -> None:
    tokenizer: Any = sentencepiece("{{ messages[0].content }} [/INST] ")
    ids = PromptEncoder(tokenizer).encode([Message("user", "the")])
    assert ids == tokenizer.encode("the [/INST] ", add_special_tokens=False)


def test_it_is_trained_resumed_exported_both_ways_served_and_streamed(
    family: Family, base: Path, run: Path
) -> None:
    adapter = run / "adapter"
    tokenizer = family.tokenizer()
    written = files(adapter)
    shutil.rmtree(adapter)
    assert files(train(base, run, TRAINING)) == written, "it went on from its last step"
    loaded = load_model(BaseWithAdapter(base, adapter))
    assert loaded.end == tokenizer.convert_tokens_to_ids(family.end)
    merged = run.parent / "merged"
    export_hf(loaded, merged, adapter=adapter)
    choices = [("torch", str(adapter), base), ("torch", str(merged), None)]
    if obstacle(load_config(base)) is None:
        choices += [("fast", str(adapter), base), ("fast", str(merged), None)]
    if has_translation(base):
        write_gguf(loaded, run / "whole.gguf", float_type="F32")
        choices.append(("fast", str(run / "whole.gguf"), None))
    else:
        with pytest.raises(PastaError, match=r"^cannot export "):
            write_gguf(loaded, run / "whole.gguf", float_type="F32")
    texts = set()
    for engine, name, model_path in choices:
        options: dict[str, Any] = {"engine": engine, "dtype": "float32", "device": "cpu"}
        with pasta.load(name, model=model_path, **options) as model:
            texts.add(model.answer(QUESTION, **ASKED).annotated)
    assert len(texts) == 1, texts
    assert "<promise" in texts.pop(), "else nothing was parallel"
    decoder = torch_decoder(merged, merged)
    with pasta.Model(decoder) as model, running(decoder) as server:
        expected = model.answer(QUESTION, **ASKED).text
        body = GOOD | ASKED | {"messages": [{"role": "user", "content": QUESTION}]}
        for stream in (False, True):
            assert server.ask(CHAT, body | {"stream": stream}).text == expected


class TextRecorder(TextStreamer):
    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text + "\n" * stream_end


def test_transformers_streams_the_text(run: Path) -> None:
    merged = run.parent / "merged"
    tokenizer: Any = AutoTokenizer.from_pretrained(merged)
    model = AutoModelForCausalLM.from_pretrained(merged)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    streamer = TextRecorder(tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = pasta.generate(
        model,
        **prompt,
        max_new_tokens=40,
        do_sample=False,
        streamer=streamer,
        return_dict_in_generate=True,
    )
    assert streamer.text.rstrip("\n") == output.results[0].text.rstrip("\n")
