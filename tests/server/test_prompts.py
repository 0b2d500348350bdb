"""What of a prompt the cache held already, as clients and Prometheus are told."""

from __future__ import annotations

from typing import Any

from pasta_decoding.runtime.local import LocalDecoder
from tests.server.running import MODEL, Running, running

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "Tell me about the weather in spring, and in autumn."}


def asked(*messages: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "temperature": 0, "max_tokens": 12, **more}


def usage(server: Running, body: dict[str, Any]) -> tuple[int, int]:
    found = server.ask(CHAT, body).json["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


def test_a_next_turn_says_how_much_of_it_was_known(decoder: LocalDecoder) -> None:
    with running(decoder) as server:
        first = server.ask(CHAT, asked(QUESTION)).json
        answer = first["choices"][0]["message"]["content"]
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        history = (QUESTION, {"role": "assistant", "content": answer})
        tokens, cached = usage(server, asked(*history, {"role": "user", "content": "And then?"}))
        assert first["usage"]["prompt_tokens"] - 2 <= cached < tokens
        server.wait_until_idle()
        assert server.metric("pasta_reused_prompt_tokens_total") == cached
        assert server.metric("pasta_cache_cells") == 0
        assert server.metric("pasta_cache_cells_kept") >= tokens
    assert decoder.engine.slots_in_use == 0


def test_choices_share_their_prompt_which_counts_once(decoder: LocalDecoder) -> None:
    with running(decoder) as server:
        tokens, cached = usage(server, asked(QUESTION, n=4))
        assert cached == 0
        server.wait_until_idle()
        assert server.metric("pasta_reused_prompt_tokens_total") == 3 * (tokens - 1)
        again, cached = usage(server, asked(QUESTION, n=4))
        assert (again, cached) == (tokens, tokens - 1)


def test_greedy_answers_do_not_depend_on_what_the_cache_held(decoder: LocalDecoder) -> None:
    with running(decoder) as server:
        first, second = (server.ask(CHAT, asked(QUESTION)).json["choices"] for _ in range(2))
    assert first == second
