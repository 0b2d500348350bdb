"""One served model, ready to answer: the counterpart of `decoder` for servers of completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pasta_decoding.engines.base import Limits
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.load import load_metadata
from pasta_decoding.remote.client import Service, checked_url, find_model
from pasta_decoding.remote.scheduler import RemoteScheduler, RemoteWorker
from pasta_decoding.runtime.admission import check_fits
from pasta_decoding.runtime.decoder import Decoder, decoder_fields
from pasta_decoding.runtime.request import Request, SamplingParams
from pasta_decoding.runtime.sampler import Sampler

REMOTE_JOINS = (Joining.text,)


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
        return RemoteScheduler(RemoteWorker(self))

    def check(self, request: Request) -> None:
        """Raise PastaError if `request` could never be answered."""
        check_fits(request, Limits(self.service.vocabulary_size, self.service.max_positions))

    def sampler(self, prompt: Sequence[int], sampling: SamplingParams, choice: int = 0) -> Sampler:
        if sampling.penalises:
            raise PastaError("servers cannot count what an answer repeats across its threads")
        if sampling.logprobs is not None:
            raise PastaError("the servers send token ids and no logprobs")
        return Decoder.sampler(self, prompt, sampling, choice)


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
    fields = decoder_fields(loaded, config.vocab_size, joining, REMOTE_JOINS)
    model, served_positions = find_model(urls, names, api_key=api_key)
    service = Service(
        base_urls=urls,
        model=model,
        vocabulary_size=config.vocab_size,
        max_positions=min(most, served_positions or most),
        api_key=api_key,
    )
    return RemoteDecoder(**fields, service=service)
