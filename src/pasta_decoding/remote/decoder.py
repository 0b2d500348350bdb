"""A checkpoint on servers: a decoder and a scheduler as those of an engine in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from pasta_decoding.answer.record import Answer, ServerUsage
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.answer.settings import SamplingParams
from pasta_decoding.engines.base import Limits
from pasta_decoding.errors import PastaError, checked_url, excerpt
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.catalog import ModelSource
from pasta_decoding.models.load import load_metadata
from pasta_decoding.remote.client import ReplicaPool, Service, headers, is_retryable
from pasta_decoding.remote.driver import AnswerWriter
from pasta_decoding.remote.stream import RemoteError
from pasta_decoding.scheduling.admission import check_fits
from pasta_decoding.scheduling.decoder import Decoder, decoder_fields
from pasta_decoding.scheduling.scheduler import Activity

MAX_MODELS_BYTES = 2**20
STEP_S = 0.02
"""A step waits this long for news at most. New requests and cancels wait for its end."""


@dataclass(frozen=True, slots=True)
class RemoteDecoder(Decoder):
    """A checkpoint on servers. Its tokenizer and its `pasta.json` are in this process."""

    service: Service

    @property
    def capacity(self) -> int:
        return self.service.max_positions

    @property
    def name(self) -> str:
        return "remote"

    def scheduler(
        self,
        *,
        max_requests: int | None = None,
        on_sent: Callable[[ServerUsage], object] = lambda _sent: None,
        **_options: Any,
    ) -> RemoteScheduler:
        return RemoteScheduler(self, max_requests, on_sent)

    def sampler(self, sampling: SamplingParams, choice: int = 0) -> Sampler:
        if sampling.penalises:
            raise PastaError("servers cannot count what an answer repeats across its threads")
        if sampling.logprobs is not None:
            raise PastaError("the servers send token ids and no logprobs")
        return Decoder.sampler(self, sampling, choice)


@dataclass(eq=False)
class RemoteScheduler:
    """Has the methods of `Scheduler`, over servers. Answers are written during calls of `step`.

    max_requests: limit on answers written at a time; None: no limit.
    on_sent: called at the end of each answer, failed ones included, with its use of servers.
    """

    decoder: RemoteDecoder
    max_requests: int | None
    on_sent: Callable[[ServerUsage], object]

    def __post_init__(self) -> None:
        self._admission = (
            asyncio.Semaphore(self.max_requests) if self.max_requests else nullcontext()
        )
        self._pool = ReplicaPool(self.decoder.service)
        self._news = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._writers: list[AnswerWriter] = []  # of answers that have not ended

    @property
    def activity(self) -> Activity:
        running = [
            writer.interpreter
            for writer in self._writers
            if writer.trace.server_usage is not None and not writer.task.done()
        ]
        live_threads = sum(len(interpreter.writing_threads) for interpreter in running)
        return Activity(len(running), live_threads)

    def check(self, request: Request) -> None:
        """Raise PastaError if the servers could never answer `request`. Any thread may call."""
        service = self.decoder.service
        check_fits(request, Limits(service.vocabulary_size, service.max_positions))

    def add(self, request: Request) -> AnswerWriter:
        """Queue a request; the returned writer will have its answer. Raises as `check` does."""
        self.check(request)
        writer = AnswerWriter(request, self.decoder.vocabulary, self._pool, self._news.set)
        writer.task = self._loop.create_task(self._write(writer))
        self._writers.append(writer)
        return writer

    def step(self) -> int:
        """Run the event loop until there is news, or for STEP_S. Returns 0: there is no engine."""
        with suppress(TimeoutError):
            self._loop.run_until_complete(asyncio.wait_for(self._news.wait(), STEP_S))
        self._news.clear()
        self._writers = [writer for writer in self._writers if not writer.task.done()]
        return 0

    def cancel(self, *writers: AnswerWriter) -> None:
        """End these answers and their requests at once."""
        for writer in writers:
            if writer.task.cancel():
                with suppress(asyncio.CancelledError, Exception):
                    self._loop.run_until_complete(writer.task)

    def close(self) -> None:
        """Cancel all answers and close the connections."""
        self.cancel(*self._writers)
        self._loop.run_until_complete(self._pool.aclose())
        self._loop.close()

    async def _write(self, writer: AnswerWriter) -> Answer:
        try:
            async with self._admission:
                return await writer.run()
        finally:
            if writer.trace.server_usage is not None:
                self.on_sent(writer.trace.server_usage)
            self._news.set()


def remote_decoder(
    source: ModelSource,
    base_urls: Sequence[str],
    *,
    names: Sequence[str] = (),
    api_key: str | None = None,
    joining: Joining | None = None,
) -> RemoteDecoder:
    """Return a decoder for a model on servers. All of its checkpoint but the weights is read here.

    names:   the names that the model may have at the servers; ignored where it is the only one.
    joining: `text` decodes even with a checkpoint that was not trained for this join, the only one
             that servers can do.

    Raises PastaError if no server is ready, if they serve different models, or if the checkpoint
    cannot be decoded there.
    """
    if not base_urls:
        raise PastaError("no server is named; give --base-url http://HOST:PORT/v1")
    if joining is Joining.kv:
        raise PastaError("servers of completions cannot join keys, only text")
    checked_urls = [checked_url(base_url, default_path="/v1") for base_url in base_urls]
    urls = tuple(dict.fromkeys(checked_urls))
    loaded = load_metadata(source)
    config = loaded.model.config
    max_positions: int = config.max_position_embeddings
    fields = decoder_fields(loaded, config.vocab_size, joining, (Joining.text,))
    model, max_model_len = find_model(urls, names, api_key=api_key)
    if max_model_len is not None:
        max_positions = min(max_positions, max_model_len)
    service = Service(urls, model, config.vocab_size, max_positions, api_key)
    return RemoteDecoder(**fields, service=service)


def find_model(
    base_urls: Sequence[str], names: Sequence[str], *, api_key: str | None, connect_s: float = 10.0
) -> tuple[str, int | None]:
    """Return the name of the served model, and its `max_model_len` if a server gives one.

    Of several models it is the one with a name among `names`. A replica that cannot be reached now,
    or has an error that may pass, is left out, as long as another one answers. Raises PastaError if
    none does, or if they serve different models.
    """
    served: dict[str, tuple[str, int | None]] = {}  # by URL
    failures: list[str] = []
    for base_url in base_urls:
        try:
            # In another thread, since an event loop may run in this one.
            with ThreadPoolExecutor(1) as executor:
                reply = _models_at(base_url, api_key, connect_s)
                status, body = executor.submit(asyncio.run, reply).result()
            served[base_url] = _model_in(status, body, base_url, names)
        except TimeoutError:
            failures.append(f"{base_url}: it did not list its models within {connect_s:g} s")
        except (httpx.TransportError, httpx.DecodingError, RemoteError) as error:
            failures.append(f"{base_url}: {excerpt(str(error) or type(error).__name__)}")
    if not served:
        raise PastaError(f"no server is ready: {'; '.join(failures)}")
    models = {model for model, _ in served.values()}
    if len(models) > 1:
        listing = ", ".join(f"{model!r} at {base_url}" for base_url, (model, _) in served.items())
        raise PastaError(f"the servers serve different models: {listing}")
    lengths = [length for _, length in served.values() if length is not None]
    return models.pop(), min(lengths, default=None)


async def _models_at(base_url: str, api_key: str | None, limit_s: float) -> tuple[int, bytes]:
    """Return the status and the body of a server's list of models."""
    body = b""
    async with (
        asyncio.timeout(limit_s),  # of all bytes; httpx limits the time of each one
        httpx.AsyncClient(headers=headers(api_key), timeout=limit_s) as client,
        client.stream("GET", f"{base_url}/models") as response,
    ):
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > MAX_MODELS_BYTES:
                raise RemoteError(f"its list of models has no end ({len(body)} bytes came)")
    return response.status_code, body


