"""One served model, ready to answer: what `runtime.decoder` and `runtime.loop` are to an engine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import httpx2 as httpx

from pasta_decoding.engines.base import Limits
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.load import load_metadata
from pasta_decoding.remote.client import ReplicaPool, Service, headers, is_retryable
from pasta_decoding.remote.driver import AnswerWriter
from pasta_decoding.remote.stream import RemoteError, excerpt
from pasta_decoding.runtime.admission import check_fits
from pasta_decoding.runtime.answer import Answer, Sent
from pasta_decoding.runtime.decoder import Decoder, decoder_fields
from pasta_decoding.runtime.events import Progress
from pasta_decoding.runtime.loop import Cancel, ClosedError, Failure, Listener, News
from pasta_decoding.runtime.request import Request, SamplingParams
from pasta_decoding.runtime.sampler import Sampler
from pasta_decoding.runtime.scheduler import Activity

_MAX_MODELS_BYTES = 2**20


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

    def scheduler(self, *, clock: Callable[[], float] = time.perf_counter) -> RemoteScheduler:  # noqa: ARG002
        return RemoteScheduler(self)

    def check(self, request: Request) -> None:
        """Raise PastaError if `request` could never be answered."""
        check_fits(request, Limits(self.service.vocabulary_size, self.service.max_positions))

    def sampler(self, prompt: Sequence[int], sampling: SamplingParams, choice: int = 0) -> Sampler:
        if sampling.penalises:
            raise PastaError("servers cannot count what an answer repeats across its threads")
        if sampling.logprobs is not None:
            raise PastaError("the servers send token ids and no logprobs")
        return Decoder.sampler(self, prompt, sampling, choice)


class RemoteWorker:
    """As `EngineLoop`, over servers: a thread with an event loop, which holds connections to them.

    max_requests: how many answers are written at a time; None sets no limit.
    on_sent: called with what an answer asked of servers, whatever ended it.
    """

    def __init__(
        self,
        decoder: RemoteDecoder,
        *,
        max_requests: int | None = None,
        on_sent: Callable[[Sent], object] | None = None,
    ) -> None:
        self._decoder, self._on_sent = decoder, on_sent
        self._places = asyncio.Semaphore(max_requests) if max_requests else nullcontext()
        # The answers' own tasks, and who writes in those that have a place.
        self._writers: dict[asyncio.Task[Any] | None, AnswerWriter | None] = {}
        self._handing_in = threading.Lock()
        self._closed = False
        self._pool = ReplicaPool(decoder.service)
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="pasta-remote", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._closed

    @property
    def activity(self) -> Activity:
        writers = [one for one in tuple(self._writers.values()) if one is not None]
        live = sum(len(one.interpreter.writing) for one in writers)
        return Activity(running=len(writers), live_threads=live)

    def check(self, request: Request) -> None:
        self._decoder.check(request)

    def submit(self, request: Request, listener: Listener) -> Cancel:
        self.check(request)
        with self._handing_in:
            if self._closed:
                raise ClosedError
            return self._soon(self._write(request, listener)).cancel

    def close(self) -> None:
        with self._handing_in:
            if self._closed:
                return
            self._closed = True
        self._soon(self._stop()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _soon(self, coroutine: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # The loop's thread

    async def _write(self, request: Request, listener: Listener) -> None:
        task = asyncio.current_task()
        last: Answer | Failure | None = None
        self._writers[task] = None
        try:
            async with self._places:
                writer = AnswerWriter(request, self._decoder.vocabulary, self._pool, listener)
                self._writers[task] = writer
                try:
                    last = await writer.run()
                finally:
                    if self._on_sent is not None:
                        self._on_sent(writer.lease.sent)
        except asyncio.CancelledError:
            last = Failure(ClosedError()) if self._closed else None
            raise
        except Exception as error:  # noqa: BLE001  whoever asked hears of it
            last = Failure(error)
        finally:
            del self._writers[task]
            if last is not None:
                listener(last)

    async def _stop(self) -> None:
        # Only the answers' own tasks: each ends those that it began. anyio leaves a coroutine
        # unawaited whose task is cancelled from outside before it ran.
        tasks = [task for task in self._writers if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.aclose()


@dataclass(eq=False)
class Asked:
    """One request of a `RemoteScheduler`; `last` is what ended it."""

    last: News | None = None
    computed: int = 1

    def result(self) -> Answer | None:
        if isinstance(self.last, Failure):
            raise self.last.error
        return self.last if isinstance(self.last, Answer) else None


class RemoteScheduler:
    """As `Scheduler`, by a worker of its own. Not for several threads."""

    def __init__(self, decoder: RemoteDecoder) -> None:
        self._worker = RemoteWorker(decoder)
        self._news: SimpleQueue[tuple[Asked, News]] = SimpleQueue()
        self._cancels: dict[Asked, Cancel] = {}
        self.close = self._worker.close

    def add(self, request: Request) -> Asked:
        asked = Asked()
        tell = self._news.put
        self._cancels[asked] = self._worker.submit(request, lambda news: tell((asked, news)))
        return asked

    def step(self) -> None:
        """Wait for news of an answer, a second at most; not at all if none is under way."""
        if self._cancels:
            with suppress(Empty):
                asked, news = self._news.get(timeout=1)
                asked.computed += 1
                if asked in self._cancels and not isinstance(news, Progress):
                    del self._cancels[asked]
                    asked.last = news

    def cancel(self, asked: Asked) -> None:
        if cancel := self._cancels.pop(asked, None):
            cancel()


def remote_decoder(
    base: Path,
    adapter: Path | None,
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
    urls = tuple(dict.fromkeys(map(checked_url, base_urls)))
    loaded = load_metadata(base, adapter)
    config = loaded.model.config
    most: int = config.max_position_embeddings
    fields = decoder_fields(loaded, config.vocab_size, joining, (Joining.text,))
    model, served_positions = find_model(urls, names, api_key=api_key)
    positions = min(most, served_positions or most)
    service = Service(urls, model, config.vocab_size, positions, api_key)
    return RemoteDecoder(**fields, service=service)


def checked_url(url: str) -> str:
    """Return a base URL without a slash at its end; a server alone gets its `/v1`."""
    bad = PastaError(f"{url!r} is no base URL such as http://localhost:8000/v1")
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # what a connection would look up
    except (httpx.InvalidURL, TypeError, UnicodeError) as error:
        raise bad from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query:
        raise bad
    return f"{url.rstrip('/')}/v1" if parsed.path in ("", "/") else url.rstrip("/")


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
    with httpx.Client(headers=headers(api_key), timeout=connect_s) as client:
        for base_url in base_urls:
            try:
                found[base_url] = _model_of(client, base_url, names, connect_s)
            except (httpx.TransportError, httpx.DecodingError, RemoteError) as error:
                absent.append(f"{base_url}: {excerpt(str(error) or type(error).__name__)}")
    if not found:
        raise PastaError(f"no server is ready: {'; '.join(absent)}")
    if len({model for model, _ in found.values()}) > 1:
        served = ", ".join(f"{model!r} at {base_url}" for base_url, (model, _) in found.items())
        raise PastaError(f"the servers serve different models: {served}")
    model = next(model for model, _ in found.values())
    return model, min((size for _, size in found.values() if size is not None), default=None)


def _model_of(
    client: httpx.Client, base_url: str, names: Sequence[str], limit_s: float
) -> tuple[str, int | None]:
    end_s, body = time.monotonic() + limit_s, b""
    with client.stream("GET", f"{base_url}/models") as response:
        for piece in response.iter_bytes():
            body += piece
            if len(body) > _MAX_MODELS_BYTES or time.monotonic() > end_s:
                raise RemoteError(f"its list of models has no end ({len(body)} bytes came)")
    status, said = response.status_code, excerpt(body.decode("utf-8", "replace"))
    if is_retryable(status):
        raise RemoteError(f"it failed with status {status}: {said}")
    if status in (401, 403):
        raise PastaError(f"{base_url} refuses the key ({status}); set PASTA_REMOTE_KEY")
    try:
        models = {str(one["id"]): one.get("max_model_len") for one in json.loads(body)["data"]}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PastaError(f"{base_url}/models does not list models: {said}") from error
    known = [name for name in names if name in models] or (list(models) if len(models) == 1 else [])
    if not known:
        raise PastaError(
            f"{base_url} serves {', '.join(map(repr, models)) or 'no model'}, none of them called "
            f"{' or '.join(map(repr, names))} (vLLM: --served-model-name)"
        )
    size = models[known[0]]
    return known[0], size if type(size) is int and size > 0 else None
