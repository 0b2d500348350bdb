"""Decoders whose engine writes what a test wants, with the tiny checkpoint's tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pasta_decoding.engines.base import Feed, FloatArray
from pasta_decoding.engines.scripted import Script, ScriptedEngine, follow
from pasta_decoding.runtime.decoder import LocalDecoder

Ids = tuple[int, ...]
STEP_S = 0.005


class Hooked(ScriptedEngine):
    """Calls `hook` with the number of steps made before each further one."""

    hook: Callable[[int], object]

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        self.hook(len(self.steps))
        return super().step(feeds)


def slow(_steps: int) -> None:
    """Take some time for each step."""
    time.sleep(STEP_S)


def with_engine(
    decoder: LocalDecoder, script: Script, hook: Callable[[int], object] = lambda _: None
) -> LocalDecoder:
    """Return `decoder` over a scripted engine."""
    engine = Hooked(script, decoder.engine.vocabulary_size, max_slots=8192)
    engine.hook = hook
    return replace(decoder, engine=engine)


def ids(decoder: LocalDecoder, text: str) -> Ids:
    return tuple(decoder.encoder.encode_text(text))


def endless(decoder: LocalDecoder, hook: Callable[[int], object] = slow) -> LocalDecoder:
    """Return `decoder` over an engine that writes the letter a for ever."""
    a = ids(decoder, "a")[0]
    return with_engine(
        decoder, follow(vocabulary_size=decoder.engine.vocabulary_size, otherwise=a), hook
    )


def saying(
    decoder: LocalDecoder,
    before: str = "One: ",
    topic: str = "fruit",
    chunk: str = "an apple",
    after: str = " Done.",
) -> Script:
    """Write `before`, promise a chunk, wait for it, write `after`."""
    control = decoder.vocabulary.control
    bucket = min(control.promise_close.values())
    end = min(decoder.vocabulary.eos_ids)
    promise = (control.promise_open, *ids(decoder, topic), bucket)
    main = (*ids(decoder, f"assistant\n{before}"), *promise, control.sync)
    rest = (*ids(decoder, after), end)
    return follow(
        main,
        (bucket, control.async_open, *ids(decoder, chunk), control.async_close),
        (control.sync, *rest),
        vocabulary_size=decoder.engine.vocabulary_size,
        otherwise=end,
    )
