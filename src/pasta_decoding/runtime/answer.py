"""A finished answer: what it says, how it was written step by step, and what that cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pasta_decoding.lang.layout import (
    MAIN,
    ChunkRun,
    Joining,
    Layout,
    Segment,
    lay_out,
    lay_out_rows,
)
from pasta_decoding.lang.tree import Chunk, Tree, show, strip
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.recorder import OutputRecorder
from pasta_decoding.runtime.text import tokens_of, tree_of
from pasta_decoding.runtime.vocabulary import Vocabulary


@dataclass(slots=True)
class Sent:
    """What one answer has asked servers for: the numbers that a planner needs.

    requests:      completions asked for, retries among them,
    corrections:   and those of one token, in place of one that may not stand there.
    prompt_tokens: of all prompts that were answered to the end,
    cached_tokens: and how many of them the server had computed before; None if it does not say.
    """

    requests: int = 0
    corrections: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None

    def add(self, prompt_tokens: int, cached_tokens: int | None) -> None:
        self.prompt_tokens += prompt_tokens
        if cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + cached_tokens


@dataclass(frozen=True, slots=True)
class Fed:
    """One token that the engine computed. Steps count from 1; the prefill is not traced."""

    step: int
    thread: int
    token: int
    position: int


@dataclass(slots=True)
class Trace:
    """The record of one answer.

    prefilled_tokens: tokens of its prompt that were fed for it; a beginning that it shares with
        others counts for the first of them only.
    reused_tokens: of its prompt, that were copied from what the engine still held.
    prefill_s: seconds of the passes that fed its prompt.
    rewritten_tokens: tokens that text joins fed, most of them for the second time. Each join is one
        step, in however many passes.
    sent: requests to servers; None for an engine in this process.
    step_s: seconds of each forward pass, choosing and bookkeeping included.
    """

    prompt_tokens: int
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    prefill_s: float = 0.0
    rewritten_tokens: int = 0
    sent: Sent | None = None
    fed: list[Fed] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def feed(self, thread: int, token: int, position: int) -> None:
        self.fed.append(Fed(len(self.step_s) + 1, thread, token, position))


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as decoding left it.

    segments:         its token ids, in reading order, as training would see them.
    layouts:          thread, position and visibility of every token, prompt included; several
                      rows under the `text` join, else one.
    end:              the token that ended it, of those that may; None if a limit did.
    interventions:    how often a constraint overruled the model, in what was kept.
    truncated:        whether any limit ended a chunk or the answer.
    hit_limit:        whether the answer's own token budget ended it.
    stopped:          whether a stop string ended it; its text still holds that.
    trimmed_tokens:   tokens that were written beyond its end, in reading order.
    first_token_s:    seconds from the request to the first token; None if there was none.
    seconds:          from the request to the end.
    queue_s:          from the request to its admission.
    """

    segments: tuple[Segment, ...]
    layouts: tuple[Layout, ...]
    end: int | None
    tree: Tree
    trace: Trace
    events: tuple[Event, ...]
    first_token_s: float | None
    interventions: int
    truncated: bool
    hit_limit: bool
    stopped: bool
    trimmed_tokens: int
    seconds: float
    queue_s: float

    @property
    def layout(self) -> Layout:
        """The one row of an answer under the `kv` join."""
        (layout,) = self.layouts
        return layout

    @property
    def text(self) -> str:
        return strip(self.tree)

    @property
    def annotated(self) -> str:
        """The text form, tags and escapes included."""
        return show(self.tree)

    @property
    def chunks(self) -> int:
        return sum(isinstance(segment, ChunkRun) for segment in self.segments)

    @property
    def truncated_chunks(self) -> int:
        """How many chunks a limit closed."""
        return sum(isinstance(one, ChunkRun) and not one.closed for one in self.segments)

    @property
    def fed_tokens(self) -> int:
        """How many tokens it has, tags included."""
        return tokens_of(self.segments)

    @property
    def critical_path(self) -> int:
        """Forward steps after the prefill that the answer needs at unlimited width."""
        return self.layouts[-1].critical_path


