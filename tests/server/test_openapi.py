"""Our own OpenAPI page holds: whatever it allows or forbids, replies are as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from pasta_decoding.runtime.decoder import LocalDecoder
from tests.server.running import MODEL, Running, running
from tests.server.scripts import endless, with_engine

POSTS = ["/v1/chat/completions", "/v1/completions"]
ANY_REPLY = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def endless_server(decoder: LocalDecoder) -> Iterator[Running]:
    with running(with_engine(decoder, endless(decoder)), answer_tokens=4) as server:
        yield server


def page_of(server: Running, **narrower: Any) -> Any:
    """Return the page; requests ask for the model that is there, and for what is `narrower`."""
    page = server.ask("/openapi.json").json
    for name in ("ChatRequest", "CompletionRequest"):
        properties = page["components"]["schemas"][name]["properties"]
        properties["model"] = {"const": MODEL}
        properties |= {field: narrower[field] for field in properties.keys() & narrower.keys()}
    return schemathesis.openapi.from_dict(page)


def hold(operation: Any, server: Running, mode: GenerationMode, checks: list[Any]) -> None:
    """Call one operation in many ways and check each reply."""

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def every_reply_is_as_the_page_says(case: Any) -> None:
        case.call_and_validate(base_url=server.url, checks=checks)

    every_reply_is_as_the_page_says()


@pytest.mark.parametrize("path", POSTS)
def test_what_the_page_allows_gets_a_reply_as_it_says(path: str, endless_server: Running) -> None:
    few = {"type": "integer", "minimum": 1, "maximum": 8}
    api = page_of(endless_server, max_tokens=few, max_completion_tokens=few, n=few)
    hold(api[path]["POST"], endless_server, GenerationMode.POSITIVE, ANY_REPLY)


@pytest.mark.parametrize("path", POSTS)
def test_what_the_page_forbids_is_refused_as_it_says(path: str, endless_server: Running) -> None:
    checks = [*ANY_REPLY, negative_data_rejection]
    hold(page_of(endless_server)[path]["POST"], endless_server, GenerationMode.NEGATIVE, checks)
