"""`pasta.Model` on a tiny checkpoint: its answers, its refusals, and the memory that it frees."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pasta_decoding as pasta
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.api import opening
from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.lang.tree import Chunk, strip
from pasta_decoding.scheduling.decoder import LocalDecoder
from pasta_decoding.scheduling.loop import EngineLoop
from tests.checkpoint import TinyCheckpoint, make_adapter, torch_decoder
from tests.scheduling.machine import ordered

PROMPT = "Name three colours."
TOKENS = 48
LONG = 400


@pytest.fixture(scope="module")
def model(tiny_checkpoint: TinyCheckpoint) -> Iterator[pasta.Model]:
    with load(tiny_checkpoint) as loaded:
        yield loaded


def load(tiny: TinyCheckpoint) -> pasta.Model:
    return pasta.load(tiny.adapter, model=tiny.base, engine="torch", dtype="float32")


def slots_in_use(model: pasta.Model) -> int:
    """Return how many slots of the cache the answers hold, without those of cached prefixes."""
    assert isinstance(model.decoder, LocalDecoder)
    if model._worker is None:
        return model.decoder.engine.slots_in_use
    return model._worker.activity.slots


def test_an_answer_has_its_text_threads_and_figures(model: pasta.Model) -> None:
    result = model.answer(PROMPT, max_tokens=TOKENS)
    assert result.text == strip(result.tree) != ""
    chunks = [node for node in result.tree if isinstance(node, Chunk)]
    assert [thread.text for thread in result.threads] == [chunk.text for chunk in chunks]
    assert result.usage.plain_tokens == model.plain_tokens(result.text)
    assert result.tokens_per_step == result.usage.plain_tokens / result.critical_path
    assert result.usage.fed_tokens <= TOKENS
    assert (result.finish_reason == "length") == result.truncated


def test_text_events_batches_and_their_async_twins_bring_the_same_answer(
    model: pasta.Model,
) -> None:
    expected = model.answer(PROMPT, max_tokens=TOKENS)
    assert expected.threads, "or this shows little"
    assert "".join(model.stream(PROMPT, max_tokens=TOKENS)) == expected.text
    assert ordered(model.events(PROMPT, max_tokens=TOKENS)) == expected.text
    results: dict[int, pasta.Result] = {}
    prompts = [PROMPT, "Why?", PROMPT]
    options: dict[str, Any] = {"max_tokens": TOKENS, "max_concurrency": 2}
    several = model.batch(prompts, on_result=results.__setitem__, **options)
    assert [result.annotated for result in several[::2]] == [expected.annotated] * 2
    assert [results.pop(number) for number in range(3)] == several

    async def async_texts() -> list[str]:
        text = "".join([piece async for piece in model.stream(PROMPT, max_tokens=TOKENS)])
        events = [event async for event in model.events(PROMPT, max_tokens=TOKENS)]
        answer = await model.aanswer(PROMPT, max_tokens=TOKENS)
        batch = await model.abatch(prompts, on_result=results.__setitem__, **options)
        assert [results[number] for number in range(3)] == batch
        assert model.answer(PROMPT, max_tokens=TOKENS).text == answer.text, "within a loop too"
        return [text, ordered(events), answer.text, *(result.text for result in batch[::2])]

    assert asyncio.run(async_texts()) == [expected.text] * 5


def test_a_prompt_may_be_a_conversation_or_token_ids(model: pasta.Model) -> None:
    question = [{"role": "user", "content": PROMPT}]
    assert (
        model.answer(question, max_tokens=TOKENS).annotated
        == model.answer(PROMPT, max_tokens=TOKENS).annotated
    )
    turns = [*question, {"role": "assistant", "content": "Red."}, {"role": "user", "content": "?"}]
    assert model.answer(turns, max_tokens=8).usage.prompt_tokens > len(PROMPT)
    ids = model.decoder.prompt_ids(PROMPT, TOKENS)
    assert model.answer(ids, max_tokens=TOKENS).text == model.answer(PROMPT, max_tokens=TOKENS).text


def test_a_stream_that_is_left_early_frees_what_it_holds(model: pasta.Model) -> None:
    with model.stream(PROMPT, max_tokens=LONG) as stream:
        next(stream)
    with pytest.raises(pasta.PastaError, match="not complete"):
        _ = stream.result
    assert list(stream) == []

    async def leave_drop_and_cancel() -> None:
        async with model.stream(PROMPT, max_tokens=LONG) as stream:
            await anext(stream)
        async for _ in model.stream(PROMPT, max_tokens=LONG):
            break
        task = asyncio.create_task(model.aanswer(PROMPT, max_tokens=LONG))
        while not slots_in_use(model):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave_drop_and_cancel())
    gc.collect()
    model.answer("x", max_tokens=1)  # the step after which its slots are free
    assert slots_in_use(model) == 0


def test_closing_a_stream_ends_the_loop_that_reads_it(model: pasta.Model) -> None:
    stream = model.stream(PROMPT, max_tokens=LONG)
    reader = threading.Thread(target=list, args=[stream])
    reader.start()
    stream.close()
    reader.join()

    async def close() -> None:
        other = model.stream(PROMPT, max_tokens=LONG)

        async def read() -> None:
            async for _ in other:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        other.close()
        await task

    asyncio.run(close())


def test_threads_that_ask_first_at_the_same_time_get_one_worker(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []

    def slowly(scheduler: object) -> object:
        time.sleep(0.05)
        opened.append(EngineLoop(scheduler))
        return opened[-1]

    monkeypatch.setattr("pasta_decoding.api.model.EngineLoop", slowly)
    with load(tiny_checkpoint) as fresh, ThreadPoolExecutor(4) as pool:
        together = threading.Barrier(4)

        def ask(_number: int) -> str:
            together.wait()
            return fresh.answer(PROMPT, max_tokens=4).text

        assert len(set(pool.map(ask, range(4)))) == 1
    assert len(opened) == 1


def test_a_closed_model_refuses_new_prompts_and_ends_open_streams_with_an_error(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    model = load(tiny_checkpoint)
    waiting = model.stream(PROMPT, max_tokens=LONG)
    next(waiting)
    model.close()
    model.close()
    with pytest.raises(pasta.PastaError, match="the model is closed"):
        list(waiting)
    with pytest.raises(pasta.PastaError, match="the model is closed") as caught:
        model.answer(PROMPT)
    assert caught.value.hint == "Load it again: pasta.load(...)"
    assert slots_in_use(model) == 0


def test_what_makes_no_sense_is_refused(model: pasta.Model) -> None:
    cases: list[tuple[Any, Any, str]] = [
        ("", {}, "the prompt is empty"),
        ([{"content": "x"}], {}, "is not a message"),
        ([{"role": "user", "content": None}], {}, "is not a message"),
        ("x", {"max_token": 3}, "no option 'max_token': did you mean max_tokens"),
        ("x", {"max_concurrency": 0}, "max_concurrency is 0"),
    ]
    for prompt, options, message in cases:
        with pytest.raises(pasta.PastaError, match=message):
            model.batch([prompt], **options)


def test_fields_given_by_name_replace_those_of_the_config(model: pasta.Model) -> None:
    config = GenerationConfig(max_tokens=TOKENS, eagerness=-100)
    plain = model.answer(PROMPT, config)
    assert not plain.threads
    assert model.answer(PROMPT, config, eagerness=0).threads
    biased = model.answer(PROMPT, config, logit_bias={"65": 100.0})
    assert biased.annotated != plain.annotated
    assert model.answer(PROMPT, config, max_seconds=0.0).finish_reason == "length"


def test_an_answer_without_threads_is_written_by_the_recorded_baseline(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = make_adapter(tiny_checkpoint.base, tmp_path / "taught", seed=1)
    monkeypatch.setattr(opening, "recorded_baseline", lambda *_, **__: str(taught))
    baseline = torch_decoder(tiny_checkpoint.base, taught)
    rules = Rules(max_tokens=TOKENS, parallel=False)
    expected = baseline.answer(baseline.request(PROMPT, rules, SamplingParams(temperature=0)))
    with load(tiny_checkpoint) as model:
        assert model.answer(PROMPT, max_tokens=TOKENS, parallel=False).text == expected.text
        assert model.answer(PROMPT, max_tokens=TOKENS).threads
    with pytest.raises(pasta.PastaError):
        model.answer(PROMPT, max_tokens=TOKENS, parallel=False)


def test_without_a_baseline_an_answer_without_threads_is_refused(model: pasta.Model) -> None:
    """With promises banned, an adapter writes lists and sentences that break off."""
    with pytest.raises(pasta.PastaError, match="no baseline is known"):
        model.answer(PROMPT, max_tokens=TOKENS, parallel=False)


def test_every_public_name_is_there_and_importing_them_takes_nothing() -> None:
    script = (
        "import sys, pasta_decoding as p; "
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers'} & sys.modules.keys(); "
        "assert not heavy, heavy; "
        "assert all(hasattr(p, name) for name in p.__all__); "
        "assert set(p.__all__) <= set(dir(p))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pasta.nothing
