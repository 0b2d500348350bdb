"""What a server tells Prometheus about itself. One registry a server: nothing is global."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.trace import Sent

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The counters of one server. Any thread may write to them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "pasta_requests", "HTTP requests by status.", ["status"], registry=registry
        )
        self._answers = Counter(
            "pasta_answers",
            "Answers by end: stop, length, stop_string, cancelled or failed.",
            ["end"],
            registry=registry,
        )
        self._tokens = Counter(
            "pasta_tokens", "Tokens fed, by kind: prompt or answer.", ["kind"], registry=registry
        )
        self._chunks = Counter(
            "pasta_chunks", "Chunks that other threads wrote.", registry=registry
        )
        self._truncations = Counter(
            "pasta_truncations", "Chunks and answers that a limit cut off.", registry=registry
        )
        self._trimmed = Counter(
            "pasta_trimmed_tokens",
            "Tokens that threads had written beyond a limit or a stop string, in vain.",
            registry=registry,
        )
        self._delays = Counter(
            "pasta_delayed_threads",
            "Threads that could have written in a step and waited, by reason: width (others were "
            "worth more), room (too far ahead) or threads (too many have begun).",
            ["reason"],
            registry=registry,
        )
        self._delayed: dict[str, int] = {}
        self._interventions = Counter(
            "pasta_interventions",
            "Tokens where the language forbade what the model wanted: malformed tags, prevented.",
            registry=registry,
        )
        self._steps = Counter(
            "pasta_steps", "Decode steps; their rate is steps a second.", registry=registry
        )
        self._widths = Histogram(
            "pasta_step_width",
            "Threads that wrote in a step, all answers together.",
            buckets=WIDTHS,
            registry=registry,
        )
        self._first_token_s = Histogram(
            "pasta_time_to_first_token_seconds",
            "From the request's arrival to its first text, time in the queue included.",
            buckets=SECONDS,
            registry=registry,
        )
        self._answer_s = Histogram(
            "pasta_answer_seconds",
            "From the request's arrival to the end of its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        self._live = Gauge(
            "pasta_live_threads",
            "Threads that write now or wait for their turn.",
            registry=registry,
        )
        self._running = Gauge("pasta_running", "Answers being written.", registry=registry)
        self._waiting = Gauge("pasta_queue", "Answers that wait for room.", registry=registry)
        self._cells = Gauge("pasta_cache_cells", "Cache cells in use.", registry=registry)
        self._max_cells = Gauge("pasta_cache_cells_max", "Cache cells.", registry=registry)

        self._remote_requests = Counter(
            "pasta_remote_requests", "Completions asked of servers.", registry=registry
        )
        self._remote_corrections = Counter(
            "pasta_remote_corrections",
            "Completions of one token, in place of one that the language forbade.",
            registry=registry,
        )
        self._remote_prompt_tokens = Counter(
            "pasta_remote_prompt_tokens", "Tokens of the prompts of completions.", registry=registry
        )
        self._remote_cached_tokens = Counter(
            "pasta_remote_cached_tokens",
            "Of those, tokens that the servers say they had in their prefix cache.",
            registry=registry,
        )

    def replied(self, status: int) -> None:
        """Count an HTTP request."""
        self._requests.labels(str(status)).inc()

    def stepped(self, width: int, delays: Mapping[str, int]) -> None:
        """Count a decode step of `width` threads. `delays`: of all steps together, by reason."""
        if width:
            self._steps.inc()
            self._widths.observe(width)
        for reason, threads in delays.items():
            self._delays.labels(reason).inc(threads - self._delayed.get(reason, 0))
        self._delayed = dict(delays)

    def stands(self, *, live: int, running: int, waiting: int, cells: int) -> None:
        """Tell how much is under way."""
        self._live.set(live)
        self._running.set(running)
        self._waiting.set(waiting)
        self._cells.set(cells)

    def holds(self, max_cells: int) -> None:
        """Tell how large the cache is."""
        self._max_cells.set(max_cells)

    def first_text(self, seconds: float) -> None:
        """Count the wait for an answer's first text."""
        self._first_token_s.observe(seconds)

    def answered(self, answer: Answer, end: str, seconds: float) -> None:
        """Count an answer, whatever ended it."""
        self.gone(end)
        self._answer_s.observe(seconds)
        self._tokens.labels("prompt").inc(answer.trace.prompt_tokens)
        self._tokens.labels("answer").inc(answer.fed_tokens)
        self._chunks.inc(answer.chunks)
        self._trimmed.inc(answer.trimmed_tokens)
        if end != "stop_string":  # which cuts chunks off, too
            self._truncations.inc(answer.truncated_chunks + answer.hit_limit)
        self._interventions.inc(answer.interventions)

    def sent(self, sent: Sent) -> None:
        """Count what an answer asked of servers, whatever ended it."""
        self._remote_requests.inc(sent.requests)
        self._remote_corrections.inc(sent.corrections)
        self._remote_prompt_tokens.inc(sent.prompt_tokens)
        self._remote_cached_tokens.inc(sent.cached_tokens or 0)

    def gone(self, end: str) -> None:
        """Count an answer of which nothing else is known."""
        self._answers.labels(end).inc()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)
