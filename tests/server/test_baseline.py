"""A second model, the sequential baseline: listed, asked by its name, and never parallel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.runtime.decoder import LocalDecoder
from tests.server.running import BASELINE, CHAT, GOOD, MODEL, running, with_baseline
from tests.server.scripts import saying, with_engine

LONG = GOOD | {"max_tokens": 60}


def test_the_baseline_is_loaded_when_it_is_asked_for_and_answers_in_one_thread(
    decoder: LocalDecoder,
) -> None:
    own = with_engine(decoder, saying(decoder, "One: ", "fruit", "an apple", " Done."))
    script = saying(decoder, "Two: ", "fruit", "a pear", " Done.")
    taught = replace(with_engine(decoder, script), parallel=False)
    with running(own, with_baseline(lambda: own, lambda: taught)) as server:
        listed = server.ask("/v1/models").json["data"]
        assert [model["id"] for model in listed] == [MODEL, BASELINE]
        assert ["max_model_len" in model for model in listed] == [True, False]
        cells = server.metric("pasta_cache_cells_max")
        assert server.ask(f"/v1/models/{BASELINE}").json["max_model_len"] == taught.max_tokens
        assert server.metric("pasta_cache_cells_max") == 2 * cells
        replies = [server.ask(CHAT, LONG | {"model": name}).json for name in (MODEL, BASELINE)]
        first, second = (reply["choices"][0]["message"]["content"] for reply in replies)
        assert [reply["model"] for reply in replies] == [MODEL, BASELINE]
        assert first == "One: an apple Done."
        assert second.startswith("Two: ")
        assert "a pear" not in second  # that was for a chunk's thread to write
        server.wait_until_idle()
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

    own = with_engine(decoder, script)
    with running(own, with_baseline(lambda: own, load)) as server:
        body = LONG | {"model": BASELINE}
        refused = server.ask(CHAT, body)
        assert (refused.status, refused.error["code"]) == (503, "model_not_loaded")
        assert refused.error["message"] == f"the model cannot be loaded: {told}"
        with ThreadPoolExecutor(3) as clients:
            asked = [clients.submit(server.ask, CHAT, body) for _ in range(3)]
            assert [one.result().status for one in asked] == [200] * 3
        assert tries == [0, 1]
