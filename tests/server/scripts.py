"""Decoders whose engine writes what a test wants, with the tiny checkpoint's tokenizer."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pasta_decoding.engines.base import Feed, FloatArray
from pasta_decoding.engines.scripted import Script, ScriptedEngine, follow
from pasta_decoding.runtime.decoder import LocalDecoder

Ids = tuple[int, ...]


class Slow(ScriptedEngine):
    """Takes its time for each step."""

    step_s = 0.005

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        time.sleep(self.step_s)
        return super().step(feeds)


class Stepped(ScriptedEngine):
    """Makes a step for each permit that it is given. `begun` counts those that wait, too."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.permits = threading.Semaphore(0)
        self.begun = 0

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        self.begun += 1
        self.permits.acquire()
        return super().step(feeds)


class Broken(ScriptedEngine):
    """Breaks once after `good_steps`, and is well again after that."""

    good_steps = 5

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        if len(self.steps) == self.good_steps:
            self.good_steps = -1
            raise RuntimeError("the device is gone")
        return super().step(feeds)


class Deadly(ScriptedEngine):
    """Ends its thread after some steps."""

    def step(self, feeds: Sequence[Feed]) -> FloatArray:
        if len(self.steps) == 5:
            raise SystemExit
        return super().step(feeds)


def with_engine(
    decoder: LocalDecoder, script: Script, kind: type[ScriptedEngine] = ScriptedEngine
) -> LocalDecoder:
    """Return `decoder` over a scripted engine."""
    return replace(decoder, engine=kind(script, decoder.engine.vocabulary_size, max_slots=8192))


def ids(decoder: LocalDecoder, text: str) -> Ids:
    return tuple(decoder.encoder.encode_text(text))


def endless(decoder: LocalDecoder) -> Script:
    """Write the letter a for ever."""
    return follow(vocabulary_size=decoder.engine.vocabulary_size, otherwise=ids(decoder, "a")[0])


def saying(decoder: LocalDecoder, before: str, topic: str, chunk: str, after: str) -> Script:
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
