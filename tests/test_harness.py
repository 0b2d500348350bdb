"""Pasta as a model of lm-evaluation-harness: its tasks ask as they are, or one clear refusal."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pasta_decoding as pasta
from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.harness import PastaModel, config_of_task, conversation_in
from tests.checkpoint import TinyCheckpoint

QUESTION = "What are three good habits?"
COMMAND = "from pasta_decoding.harness import run; run()"


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"until": ["\n", ""], "max_gen_toks": 9}, {"stop": ["\n"], "max_tokens": 9}),
        ({"until": "Q:"}, {"stop": ["Q:"]}),
        ({"max_new_tokens": 5, "max_gen_toks": 7}, {"max_tokens": 7}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7}, {}),
        ({"do_sample": True, "seed": 3}, {"temperature": 1.0, "seed": 3}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"max_completion_tokens": 50}, {"max_tokens": 50}),
        ({"max_gen_toks": None, "temperature": None, "until": None}, {}),
    ],
)
def test_settings_of_a_task_become_a_config(settings: Any, changes: dict[str, Any]) -> None:
    default = GenerationConfig(max_tokens=512, parallel=False)
    assert config_of_task(default, settings) == replace(default, **changes)
    with pytest.raises(PastaError, match="no option 'num_beams'"):
        config_of_task(default, settings | {"num_beams": 4})


def test_a_conversation_survives_the_harness_and_other_text_stays() -> None:
    conversation = [{"role": "user", "content": 'Say "x" [{"role": '}]
    harness: Any = PastaModel
    assert conversation_in(harness.apply_chat_template(None, conversation)) == conversation
    for text in ("Why?", '[{"role": broken', json.dumps(["a"])):
        assert conversation_in(text) == text
    with pytest.raises(PastaError, match="begins the model's answer"):
        harness.apply_chat_template(None, conversation, add_generation_prompt=False)
    with pytest.raises(PastaError, match="scores no given text"):
        harness.loglikelihood(None, [])


def test_arguments_of_the_model_that_mean_nothing_are_refused() -> None:
    cases: list[tuple[Any, str]] = [
        ({"batch_size": "auto"}, "batch_size is auto"),
        ({"max_batch_size": 8}, "batch_size is 1"),
        ({"parallel": "no"}, "parallel is 'no'"),
        ({"engin": "torch"}, "no option 'engin'"),
        ({"engine": "abacus"}, "no engine 'abacus'"),
    ]
    for arguments, message in cases:
        with pytest.raises(PastaError, match=message):
            PastaModel("balanced", **arguments)


def test_requests_with_different_settings_come_back_in_their_order(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    tiny: Any = PastaModel(
        str(tiny_checkpoint.adapter),
        model=str(tiny_checkpoint.base),
        engine="torch",
        dtype="float32",  # with bfloat16, the other answers of a batch change the rounding
        batch_size=2,
    )
    cached: list[tuple[Any, str]] = []
    tiny.cache_hook = SimpleNamespace(add_partial=lambda _, *pair: cached.append(pair))
    lengths = (24, 60, 24, 60, 24)
    requests = [
        SimpleNamespace(args=(f"{QUESTION} {n}", {"max_gen_toks": length, "until": []}))
        for n, length in enumerate(lengths)
    ]
    with tiny.model:
        texts = tiny.generate_until(requests, disable_tqdm=True)
        expected = [
            tiny.model.answer(prompt, max_tokens=settings["max_gen_toks"]).text
            for prompt, settings in (request.args for request in requests)
        ]
    assert texts == expected
    pairs = [(request.args, text) for request, text in zip(requests, texts, strict=True)]
    assert sorted(cached, key=str) == sorted(pairs, key=str)


TASK = """
task: tiny_questions
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "0"
generation_kwargs: {until: ["zzz"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.slow
def test_the_harness_runs_a_task_as_the_arguments_of_the_model_say(
    tmp_path: Path, tiny_checkpoint: TinyCheckpoint
) -> None:
    """The base model runs it sequentially; parallel decoding is the default."""
    pytest.importorskip("lm_eval")
    questions = [QUESTION, "Name some colours."]
    question_file = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": question}) for question in questions]
    question_file.write_text("\n".join(lines))
    (tmp_path / "tiny.yaml").write_text(TASK.replace("QUESTIONS", str(question_file)))
    model_args = f"name=none,model={tiny_checkpoint.base},engine=torch"
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, "--model", "pasta",
        "--model_args", f"{model_args},dtype=float32,parallel=False",
        "--batch_size", "2", "--tasks", "tiny_questions", "--include_path", str(tmp_path),
        "--apply_chat_template", "--log_samples", "--output_path", str(tmp_path / "out")],
        env=os.environ | settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    logged = sorted(read_lines(samples), key=lambda sample: sample["doc_id"])
    with pasta.load("none", model=tiny_checkpoint.base, engine="torch", dtype="float32") as model:
        answers = model.batch(questions, max_tokens=24, parallel=False, stop="zzz")
    texts = [sample["resps"][0][0] for sample in logged]
    assert texts == [answer.text for answer in answers]
