"""What a server tells Prometheus about itself. One registry a server: nothing is global."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.trace import Sent
from pasta_decoding.runtime.worker import Activity

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

# name -> what it counts, and what tells its counts apart
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("HTTP requests by status.", ("status",)),
    "answers": ("Answers by end: stop, length, stop_string, cancelled or failed.", ("end",)),
    "tokens": ("Tokens fed, by kind: prompt or answer.", ("kind",)),
    "reused_prompt_tokens": (
        "Of the prompts' tokens, those that the cache held already: they were not computed.",
        (),
    ),
    "chunks": ("Chunks that other threads wrote.", ()),
    "truncations": ("Chunks and answers that a limit cut off.", ()),
    "trimmed_tokens": (
        "Tokens that threads had written beyond a limit or a stop string, in vain.",
        (),
    ),
    "delayed_threads": (
        "Threads that could have written in a step and waited, by reason: width (others were "
        "worth more), room (too far ahead) or threads (too many have begun).",
        ("reason",),
    ),
    "interventions": (
        "Tokens where the language forbade what the model wanted: malformed tags, prevented.",
        (),
    ),
    "steps": ("Decode steps; their rate is steps a second.", ()),
    "remote_requests": ("Completions asked of servers.", ()),
    "remote_corrections": (
        "Completions of one token, in place of one that the language forbade.",
        (),
    ),
    "remote_prompt_tokens": ("Tokens of the prompts of completions.", ()),
    "remote_cached_tokens": (
        "Of those, tokens that the servers say they had in their prefix cache.",
        (),
    ),
}
# name -> what it is of, and the bounds of its buckets
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "step_width": ("Threads that wrote in a step, all answers together.", WIDTHS),
    "time_to_first_token_seconds": (
        "From the request's arrival to its first text, time in the queue included.",
        SECONDS,
    ),
    "answer_seconds": ("From the request's arrival to the end of its answer.", SECONDS),
}
GAUGES: Mapping[str, str] = {
    "live_threads": "Threads that write now or wait for their turn.",
    "running": "Answers being written.",
    "queue": "Answers that wait for room.",
    "cache_cells": "Cache cells in use by answers.",
    "cache_cells_kept": "Cache cells that keep beginnings of prompts until they are needed.",
    "cache_cells_max": "Cache cells.",
}


class Metrics:
    """The counters of one server. Any thread may write to them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"pasta_{name}", about, labels, registry=registry)
            for name, (about, labels) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"pasta_{name}", about, buckets=bounds, registry=registry)
            for name, (about, bounds) in HISTOGRAMS.items()
        }
        self._gauges = {
            name: Gauge(f"pasta_{name}", about, registry=registry) for name, about in GAUGES.items()
        }

    def replied(self, status: int) -> None:
        """Count an HTTP request."""
        self._count("requests", 1, str(status))

    def stepped(self, width: int, delays: Mapping[str, int]) -> None:
        """See `Watcher`."""
        if width:
            self._count("steps")
            self._histograms["step_width"].observe(width)
        for reason, threads in delays.items():
            self._count("delayed_threads", threads, reason)

    def stands(self, activities: Sequence[Activity], answers: int) -> None:
        """Tell what all workers do now. `answers`: those that have not ended, waiting or not."""
        running = sum(one.running for one in activities)
        self._gauges["running"].set(running)
        self._gauges["queue"].set(max(0, answers - running))
        self._gauges["live_threads"].set(sum(one.live_threads for one in activities))
        self._gauges["cache_cells"].set(sum(one.cells for one in activities))
        self._gauges["cache_cells_kept"].set(sum(one.kept_cells for one in activities))
        self._gauges["cache_cells_max"].set(sum(one.max_slots for one in activities))

    def first_text(self, seconds: float) -> None:
        """Count the wait for an answer's first text."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def answered(self, answer: Answer, end: str, seconds: float) -> None:
        """Count what an answer took."""
        self._histograms["answer_seconds"].observe(seconds)
        self._count("tokens", answer.trace.prompt_tokens, "prompt")
        self._count("reused_prompt_tokens", answer.trace.reused_tokens)
        self._count("tokens", answer.fed_tokens, "answer")
        self._count("chunks", answer.chunks)
        self._count("trimmed_tokens", answer.trimmed_tokens)
        if end != "stop_string":  # which cuts chunks off, too
            self._count("truncations", answer.truncated_chunks + answer.hit_limit)
        self._count("interventions", answer.interventions)

    def sent(self, sent: Sent) -> None:
        """See `Watcher`."""
        self._count("remote_requests", sent.requests)
        self._count("remote_corrections", sent.corrections)
        self._count("remote_prompt_tokens", sent.prompt_tokens)
        self._count("remote_cached_tokens", sent.cached_tokens or 0)

    def gone(self, end: str) -> None:
        """Count an answer of which nothing else is known."""
        self._count("answers", 1, end)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _count(self, name: str, number: int = 1, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(number)