def conclude(
    prompt: tuple[int, ...],
    recorder: OutputRecorder,
    trace: Trace,
    *,
    seconds: float,
    queue_s: float,
) -> Answer:
    """Make the answer of a finished interpreter."""
    interpreter = recorder.interpreter
    vocabulary, segments = interpreter.vocabulary, tuple(interpreter.segments)
    return Answer(
        segments=segments,
        layouts=_layouts(prompt, segments, interpreter),
        end=interpreter.end,
        tree=tree_of(segments, vocabulary, cut_off=interpreter.stopped or interpreter.hit_limit),
        trace=trace,
        events=tuple(recorder.events),
        first_token_s=recorder.first_token_s,
        interventions=_interventions(segments, recorder),
        truncated=interpreter.truncated,
        hit_limit=interpreter.hit_limit,
        stopped=interpreter.stopped,
        trimmed_tokens=interpreter.budget.written_tokens - tokens_of(segments),
        seconds=seconds,
        queue_s=queue_s,
    )


def _interventions(segments: Sequence[Segment], recorder: OutputRecorder) -> int:
    """Count interventions in kept tokens, closings and the end included unless trimmed."""
    kept, chunks = {MAIN: 0}, 0
    for segment in segments:
        if isinstance(segment, ChunkRun):
            chunks += 1
            kept[chunks] = len(segment.ids) - 1 + segment.closed
        else:
            kept[MAIN] += tokens_of([segment])
    kept[MAIN] += recorder.interpreter.end is not None
    return sum(place < kept.get(thread, 0) for thread, place in recorder.overruled)


def _layouts(
    prompt: tuple[int, ...], segments: tuple[Segment, ...], interpreter: Interpreter
) -> tuple[Layout, ...]:
    close, end = interpreter.vocabulary.control.async_close, interpreter.end
    if interpreter.joining is Joining.text:
        return lay_out_rows(prompt, segments, async_close=close, end=end)
    return (lay_out(prompt, segments, interpreter.scheme, async_close=close, end=end),)


def chrome_trace(answer: Answer, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return Chrome trace events: in Perfetto, one lane a thread, one box a token.

    This is the JSON object form of the Trace Event Format; times are microseconds.
    """
    trace, control = answer.trace, vocabulary.control
    chunks = [node for node in answer.tree if isinstance(node, Chunk)]
    topics = {MAIN: "main"} | {k: chunk.topic or "" for k, chunk in enumerate(chunks, start=1)}
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": k, "args": {"name": f"{k} {topic}"}}
        for k, topic in topics.items()
    ]
    tags = {token: f"promise {tokens}" for tokens, token in control.promise_close.items()}
    tags |= {control.promise_open: "promise", control.async_open: "async"}
    tags |= {control.async_close: "/async", control.sync: "sync"}

    def box(name: str, thread: int, start_s: float, seconds: float, about: dict[str, Any]) -> None:
        ts, dur = round(start_s * 1e6, 1), round(seconds * 1e6, 1)
        about = {"pid": 0, "tid": thread, "ts": ts, "dur": dur, "args": about}
        events.append({"ph": "X", "name": name} | about)

    box("prefill", MAIN, 0.0, trace.prefill_s, {"tokens": trace.prompt_tokens})
    starts_s = list(accumulate(trace.step_s, initial=trace.prefill_s))
    for fed in trace.fed:
        if fed.step <= len(trace.step_s):  # others were decided, but never fed
            step_s = trace.step_s[fed.step - 1]
            where = {"step": fed.step, "position": fed.position}
            name = tags.get(fed.token) or vocabulary.texts[fed.token] or f"<{fed.token}>"
            box(name, fed.thread, starts_s[fed.step - 1], step_s, where)
    return {"traceEvents": events}
