"""What Prometheus and clients are told of answers whose figures are known; and the baseline."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pasta_decoding.errors import PastaError
from pasta_decoding.scheduling.decoder import LocalDecoder
from tests.server.running import (
    BASELINE,
    CHAT,
    GOOD,
    HELLO,
    MODEL,
    Running,
    running,
    saying,
    with_engine,
)

LONG = GOOD | {"max_tokens": 60}
QUESTION = {"role": "user", "content": "Tell me about the weather in spring, and in autumn."}


def test_the_metrics_add_up(decoder: LocalDecoder) -> None:
    with running(with_engine(decoder, saying(decoder))) as server:
        bodies = [LONG, LONG, LONG | {"max_tokens": 3}]
        usages = [server.ask(CHAT, body).json["usage"] for body in bodies]
        server.ask(CHAT, {})
        server.wait_until_idle()
        got = server.ask("/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(got.body.decode())
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    expected = {
        ("pasta_answers_total", "stop"): 2,
        ("pasta_answers_total", "length"): 1,
        ("pasta_requests_total", "400"): 1,
        ("pasta_tokens_total", "prompt"): sum(usage["prompt_tokens"] for usage in usages),
        ("pasta_tokens_total", "answer"): sum(usage["completion_tokens"] for usage in usages),
        ("pasta_chunks_total",): 2,
        ("pasta_truncations_total",): 1,
        ("pasta_time_to_first_token_seconds_count",): 3,
        ("pasta_answer_seconds_count",): 3,
        ("pasta_step_width_count",): values["pasta_steps_total",],
        ("pasta_cache_cells_max",): 8192,
    }
    idle = ("live_threads", "running", "queue", "cache_cells")
    expected |= {(f"pasta_{gauge}",): 0 for gauge in idle}
    assert values | expected == values
    # Two threads write side by side while there is a chunk: its tokens, behind its opening.
    assert values["pasta_step_width_sum",] > values["pasta_steps_total",]


def test_usage_tells_how_much_of_a_prompt_the_cache_held(decoder: LocalDecoder) -> None:
    """A next turn begins with the last one."""

    def reply_to(*messages: Any) -> Any:
        body = {"messages": messages, "max_tokens": 12}
        return server.ask(CHAT, GOOD | body).json

    def cached(reply: Any) -> int:
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    with running(decoder) as server:
        first = reply_to(QUESTION)
        same = reply_to(QUESTION)
        assert first["choices"] == same["choices"], "what the cache held changes nothing"
        prompt = first["usage"]["prompt_tokens"]
        assert (cached(first), cached(same)) == (0, prompt - 1)
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        second = reply_to(QUESTION, answer, *HELLO)
        assert prompt - 2 <= cached(second) < second["usage"]["prompt_tokens"]
        server.wait_until_idle()
        reused = prompt - 1 + cached(second)
        assert server.metric("pasta_reused_prompt_tokens_total") == reused


def test_the_models_are_listed_whatever_slashes_there_are(server: Running) -> None:
    models = server.client().models
    assert [model.id for model in models.list()] == [MODEL]
    assert models.retrieve(MODEL).model_extra == {"max_model_len": server.decoder.context_tokens}
    assert server.ask("//v1//models/").json == server.ask("/v1/models").json


def test_the_baseline_is_loaded_when_it_is_asked_for_and_answers_in_one_thread(
    decoder: LocalDecoder,
) -> None:
    model = with_engine(decoder, saying(decoder))
    script = saying(decoder, "Two: ", chunk="a pear")
    baseline = replace(with_engine(decoder, script), parallel=False)
    with running(model, lambda: baseline) as server:
        listed = server.ask("/v1/models").json["data"]
        assert [model["id"] for model in listed] == [MODEL, BASELINE]
        assert ["max_model_len" in model for model in listed] == [True, False]
        cells = server.metric("pasta_cache_cells_max")
        assert server.ask(f"/v1/models/{BASELINE}").json["max_model_len"] == baseline.context_tokens
        assert server.metric("pasta_cache_cells_max") == 2 * cells
        first, second = (server.ask(CHAT, LONG | {"model": name}) for name in (MODEL, BASELINE))
        assert [reply.json["model"] for reply in (first, second)] == [MODEL, BASELINE]
        assert first.text == "One: an apple Done."
        assert second.text.startswith("Two: ")
        assert "a pear" not in second.text  # that was for a chunk's thread to write
        without_threads = server.ask(CHAT, LONG | {"pasta_parallel": False})
        assert without_threads.text == second.text
        server.wait_until_idle()
        assert server.metric('pasta_answers_total{end="stop"}') == 3


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PastaError("there is no memory left"), "there is no memory left"),
        (RuntimeError("a secret"), "the server's log says why"),
    ],
)
def test_a_baseline_that_cannot_be_loaded_is_503_and_is_tried_again(
    decoder: LocalDecoder, error: Exception, reason: str
) -> None:
    model = with_engine(decoder, saying(decoder))
    tries: list[int] = []

    def load() -> LocalDecoder:
        tries.append(len(tries))
        if len(tries) == 1:
            raise error
        return with_engine(decoder, saying(decoder))

    with running(model, load) as server:
        body = LONG | {"model": BASELINE}
        refused = server.ask(CHAT, body)
        assert (refused.status, refused.error["code"]) == (503, "model_not_loaded")
        assert refused.error["message"] == f"the model cannot be loaded: {reason}"
        with ThreadPoolExecutor(3) as clients:
            replies = [clients.submit(server.ask, CHAT, body) for _ in range(3)]
            assert [reply.result().status for reply in replies] == [200] * 3
        assert tries == [0, 1]
