"""The server over the default model answers as the engine alone does, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.api.opening import open_local
from pasta_decoding.cli.console import cache_folder
from pasta_decoding.data.dataset import read_rows
from tests.server.running import MODEL, running

pytestmark = [pytest.mark.slow, pytest.mark.llama, pytest.mark.timeout(1800)]

SAMPLE = Path(__file__).parents[2] / "examples" / "annotated.jsonl"
PROMPTS = [row.instruction for row in read_rows(SAMPLE)][:50]
NEAR_TIES = 2
"""Answers that may differ: the server keeps the beginnings of prompts, so rounding differs."""


def test_stream_whole_reply_and_engine_agree_but_for_a_near_tie(default_model_dir: Path) -> None:
    config = GenerationConfig(max_tokens=64)
    chosen = EngineConfig(model=default_model_dir, engine="llama", dtype="float32")
    decoder = open_local(chosen, cache_folder())
    answers = [
        decoder.answer(decoder.request(prompt, config.rules, config.sampling()))
        for prompt in PROMPTS
    ]
    same = 0
    with running(decoder) as server:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            messages = [{"role": "user", "content": prompt}]
            body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 64}
            whole: Any = server.client().chat.completions.create(**body, temperature=0)
            stream = server.client().chat.completions.create(**body, temperature=0, stream=True)
            pieces = [one.delta.content or "" for chunk in stream for one in chunk.choices]
            same += whole.choices[0].message.content == "".join(pieces) == answer.text
    assert same >= len(PROMPTS) - NEAR_TIES
    assert sum(answer.chunks for answer in answers) > 50, "the answers were parallel ones"
    assert decoder.engine.slots_in_use == 0
