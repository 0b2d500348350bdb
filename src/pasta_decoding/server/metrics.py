"""Metrics for Prometheus. Each server has a registry of its own; nothing is global."""

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pasta_decoding.answer.record import Answer, ServerUsage
from pasta_decoding.scheduling.scheduler import Activity

WIDTHS = {"buckets": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)}
SECONDS = {"buckets": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)}

METRICS: tuple[tuple[Any, str, str, dict[str, Any]], ...] = (
    (Counter, "requests", "HTTP requests.", {"labelnames": ["status"]}),
    (Counter, "answers", "Answers, by what ended them.", {"labelnames": ["end"]}),
    (Counter, "tokens", "Tokens of prompts and of answers.", {"labelnames": ["kind"]}),
    (Counter, "reused_prompt_tokens", "Prompt tokens that the cache held already.", {}),
    (Counter, "chunks", "Chunks that other threads wrote.", {}),
    (Counter, "truncations", "Chunks and answers that a limit cut off.", {}),
    (Counter, "trimmed_tokens", "Tokens written beyond a limit or a stop string.", {}),
    (Counter, "interventions", "Tokens that the language forbade the model.", {}),
    (Counter, "steps", "Decode steps.", {}),
    (Counter, "remote_requests", "Completions asked of servers.", {}),
    (Counter, "remote_corrections", "Of these, single tokens in place of forbidden ones.", {}),
    (Counter, "remote_prompt_tokens", "Prompt tokens of completions.", {}),
    (Counter, "remote_cached_tokens", "Of these, tokens in the servers' prefix caches.", {}),
    (Histogram, "step_width", "Threads that wrote in a step.", WIDTHS),
    (Histogram, "time_to_first_token_seconds", "Request to first token, with its queue.", SECONDS),
    (Histogram, "answer_seconds", "Request to the end of its answer.", SECONDS),
    (Gauge, "live_threads", "Threads that write now or wait for their turn.", {}),
    (Gauge, "running", "Answers being written.", {}),
    (Gauge, "queue", "Answers that wait for room.", {}),
    (Gauge, "cache_cells", "Cache slots in use by answers.", {}),
    (Gauge, "cache_cells_kept", "Cache slots that keep the beginnings of prompts.", {}),
    (Gauge, "cache_cells_max", "Cache slots.", {}),
)


class Metrics:
    """The metrics of one server. Any thread may write to them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._all = {
            name: kind(f"pasta_{name}", description, registry=self._registry, **options)
            for kind, name, description, options in METRICS
        }

    def count(self, name: str, number: int = 1, *labels: str) -> None:
        counter = self._all[name]
        (counter.labels(*labels) if labels else counter).inc(number)

    def observe(self, name: str, value: float) -> None:
        self._all[name].observe(value)

    def answered(self, answer: Answer, end: str) -> None:
        self.count("tokens", answer.trace.prompt_tokens, "prompt")
        self.count("tokens", answer.fed_tokens, "answer")
        self.count("reused_prompt_tokens", answer.trace.reused_tokens)
        self.count("chunks", answer.chunks)
        self.count("trimmed_tokens", answer.trimmed_tokens)
        self.count("interventions", answer.interventions)
        self.observe("time_to_first_token_seconds", answer.first_token_s or answer.seconds)
        self.observe("answer_seconds", answer.seconds)
        if end != "stop_string":  # which cuts chunks off as well
            self.count("truncations", answer.truncated_chunks + answer.hit_limit)

    def stepped(self, width: int) -> None:
        if width:
            self.count("steps")
            self.observe("step_width", width)

    def sent(self, sent: ServerUsage) -> None:
        for name in ("requests", "corrections", "prompt_tokens", "cached_tokens"):
            self.count(f"remote_{name}", getattr(sent, name) or 0)

    def render(self, activities: Sequence[Activity], unended: int) -> bytes:
        """Return everything in Prometheus' text format; `unended` answers run or wait."""
        running = sum(activity.running for activity in activities)
        self._all["running"].set(running)
        self._all["queue"].set(max(0, unended - running))
        self._all["live_threads"].set(sum(activity.live_threads for activity in activities))
        self._all["cache_cells"].set(sum(activity.slots for activity in activities))
        self._all["cache_cells_kept"].set(sum(activity.kept_slots for activity in activities))
        self._all["cache_cells_max"].set(sum(activity.max_slots for activity in activities))
        return generate_latest(self._registry)
