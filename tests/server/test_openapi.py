"""Our own OpenAPI page holds: whatever it allows or forbids, replies are as it says."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from pasta_decoding.runtime.decoder import Decoder
from tests.server.running import MODEL, Running, running
from tests.server.scripts import endless, with_engine

CHECKS = [
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def endless_server(decoder: Decoder) -> Any:
    with running(with_engine(decoder, endless(decoder)), answer_tokens=4) as server:
        yield server


@pytest.fixture(scope="module")
def api(endless_server: Running) -> Any:
    """Return the page; requests ask for the model that is there, and for short answers."""
    page = endless_server.ask("/openapi.json").json
    for name in ("ChatRequest", "CompletionRequest"):
        properties = page["components"]["schemas"][name]["properties"]
        properties["model"] = {"const": MODEL}
        for limit in ("max_tokens", "max_completion_tokens", "n"):
            if limit in properties:
                properties[limit] = {"type": "integer", "minimum": 1, "maximum": 8}
    load_all_checks()
    return schemathesis.openapi.from_dict(page)


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.timeout(240)
def test_the_openapi_page_holds(case: Any, endless_server: Running) -> None:
    case.call_and_validate(base_url=endless_server.url, checks=CHECKS)
