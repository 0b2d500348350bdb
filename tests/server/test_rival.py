"""A second model, the sequential baseline: listed, asked by its name, and never parallel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pasta_decoding.runtime.local import LocalDecoder
from tests.server.running import BASELINE, HELLO, MODEL, running
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
