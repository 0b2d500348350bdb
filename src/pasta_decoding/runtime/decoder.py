"""One loaded model, ready to answer: prompt in, events and answer out."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pasta_decoding.engines.base import DEFAULT_CELLS, Engine
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import ChunkRun, Segment
from pasta_decoding.lang.positions import Scheme, scheme_named
from pasta_decoding.models.binding import Binding
from pasta_decoding.models.loading import Loaded, load_model
from pasta_decoding.models.prompt import Message, PromptEncoder
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Chooser, Replay, Sampler, Sampling
from pasta_decoding.runtime.scheduler import Request, Scheduler
from pasta_decoding.runtime.vocabulary import Vocabulary, vocabulary_of

JOIN = "kv"


@dataclass(frozen=True, slots=True)
class Decoder:
    """Everything that one answer needs, for one checkpoint and one engine.

    topic:    whether its promises carry one.
    parallel: whether the checkpoint knows the language; else all decoding is sequential.
    """

    engine: Engine
    encoder: PromptEncoder
    vocabulary: Vocabulary
    scheme: Scheme
    topic: bool
    parallel: bool = True

    def prompt_ids(self, prompt: str, max_tokens: int) -> tuple[int, ...]:
        """Encode a user's question; refuses one that leaves no room for `max_tokens` more."""
        room = self.engine.max_positions - max_tokens
        return tuple(self.encoder.encode([Message("user", prompt)], max_tokens=room))

    def request(
        self, prompt: str, rules: Rules, sampling: Sampling, *, max_seconds: float | None = None
    ) -> Request:
        """Return the request that answers `prompt`."""
        ids = self.prompt_ids(prompt, rules.max_tokens)
        return self.request_of(ids, rules, Sampler(sampling), max_seconds=max_seconds)

    def request_of(
        self,
        ids: tuple[int, ...],
        rules: Rules,
        chooser: Chooser,
        *,
        max_seconds: float | None = None,
    ) -> Request:
        """Return the request that answers an encoded prompt, as the checkpoint was trained to."""
        own = replace(rules, topic=self.topic, parallel=rules.parallel and self.parallel)
        return Request(ids, chooser, own, max_seconds)

    def replay(self, prompt: Sequence[int], segments: Sequence[Segment]) -> Request:
        """Return the request that writes a given answer again, every token forced."""
        tokens = sum(len(getattr(segment, "ids", (0,))) for segment in segments)
        chunks = sum(isinstance(segment, ChunkRun) for segment in segments)
        rules = Rules(
            max_tokens=tokens + Rules().max_topic_tokens + 8,
            max_threads=chunks + 1,
            max_chunks=chunks,
            min_chunk_tokens=tokens,
        )
        binding = self.vocabulary.binding
        end = min(self.vocabulary.ends)
        chooser = Replay(segments, async_close=binding.async_close, end=end)
        return Request(tuple(prompt), chooser, rules)

    def scheduler(self, *, clock: Callable[[], float] = time.perf_counter) -> Scheduler:
        """Return a new scheduler over the engine."""
        return Scheduler(self.engine, self.vocabulary, self.scheme, clock=clock)

    def decode(self, request: Request) -> Generator[Event, None, Answer]:
        """Decode one request alone and yield its events live; returns its Answer.

        Leaving the iteration early cancels the request and frees what it holds.
        """
        scheduler = self.scheduler()
        number = scheduler.add(request)
        try:
            while (answer := scheduler.result(number)) is None:
                scheduler.step()
                yield from scheduler.drain_events(number)
        finally:
            scheduler.forget(number)
        return answer

    def answer(self, request: Request) -> Answer:
        """Decode one request alone, without looking at its events."""
        return answer_of(self.scheduler(), request)

    def plain_tokens(self, text: str) -> int:
        """Tokens of a tag-free text, tokenised alone."""
        return len(self.encoder.encode_text(text)) if text else 0


def answer_of(scheduler: Scheduler, request: Request) -> Answer:
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
    cells: int = DEFAULT_CELLS,
    threads: int | None = None,
) -> Decoder:
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
    return decoder_over(TorchEngine(loaded.model, cells=cells), loaded)


def llama_decoder(
    path: Path, *, cells: int = DEFAULT_CELLS, threads: int | None = None, exact: bool = False
) -> Decoder:
    """Load a GGUF that `pasta export` wrote onto the llama engine.

    exact: keep keys and values in F32, as the torch engine does in float32.
    """
    from pasta_decoding.engines.llama import LlamaEngine
    from pasta_decoding.models.gguf import read_metadata

    engine = LlamaEngine(path, cells=cells, threads=threads, cache_type="F32" if exact else "F16")
    return decoder_over(engine, read_metadata(engine.metadata, path))


def decoder_over(engine: Engine, loaded: Loaded) -> Decoder:
    """Return a decoder for a loaded checkpoint on an engine.

    Raises PastaError if the engine cannot decode as the checkpoint was trained.
    """
    checkpoint = loaded.checkpoint
    scheme = scheme_named(checkpoint.scheme)
    if checkpoint.joins and JOIN not in checkpoint.joins:
        raise PastaError(
            f"the checkpoint was trained for the joins {', '.join(checkpoint.joins)}, not {JOIN!r}",
            hint="Use another adapter.",
        )
    if not (scheme.consecutive or engine.free_positions):
        raise PastaError(
            f"the engine {engine.name!r} cannot take the positions of the scheme {scheme.name!r}",
            hint="Use --engine torch, or another adapter.",
        )
    if not loaded.ends:
        raise PastaError(
            "the model names no token that ends an answer",
            hint="Set eos_token_id in its generation_config.json.",
        )
    binding: Binding = checkpoint.binding
    return Decoder(
        engine=engine,
        encoder=PromptEncoder(loaded.tokenizer, forbidden_ids=binding.ids),
        vocabulary=vocabulary_of(loaded.tokenizer, binding, engine.vocabulary_size, loaded.ends),
        scheme=scheme,
        topic=checkpoint.topic == "required",
        parallel=bool(checkpoint.joins),
    )