def _model_in(
    status: int, body: bytes, base_url: str, names: Sequence[str]
) -> tuple[str, int | None]:
    """Return the model that a list of models offers under one of `names`, and its length.

    Raises RemoteError for an error that may pass, else PastaError.
    """
    reply = excerpt(body.decode("utf-8", "replace"))
    if is_retryable(status):
        raise RemoteError(f"it failed with status {status}: {reply}")
    if status in (401, 403):
        raise PastaError(f"{base_url} refuses the key ({status}); set PASTA_REMOTE_KEY")
    try:
        models = {str(model["id"]): dict(model) for model in json.loads(body)["data"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PastaError(f"{base_url}/models does not list models: {reply}") from error
    candidates = list(models) if len(models) == 1 else []
    candidates = [name for name in names if name in models] or candidates
    if not candidates:
        served = ", ".join(map(repr, models)) or "no model"
        expected = " or ".join(map(repr, names))
        message = f"{base_url} serves {served}, none of them called {expected}"
        raise PastaError(f"{message} (vLLM: --served-model-name)")
    model = models[candidates[0]]
    # An adapter's entry has no length of its own: that of its base model counts.
    base_model = models.get(str(model.get("parent")), model)
    length = base_model.get("max_model_len")
    return candidates[0], length if type(length) is int and length > 0 else None
