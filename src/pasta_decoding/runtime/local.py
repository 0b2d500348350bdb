"""One loaded model, ready to answer: prompt in, events and answer out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.engines.base import Engine
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import ChunkRun, Joining, Segment
from pasta_decoding.lang.positions import SHARED_MAX, Scheme, scheme_named
from pasta_decoding.models.adapter import merge_adapter
from pasta_decoding.models.load import Loaded, load_apart, load_gguf, load_model
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder, RequestScheduler, decoder_fields, joining_for
from pasta_decoding.runtime.policy import SchedulingPolicy
from pasta_decoding.runtime.request import Request, Rules
from pasta_decoding.runtime.sampler import Replay
from pasta_decoding.runtime.scheduler import Scheduler

LOCAL_JOINS = (Joining.kv, Joining.text)
"""Joins of engines in this process; the first one that a checkpoint was trained for is taken."""


@dataclass(frozen=True, slots=True)
class LocalDecoder(Decoder):
    """A checkpoint on an engine in this process.

    joining: how main comes to see chunks.
    """

    engine: Engine
    scheme: Scheme
    joining: Joining = Joining.kv

    @property
    def capacity(self) -> int:
        """See `Decoder`."""
        cells, positions = self.engine.max_slots, self.engine.max_positions
        return positions if cells is None else min(cells, positions)

    def replay(
        self, prompt: Sequence[int], segments: Sequence[Segment], *, end: int | None = None
    ) -> Request:
        """Return the request that writes a given answer again, every token forced.

        end: the token that ended it; None takes the vocabulary's.
        """
        tokens = sum(len(getattr(segment, "ids", (0,))) for segment in segments)
        chunks = sum(isinstance(segment, ChunkRun) for segment in segments)
        rules = Rules(
            max_tokens=tokens + Rules().max_topic_tokens + 8,
            max_threads=chunks + 1,
            max_chunks=chunks,
            min_chunk_tokens=tokens,
        )
        control = self.vocabulary.control
        last = self.vocabulary.end if end is None else end
        sampler = Replay(segments, async_close=control.async_close, end=last)
        return Request(tuple(prompt), sampler, rules)

    @property
    def name(self) -> str:
        """See `Decoder`."""
        return self.engine.name

    def scheduler(
        self,
        *,
        max_requests: int | None = None,
        policy: SchedulingPolicy | None = None,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Scheduler:
        """Return a new scheduler over the engine; `close` frees the prompts that it keeps."""
        return Scheduler(
            self.engine,
            self.vocabulary,
            self.scheme,
            joining=self.joining,
            max_requests=max_requests,
            policy=policy,
            prefix_caching=prefix_caching,
            clock=clock,
        )

    def answer(self, request: Request) -> Answer:
        """Decode one request alone."""
        return answer_of(self.scheduler(prefix_caching=False), request)


def answer_of(scheduler: RequestScheduler, request: Request) -> Answer:
    """Decode one request and wait for its answer; an exception on the way cancels it."""
    number = scheduler.add(request)
    try:
        while (answer := scheduler.result(number)) is None:
            scheduler.step()
    finally:
        scheduler.forget(number)
    return answer


def torch_decoder(
    base: Path,
    adapter: Path | None,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    cache_tokens: int = DEFAULT_CACHE_TOKENS,
    threads: int | None = None,
    joining: Joining | None = None,
) -> LocalDecoder:
    """Load a checkpoint onto the torch engine. `threads` holds for the whole process.

    Raises PastaError if `device` is not there or has no room for the model.
    """
    import torch

    from pasta_decoding.engines.torch import TorchEngine

    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(base, adapter, dtype=dtype)
    try:
        loaded.model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise PastaError(
            f"cannot put the model on the device {device!r}: {error}", hint="Use --device cpu."
        ) from error
    return decoder_over(TorchEngine(loaded.model, cache_tokens=cache_tokens), loaded, joining)


def fast_decoder(
    base: Path,
    adapter: Path | None,
    *,
    dtype: str = "auto",
    cache_tokens: int = DEFAULT_CACHE_TOKENS,
    threads: int | None = None,
    joining: Joining | None = None,
) -> LocalDecoder:
    """Load a checkpoint onto the fast engine. `threads` holds for the whole process.

    base:  a folder, or a GGUF file.
    dtype: "auto" keeps the base's weights as they are, and computes the adapter beside them.
    """
    import torch

    from pasta_decoding.engines.fast import FastEngine
    from pasta_decoding.engines.weights import GgufWeights, ModelWeights
    from pasta_decoding.gguf_file import GgufFile

    if threads is not None:
        torch.set_num_threads(threads)
    if base.suffix == ".gguf":
        file = GgufFile(base)
        loaded, config, added = load_gguf(file, adapter)
        engine = FastEngine(GgufWeights(file, config, added), cache_tokens=cache_tokens)
        return decoder_over(engine, loaded, joining)
    if dtype != "auto":
        loaded = load_model(base, adapter, dtype=dtype)
        engine = FastEngine(ModelWeights(loaded.model), cache_tokens=cache_tokens)
        return decoder_over(engine, loaded, joining)
    loaded, added = load_apart(base, adapter)
    weights = ModelWeights(loaded.model, added)
    engine = FastEngine(weights, cache_tokens=cache_tokens, cache_dtype=torch.bfloat16)
    if added and adapter is not None:  # trained rows of the embedding, which is not packed
        merge_adapter(loaded.model, adapter, rows_only=True)
    return decoder_over(engine, loaded, joining)


def llama_decoder(
    path: Path,
    *,
    cache_tokens: int = DEFAULT_CACHE_TOKENS,
    threads: int | None = None,
    exact: bool = False,
    joining: Joining | None = None,
) -> LocalDecoder:
    """Load a GGUF file onto the llama engine, with the adapter that is merged into it, if any.

    exact: keep keys and values in F32, as the torch engine does in float32.
    """
    from pasta_decoding.engines.llama import LlamaEngine
    from pasta_decoding.gguf_file import GgufFile

    engine = LlamaEngine(
        path, cache_tokens=cache_tokens, threads=threads, cache_type="F32" if exact else "F16"
    )
    return decoder_over(engine, load_gguf(GgufFile(path), path)[0], joining)


def decoder_over(engine: Engine, loaded: Loaded, joining: Joining | None = None) -> LocalDecoder:
    """Return a decoder for a loaded checkpoint on an engine.

    Raises PastaError if the engine cannot decode as the checkpoint was trained.
    """
    checkpoint = loaded.checkpoint
    joining = joining_for(checkpoint, joining, LOCAL_JOINS)
    scheme = scheme_named(checkpoint.scheme)
    if joining is Joining.text:
        scheme = SHARED_MAX  # a row is a plain sequence, whatever the scheme
    if not (scheme.consecutive or engine.free_positions):
        raise PastaError(
            f"the engine {engine.name!r} cannot take the positions of the scheme {scheme.name!r}",
            hint="Use --engine torch, or another adapter.",
        )
    return LocalDecoder(
        **decoder_fields(loaded, engine.vocabulary_size, joining),
        engine=engine,
        scheme=scheme,
        joining=joining,
    )
