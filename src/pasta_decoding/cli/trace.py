"""A timeline of an answer in the JSON object form of Chrome's Trace Event Format, for Perfetto."""

from itertools import accumulate
from typing import Any

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.lang.tree import Chunk


def chrome_trace(answer: Answer, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return one lane for each thread, with one box for each token and one for the prefill."""
    trace = answer.trace
    events = [_lane(thread, topic) for thread, topic in _topics(answer).items()]
    prefill = {"tokens": trace.prompt_tokens}
    events.append(_box("prefill", MAIN, 0.0, trace.prefill_s, prefill))
    starts_s = list(accumulate(trace.step_s, initial=trace.prefill_s))
    tags = _tag_names(vocabulary.control)
    for fed in trace.fed:
        if fed.step > len(trace.step_s):
            continue  # this token was decided, but never fed
        name = tags.get(fed.token) or vocabulary.texts[fed.token] or f"<{fed.token}>"
        start_s = starts_s[fed.step - 1]
        step_s = trace.step_s[fed.step - 1]
        details = {"step": fed.step, "position": fed.position}
        events.append(_box(name, fed.thread, start_s, step_s, details))
    return {"traceEvents": events}


def _topics(answer: Answer) -> dict[int, str]:
    chunks = [node for node in answer.tree if isinstance(node, Chunk)]
    topics = {MAIN: "main"}
    for thread, chunk in enumerate(chunks, start=1):
        topics[thread] = chunk.topic or ""
    return topics


def _tag_names(control: ControlTokens) -> dict[int, str]:
    names = {
        control.promise_open: "promise",
        control.async_open: "async",
        control.async_close: "/async",
        control.sync: "sync",
    }
    for tokens, token in control.promise_close.items():
        names[token] = f"promise {tokens}"
    return names


def _lane(thread: int, topic: str) -> dict[str, Any]:
    name = {"name": f"{thread} {topic}"}
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": name}


def _box(
    name: str, thread: int, start_s: float, duration_s: float, details: dict[str, int]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": 0,
        "tid": thread,
        "ts": round(start_s * 1e6, 1),
        "dur": round(duration_s * 1e6, 1),
        "args": details,
    }
