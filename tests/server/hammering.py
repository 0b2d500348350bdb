"""Clients who do not behave: they leave, lose patience, and ask for what is not there."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import random
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.server.running import MODEL, Reply, Running, wait_for

log = logging.getLogger(__name__)

CONNECTIONS = 16
QUARTERS = 4
FLAT_BYTES = 2**20
"""A leak has the process grow by more than this in each quarter; other things do in one or two."""

JSON = {"Content-Type": "application/json"}
NONSENSE = [b"{", b"[]", b'{"model": "tiny"}', b'{"messages": 1}', b"\xff\xfe", b""]


def hammer(
    server: Running, requests: int, tokens: int, expected: Mapping[str, str]
) -> Counter[str]:
    """Ask `requests` times over 16 connections; return how many visits ended how.

    `expected`: the right answer to each prompt. Fails if a whole answer is another one, an error
    does not have OpenAI's shape, anything is still held in the end, or memory goes on growing.
    """
    tasks = live_tasks()
    with ThreadPoolExecutor(CONNECTIONS) as pool:

        def visit(number: int) -> str:
            return _behave_badly(server, number, tokens, expected)

        ends: Counter[str] = Counter()
        sizes: list[int] = []
        for quarter in range(QUARTERS):
            ends.update(pool.map(visit, range(quarter, requests, QUARTERS)))
            server.wait_until_idle()
            sizes.append(resident_bytes())
    assert server.ask("/health").json == {"status": "ok", "running": 0, "waiting": 0}
    for held in ("live_threads", "queue", "running", "cache_cells"):
        assert server.metric(f"pasta_{held}") == 0
    wait_for(lambda: live_tasks() == tasks)
    grown = [later - earlier for earlier, later in pairwise(sizes)]
    log.info("%s: grown by %s KiB", dict(ends), [size // 1024 for size in grown])
    assert min(grown) < FLAT_BYTES
    return ends


def live_tasks() -> int:
    """Count the tasks of all event loops that have not ended."""
    # `isinstance` would ask objects of others for their class, and some of them warn then.
    found = (one for one in gc.get_objects() if issubclass(type(one), asyncio.Task))
    return sum(not task.done() for task in found)


def resident_bytes() -> int:
    """Return the memory that this process holds; 0 where the system does not say."""
    gc.collect()
    with suppress(AttributeError):  # glibc keeps an allocator for each thread, freed memory and all
        ctypes.CDLL(None).malloc_trim(0)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * 4096


def _behave_badly(server: Running, number: int, tokens: int, expected: Mapping[str, str]) -> str:
    """Ask; then stay to the end, or leave early, or have no patience, or ask for nonsense."""
    chance = random.Random(number)
    prompt = chance.choice(list(expected))
    stream = chance.random() < 0.6
    patience_s = chance.choice([60.0, 60.0, 0.02])
    body = _body(prompt, tokens, stream)
    if chance.random() < 0.1:
        body = chance.choice(NONSENSE)
    connection = HTTPConnection("127.0.0.1", server.port, timeout=patience_s)
    try:
        connection.request("POST", "/v1/chat/completions", body, JSON)
        if chance.random() < 0.2:
            return "left"
        got = connection.getresponse()
        if got.status != 200:
            return _refused(got, nonsense=body in NONSENSE)
        if stream and chance.random() < 0.3:
            got.read(chance.randrange(1, 2000))
            return "left"
        text = streamed_text(got.read()) if stream else whole_text(got.read())
        assert text == expected[prompt]
    except TimeoutError:
        return "timed out"
    finally:
        connection.close()
    return "right"


def _refused(got: HTTPResponse, *, nonsense: bool) -> str:
    """Whoever asks for nonsense is told so; whoever does not is told to come again."""
    error = Reply(got.status, {}, got.read()).error
    if nonsense:
        assert got.status == 400
        return "refused"
    assert got.status == 429
    assert error["code"] == "queue_full"
    assert int(got.headers["Retry-After"]) > 0
    return "busy"


def _body(prompt: str, tokens: int, stream: bool) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": tokens}
    return json.dumps(body | {"temperature": 0, "stream": stream}).encode()


def whole_text(raw: bytes) -> str:
    """Return the text of a plain reply."""
    found: str = json.loads(raw)["choices"][0]["message"]["content"]
    return found


def streamed_text(raw: bytes) -> str:
    """Return the text of a streamed reply."""
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n")]
    chunks = [json.loads(line) for line in lines if line not in ("", "[DONE]")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
