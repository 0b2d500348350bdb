"""Metrics for Prometheus. Each server has a registry of its own; nothing is global."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pasta_decoding.runtime.answer import Answer, Sent
from pasta_decoding.runtime.scheduler import Activity

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

# name -> help text and labels
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "requests": ("HTTP requests.", "status"),
    "answers": ("Answers by end: stop, length, stop_string, cancelled or failed.", "end"),
    "tokens": ("Tokens of prompts and of answers.", "kind"),
    "reused_prompt_tokens": ("Prompt tokens that the cache held already.",),
    "chunks": ("Chunks that other threads wrote.",),
    "truncations": ("Chunks and answers that a limit cut off.",),
    "trimmed_tokens": ("Tokens written beyond a limit or a stop string.",),
    "interventions": ("Tokens that the language forbade the model.",),
    "steps": ("Decode steps.",),
    "remote_requests": ("Completions asked of servers.",),
    "remote_corrections": ("Of these, single tokens in place of forbidden ones.",),
    "remote_prompt_tokens": ("Prompt tokens of completions.",),
    "remote_cached_tokens": ("Of these, tokens in the servers' prefix caches.",),
}
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "step_width": ("Threads that wrote in a step.", WIDTHS),
    "time_to_first_token_seconds": ("From request to first text, queue included.", SECONDS),
    "answer_seconds": ("From request to the end of its answer.", SECONDS),
}
GAUGES: Mapping[str, str] = {
    "live_threads": "Threads that write now or wait for their turn.",
    "running": "Answers being written.",
    "queue": "Answers that wait for room.",
    "cache_cells": "Cache slots in use by answers.",
    "cache_cells_kept": "Cache slots that keep the beginnings of prompts.",
    "cache_cells_max": "Cache slots.",
}


class Metrics:
    """The metrics of one server. Any thread may write to them."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        self._all: dict[str, Any] = {
            name: Counter(f"pasta_{name}", about, labels, registry=own)
            for name, (about, *labels) in COUNTERS.items()
        }
        for name, (about, buckets) in HISTOGRAMS.items():
            self._all[name] = Histogram(f"pasta_{name}", about, registry=own, buckets=buckets)
        for name, about in GAUGES.items():
            self._all[name] = Gauge(f"pasta_{name}", about, registry=own)

    def count(self, name: str, number: int = 1, *labels: str) -> None:
        """Add to a counter."""
        counter = self._all[name]
        (counter.labels(*labels) if labels else counter).inc(number)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram."""
        self._all[name].observe(value)

    def answered(self, answer: Answer, end: str) -> None:
        """Count the tokens and chunks of an answer that ended."""
        self.count("tokens", answer.trace.prompt_tokens, "prompt")
        self.count("tokens", answer.fed_tokens, "answer")
        self.count("reused_prompt_tokens", answer.trace.reused_tokens)
        self.count("chunks", answer.chunks)
        self.count("trimmed_tokens", answer.trimmed_tokens)
        self.count("interventions", answer.interventions)
        if end != "stop_string":  # which cuts chunks off as well
            self.count("truncations", answer.truncated_chunks + answer.hit_limit)

    def stepped(self, width: int) -> None:
        """Count a step in which this many threads wrote."""
        if width:
            self.count("steps")
            self.observe("step_width", width)

    def sent(self, sent: Sent) -> None:
        """Count what an answer asked of servers."""
        self.count("remote_requests", sent.requests)
        self.count("remote_corrections", sent.corrections)
        self.count("remote_prompt_tokens", sent.prompt_tokens)
        self.count("remote_cached_tokens", sent.cached_tokens or 0)

    def render(self, activities: Sequence[Activity], unended: int) -> bytes:
        """Return everything in Prometheus' text format; `unended` answers run or wait."""
        running = sum(one.running for one in activities)
        gauges = {
            "running": running,
            "queue": max(0, unended - running),
            "live_threads": sum(one.live_threads for one in activities),
            "cache_cells": sum(one.cells for one in activities),
            "cache_cells_kept": sum(one.kept_cells for one in activities),
            "cache_cells_max": sum(one.max_slots for one in activities),
        }
        for name, value in gauges.items():
            self._all[name].set(value)
        return generate_latest(self._registry)
