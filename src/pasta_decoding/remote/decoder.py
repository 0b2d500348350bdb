"""One served model, ready to answer: what `runtime.decoder` and `Scheduler` are to an engine."""

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
from pasta_decoding.answer.request import Request, SamplingParams
from pasta_decoding.answer.sampler import Sampler
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
"""The longest that a step waits for news: new requests and cancels may wait as long."""


@dataclass(frozen=True, slots=True)
class RemoteDecoder(Decoder):
    """A checkpoint that servers have. Its tokenizer and its `pasta.json` are here."""

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
    """As `Scheduler`, over servers. Its answers are written while `step` waits for their news.

    max_requests: how many are written at a time; None sets no limit.
    on_sent: called with what an answer asked of servers, whatever ended it.
    """

    decoder: RemoteDecoder
    max_requests: int | None
    on_sent: Callable[[ServerUsage], object]

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.max_requests) if self.max_requests else nullcontext()
        self._pool = ReplicaPool(self.decoder.service)
        self._news = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._unended: list[AnswerWriter] = []

    @property
    def activity(self) -> Activity:
        unended = [one for one in self._unended if not one.task.done()]
        let_in = [one.interpreter for one in unended if one.trace.sent is not None]
        return Activity(len(let_in), live_threads=sum(len(one.writing) for one in let_in))

    def check(self, request: Request) -> None:
        service = self.decoder.service
        check_fits(request, Limits(service.vocabulary_size, service.max_positions))

    def add(self, request: Request) -> AnswerWriter:
        self.check(request)
        writer = AnswerWriter(request, self.decoder.vocabulary, self._pool, self._news.set)
        writer.task = self._loop.create_task(self._write(writer))
        self._unended.append(writer)
        return writer

    def step(self) -> int:
        """Let answers be written until there is news of one; 0: they take no steps of an engine."""
        with suppress(TimeoutError):
            self._loop.run_until_complete(asyncio.wait_for(self._news.wait(), STEP_S))
        self._news.clear()
        self._unended = [one for one in self._unended if not one.task.done()]
        return 0

    def cancel(self, *writers: AnswerWriter) -> None:
        for one in writers:
            if one.task.cancel():
                with suppress(asyncio.CancelledError, Exception):
                    self._loop.run_until_complete(one.task)

    def close(self) -> None:
        self.cancel(*self._unended)
        self._loop.run_until_complete(self._pool.aclose())
        self._loop.close()

    async def _write(self, writer: AnswerWriter) -> Answer:
        try:
            async with self._places:
                return await writer.run()
        finally:
            if (sent := writer.trace.sent) is not None:
                self.on_sent(sent)
            self._news.set()


def remote_decoder(
    source: ModelSource,
    base_urls: Sequence[str],
    *,
    names: Sequence[str] = (),
    api_key: str | None = None,
    joining: Joining | None = None,
) -> RemoteDecoder:
    """Find out what the servers have, and read everything but weights of the same checkpoint here.

    names: what the model may be called there; of no interest where there is only one.

    Raises PastaError if no server is ready, if they do not serve one model, or if the
    checkpoint was not trained for the `text` join, the only one there; `joining` insists.
    """
    if not base_urls:
        raise PastaError("no server is named; give --base-url http://HOST:PORT/v1")
    if joining is Joining.kv:
        raise PastaError("servers of completions cannot join keys, only text")
    urls = tuple(dict.fromkeys(checked_url(one, alone="/v1") for one in base_urls))
    loaded = load_metadata(source)
    config = loaded.model.config
    most: int = config.max_position_embeddings
    fields = decoder_fields(loaded, config.vocab_size, joining, (Joining.text,))
    model, served_positions = find_model(urls, names, api_key=api_key)
    positions = min(most, served_positions or most)
    service = Service(urls, model, config.vocab_size, positions, api_key)
    return RemoteDecoder(**fields, service=service)


def find_model(
    base_urls: Sequence[str], names: Sequence[str], *, api_key: str | None, connect_s: float = 10.0
) -> tuple[str, int | None]:
    """Ask what is served; return the model's name and how many tokens it holds, if that is said.

    Of several models it is the one that is called as one of `names`. A replica that cannot be
    reached now, or fails with what may pass, may come later, as long as one answers. Raises
    PastaError if none does, or if they do not serve the same.
    """
    found: dict[str, tuple[str, int | None]] = {}
    absent: list[str] = []
    for base_url in base_urls:
        try:
            with ThreadPoolExecutor(1) as other:  # a loop may run in this thread
                coming = _models_at(base_url, api_key, connect_s)
                status, body = other.submit(asyncio.run, coming).result()
            found[base_url] = _model_in(status, body, base_url, names)
        except TimeoutError:
            absent.append(f"{base_url}: it did not list its models within {connect_s:g} s")
        except (httpx.TransportError, httpx.DecodingError, RemoteError) as error:
            absent.append(f"{base_url}: {excerpt(str(error) or type(error).__name__)}")
    if not found:
        raise PastaError(f"no server is ready: {'; '.join(absent)}")
    if len({model for model, _ in found.values()}) > 1:
        served = ", ".join(f"{model!r} at {base_url}" for base_url, (model, _) in found.items())
        raise PastaError(f"the servers serve different models: {served}")
    model = next(model for model, _ in found.values())
    return model, min((size for _, size in found.values() if size is not None), default=None)


async def _models_at(base_url: str, api_key: str | None, limit_s: float) -> tuple[int, bytes]:
    body = b""
    async with (
        asyncio.timeout(limit_s),  # of all its bytes; httpx's own is of the next one
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
    said = excerpt(body.decode("utf-8", "replace"))
    if is_retryable(status):
        raise RemoteError(f"it failed with status {status}: {said}")
    if status in (401, 403):
        raise PastaError(f"{base_url} refuses the key ({status}); set PASTA_REMOTE_KEY")
    try:
        models = {str(one["id"]): dict(one) for one in json.loads(body)["data"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PastaError(f"{base_url}/models does not list models: {said}") from error
    known = [name for name in names if name in models] or (list(models) if len(models) == 1 else [])
    if not known:
        served, wanted = ", ".join(map(repr, models)), " or ".join(map(repr, names))
        message = f"{base_url} serves {served or 'no model'}, none of them called {wanted}"
        raise PastaError(f"{message} (vLLM: --served-model-name)")
    model = models[known[0]]
    size = models.get(str(model.get("parent")), model).get("max_model_len")  # an adapter has none
    return known[0], size if type(size) is int and size > 0 else None
