"""vLLM for real, unmodified: its CPU build with the default model, in float32.

`make test-vllm` installs vLLM and runs these tests. vLLM takes minutes to start.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from pasta_decoding.answer.events import Opened
from pasta_decoding.answer.guided import XARG, GuidedParams, GuideKind, write_params
from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.lang.layout import Joining, SyncRun
from pasta_decoding.models.catalog import BaseWithAdapter, WholeModel, find_adapter
from pasta_decoding.models.export import export_hf
from pasta_decoding.models.load import load_model
from pasta_decoding.remote.decoder import RemoteDecoder, remote_decoder
from pasta_decoding.scheduling.asking import ask, run_all
from pasta_decoding.scheduling.decoder import LocalDecoder
from tests.checkpoint import torch_decoder
from tests.golden.golden import PROMPTS
from tests.remote.fake import until

pytestmark = [pytest.mark.remote, pytest.mark.timeout(7200)]

START_S = 900
NAME = "default"
RULES = Rules(max_tokens=300)


@pytest.fixture(scope="module")
def merged(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter for servers, but eager to sync: by itself it seldom does."""
    loaded = load_model(BaseWithAdapter(default_model, find_adapter("balanced")))
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight[loaded.checkpoint.control.sync] *= 1.3
    folder = tmp_path_factory.mktemp("merged") / NAME
    export_hf(loaded, folder)
    return folder


@pytest.fixture(scope="module")
def url(merged: Path) -> Iterator[str]:
    """Serve the checkpoint; return the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = (
        f"--model {merged} --served-model-name {NAME} --dtype float32 --max-model-len 2048 "
        "--enable-prefix-caching --block-size 32 --enable-prompt-tokens-details --enforce-eager "
        f"--max-num-seqs 16 --num-gpu-blocks-override 256 --host 127.0.0.1 --port {port}"
    )
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = shlex.split(f"{os.environ['VLLM']} {options}")
    # In a session of its own, so that its workers are killed with it.
    server = subprocess.Popen(command, env=os.environ | settings, start_new_session=True)

    def is_ready() -> bool:
        assert server.poll() is None, "vLLM has ended; its output says why"
        with suppress(httpx2.TransportError):
            return httpx2.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
        return False

    try:
        until(is_ready, seconds=START_S)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def remote(url: str, merged: Path) -> RemoteDecoder:
    decoder = remote_decoder(WholeModel(merged), [url], names=[NAME])
    assert (decoder.service.model, decoder.context_tokens) == (NAME, 2048)
    # A machine that is busy with other things is slow, and no reason to fail.
    return replace(decoder, service=replace(decoder.service, first_token_s=1800, token_s=1800))


@pytest.fixture(scope="module")
def local(merged: Path) -> LocalDecoder:
    return torch_decoder(merged, merged, join=Joining.text)


@pytest.fixture(scope="module")
def answers(remote: RemoteDecoder, local: LocalDecoder) -> list[tuple[Answer, Answer]]:
    """Each prompt's answer by vLLM, all together, and by the torch engine."""
    requests = [remote.request(prompt, RULES, SamplingParams()) for prompt in PROMPTS]
    return list(zip(together(remote, requests), together(local, requests), strict=True))


def together(decoder: RemoteDecoder | LocalDecoder, requests: list[Request]) -> list[Answer]:
    with closing(decoder.scheduler()) as scheduler:
        return next(run_all(scheduler, [ask(scheduler, requests, max_seconds=1800)]))


def test_answers_are_those_of_the_torch_engine_up_to_a_near_tie(
    answers: list[tuple[Answer, Answer]],
) -> None:
    same = sum(theirs.annotated == ours.annotated for theirs, ours in answers)
    assert same >= len(answers) - 2
    assert any(theirs.chunks for theirs, _ in answers)


def test_nothing_is_taken_back_and_requests_are_one_and_chunks_and_syncs(
    answers: list[tuple[Answer, Answer]],
) -> None:
    """The server has the logits processor: it is installed beside it."""
    for theirs, _ in answers:
        syncs = sum(isinstance(segment, SyncRun) for segment in theirs.segments)
        assert len(theirs.layouts) == 1 + syncs
        opened_chunks = sum(isinstance(event, Opened) for event in theirs.events)
        usage = theirs.trace.server_usage
        assert usage is not None
        assert usage.corrections == 0
        assert 1 + theirs.chunks + syncs <= usage.requests <= 1 + opened_chunks + syncs
        assert theirs.hit_limit or opened_chunks == theirs.chunks
    assert sum(theirs.chunks for theirs, _ in answers) >= 3
    assert sum(len(theirs.layouts) for theirs, _ in answers) >= len(answers) + 3
    assert sum(not theirs.hit_limit for theirs, _ in answers) >= 5
    assert sum(ours.interventions for _, ours in answers) > 0, "by the engine here"


@pytest.mark.parametrize(
    ("change", "status"),
    [({}, 200), ({"promises": -1}, 400), ({"topics": (3,)}, 400), ({"ends": (10**6,)}, 200)],
)
def test_arguments_that_are_garbage_are_refused_and_harm_nobody(
    url: str, remote: RemoteDecoder, change: dict[str, Any], status: int
) -> None:
    params = replace(GuidedParams(GuideKind.main, remote.vocabulary.control, (2,)), **change)
    xargs = {XARG: write_params(params)}
    body = {"model": NAME, "prompt": [20, 21], "max_tokens": 4, "vllm_xargs": xargs}
    reply = httpx2.post(f"{url}/completions", json=body, timeout=60)
    assert reply.status_code == status
    assert status == 200 or "pasta-decoding: " in reply.text


def test_its_second_model_runner_takes_the_processor(merged: Path, local: LocalDecoder) -> None:
    """A CPU has only the first; what the second hands over is made by hand."""
    python = Path(shlex.split(os.environ["VLLM"])[0])
    if not python.name.startswith("python"):
        pytest.skip("give VLLM as a Python and a module: the script runs beside it")
    guide = write_params(GuidedParams(GuideKind.main, local.vocabulary.control, (2,)))
    script = Path(__file__).parents[1] / "vllm" / "runners.py"
    process = subprocess.run(
        [python, script, merged, guide], stdout=subprocess.PIPE, check=True, text=True
    )
    assert json.loads(process.stdout.splitlines()[-1]) == [0, len(local.vocabulary.control.ids)]
