"""Servers over the tiny checkpoint; every test leaves them with nothing held."""

from collections.abc import Iterator

import pytest

from pasta_decoding.scheduling.decoder import LocalDecoder
from tests.checkpoint import TinyCheckpoint, torch_decoder
from tests.server.running import Running, running


@pytest.fixture(scope="session")
def decoder(tiny_checkpoint: TinyCheckpoint) -> LocalDecoder:
    """Return a decoder of the tiny checkpoint. One server at a time may have it."""
    return torch_decoder(tiny_checkpoint.base, tiny_checkpoint.adapter, cache_tokens=4096)


@pytest.fixture(scope="module")
def shared_server(decoder: LocalDecoder) -> Iterator[Running]:
    """Serve the tiny checkpoint for all tests of a module."""
    with running(decoder, answer_tokens=48) as server:
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """Return the server; what a test began has left nothing behind in the end."""
    yield shared_server
    shared_server.wait_until_idle()
