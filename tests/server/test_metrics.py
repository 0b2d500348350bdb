"""What Prometheus and clients are told of answers whose figures are known."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pasta_decoding.runtime.decoder import LocalDecoder
from tests.server.running import CHAT, GOOD, HELLO, MODEL, Running, running
from tests.server.scripts import saying, with_engine

QUESTION = {"role": "user", "content": "Tell me about the weather in spring, and in autumn."}


def test_the_metrics_add_up(decoder: LocalDecoder) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    with running(with_engine(decoder, script)) as server:
        body = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 100}
        usage = [server.ask(CHAT, body).json["usage"] for _ in range(2)][-1]
        short = server.ask(CHAT, body | {"max_tokens": 3}).json["usage"]
        server.ask(CHAT, {})
        server.wait_until_idle()
        got = server.ask("/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(got.body.decode())
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert found["pasta_answers_total", "stop"] == 2
    assert found["pasta_answers_total", "length"] == 1
    assert found["pasta_requests_total", "200"] >= 3
    assert found["pasta_requests_total", "400"] == 1
    prompts = 2 * usage["prompt_tokens"] + short["prompt_tokens"]
    assert found["pasta_tokens_total", "prompt"] == prompts
    answers = 2 * usage["completion_tokens"] + short["completion_tokens"]
    assert found["pasta_tokens_total", "answer"] == answers
    assert found["pasta_chunks_total",] == 2
    assert found["pasta_truncations_total",] == 1
    assert found["pasta_steps_total",] == found["pasta_step_width_count",]
    # Two threads write side by side while there is a chunk: its tokens, behind its opening.
    assert found["pasta_step_width_sum",] > found["pasta_steps_total",]
    assert found["pasta_time_to_first_token_seconds_count",] == 3
    assert found["pasta_answer_seconds_count",] == 3
    assert found["pasta_cache_cells_max",] == 8192
    for gauge in ("pasta_live_threads", "pasta_running", "pasta_queue", "pasta_cache_cells"):
        assert found[gauge,] == 0


def test_usage_tells_how_much_of_a_prompt_the_cache_held(decoder: LocalDecoder) -> None:
    """A next turn begins with the last one."""

    def asked(*messages: Any, **more: Any) -> Any:
        body = {"messages": messages, "max_tokens": 12, **more}
        return server.ask(CHAT, GOOD | body).json

    def cached(reply: Any) -> int:
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    with running(decoder) as server:
        first, same = asked(QUESTION), asked(QUESTION)
        assert first["choices"] == same["choices"], "what the cache held changes nothing"
        prompt = first["usage"]["prompt_tokens"]
        assert (cached(first), cached(same)) == (0, prompt - 1)
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        second = asked(QUESTION, answer, *HELLO)
        assert prompt - 2 <= cached(second) < second["usage"]["prompt_tokens"]
        server.wait_until_idle()
        reused = prompt - 1 + cached(second)
        assert server.metric("pasta_reused_prompt_tokens_total") == reused


def test_the_models_are_listed_with_or_without_a_slash(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_extra == {"max_model_len": server.decoder.max_tokens}
    assert server.ask("/v1/models/").json == server.ask("/v1/models").json
