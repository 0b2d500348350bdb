"""What a decode did: which token was fed where in which step, and what each step took.

`chrome_trace` gives it as Chrome trace events: opened in Perfetto, one lane a thread, one box a
token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.lang.tree import Chunk
from pasta_decoding.runtime.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pasta_decoding.runtime.answer import Answer


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


def chrome_trace(answer: Answer, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the JSON object form of the Trace Event Format; times are microseconds."""
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
