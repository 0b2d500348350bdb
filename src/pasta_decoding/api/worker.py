"""From a decoder to the thread that works it, for every door: Python, the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from pasta_decoding.runtime.engine_thread import EngineThread
from pasta_decoding.runtime.governor import Governor
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.prompt_pace import PromptPace
from pasta_decoding.runtime.worker import Watcher, Worker

if TYPE_CHECKING:
    from pasta_decoding.remote.decoder import RemoteDecoder

AnyDecoder: TypeAlias = "LocalDecoder | RemoteDecoder"


def open_worker(
    decoder: AnyDecoder,
    *,
    max_requests: int | None = None,
    governor: Governor | None = None,
    pace: PromptPace | None = None,
    watcher: Watcher | None = None,
) -> Worker:
    """Return what writes answers with a decoder; whoever opens it closes it.

    max_requests: how many answers are written at a time; None: as many as there is room for.
    governor: who writes in which step, and
    pace:     how much of prompts is fed, of an engine here; see `Scheduler`.
    """
    if isinstance(decoder, LocalDecoder):
        return EngineThread(
            decoder, max_requests=max_requests, governor=governor, pace=pace, watcher=watcher
        )
    from pasta_decoding.remote.scheduler import RemoteWorker

    return RemoteWorker(decoder, watcher, max_requests=max_requests)
