"""A second model, the sequential baseline: listed, asked by its name, and never parallel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.server.backend import Backend
from pasta_decoding.server.metrics import Metrics
from pasta_decoding.server.settings import Load
from tests.server.running import BASELINE, HELLO, MODEL, running, running_over
from tests.server.scripts import saying, with_engine


def test_each_model_answers_under_its_name_and_the_baseline_in_one_thread(
    decoder: LocalDecoder,
) -> None:
    own = with_engine(decoder, saying(decoder, "One: ", "fruit", "an apple", " Done."))
    script = saying(decoder, "Two: ", "fruit", "a pear", " Done.")
    rival = replace(with_engine(decoder, script), parallel=False)
    with running(own, baseline=rival, answer_tokens=32) as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == [MODEL, BASELINE]
        assert client.models.retrieve(BASELINE).id == BASELINE
        texts = {}
        for name in (MODEL, BASELINE):
            reply = server.ask(
                "/v1/chat/completions",
                {"model": name, "messages": HELLO, "temperature": 0, "pasta_parallel": True},
            )
            assert reply.json["model"] == name
            texts[name] = reply.json["choices"][0]["message"]["content"]
        assert texts[MODEL] == "One: an apple Done."
        assert texts[BASELINE].startswith("Two: ")
        assert "a pear" not in texts[BASELINE]  # that was for a chunk's thread to write
        server.wait_until_idle()


@pytest.mark.parametrize("path", ["/v1/models/taught", "/v1/models/other"])
def test_without_a_baseline_there_is_one_model(path: str, decoder: LocalDecoder) -> None:
    own = with_engine(decoder, saying(decoder, "One: ", "fruit", "an apple", " Done."))
    with running(own) as server:
        assert [model["id"] for model in server.ask("/v1/models").json["data"]] == [MODEL]
        refused = server.ask(path)
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")


def test_the_baseline_is_loaded_when_it_is_first_asked_for_and_its_answers_are_counted(
    decoder: LocalDecoder,
) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    own, taught = with_engine(decoder, script), with_engine(decoder, script)
    with running(own, baseline=taught, answer_tokens=32) as server:
        listed = server.ask("/v1/models").json["data"]
        assert ["max_model_len" in model for model in listed] == [True, False]
        assert server.metric("pasta_cache_cells_max") == 8192
        assert server.ask(f"/v1/models/{BASELINE}").json["max_model_len"] == 4096
        assert server.metric("pasta_cache_cells_max") == 2 * 8192
        for name in (MODEL, BASELINE):
            body = {"model": name, "messages": HELLO, "temperature": 0}
            assert server.ask("/v1/chat/completions", body).status == 200
        assert server.metric('pasta_answers_total{end="stop"}') == 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PastaError("there is no memory left"), "there is no memory left"),
        (RuntimeError("a secret"), "the server's log says why"),
    ],
)
def test_a_baseline_that_cannot_be_loaded_is_503_and_is_tried_again(
    decoder: LocalDecoder, error: Exception, told: str
) -> None:
    script = saying(decoder, "One: ", "fruit", "an apple", " Done.")
    tries: list[int] = []

    def load() -> LocalDecoder:
        tries.append(len(tries))
        if len(tries) == 1:
            raise error
        return with_engine(decoder, script)

    own, metrics = with_engine(decoder, script), Metrics()
    backends = {
        MODEL: Backend(lambda: own, metrics, Load()),
        BASELINE: Backend(load, metrics, Load()),
    }
    with running_over(backends, metrics, own, answer_tokens=32) as server:
        body = {"model": BASELINE, "messages": HELLO, "temperature": 0}
        refused = server.ask("/v1/chat/completions", body)
        assert (refused.status, refused.error["code"]) == (503, "model_not_loaded")
        assert refused.error["message"] == f"the model cannot be loaded: {told}"
        assert refused.headers["x-request-id"]
        with ThreadPoolExecutor(3) as clients:
            asked = [clients.submit(server.ask, "/v1/chat/completions", body) for _ in range(3)]
            assert [one.result().status for one in asked] == [200] * 3
        assert tries == [0, 1]
