"""A decode as Chrome trace events: opened in Perfetto, one lane a thread, one box a token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.lang.tree import Chunk
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.vocabulary import Vocabulary

MICROSECONDS = 1e6


def chrome_trace(answer: Answer, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the JSON object form of the Trace Event Format; times are microseconds."""
    return {"traceEvents": [*_names(answer), *_boxes(answer, vocabulary)]}


def _names(answer: Answer) -> Iterator[dict[str, Any]]:
    chunks = [node for node in answer.tree if isinstance(node, Chunk)]
    topics = {MAIN: "main"} | {k: chunk.topic or "" for k, chunk in enumerate(chunks, start=1)}
    for thread, topic in topics.items():
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": 0,
            "tid": thread,
            "args": {"name": f"{thread} {topic}"},
        }


def _boxes(answer: Answer, vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    trace, control = answer.trace, vocabulary.control
    tags = {token: f"promise {tokens}" for tokens, token in control.promise_close.items()}
    tags |= {control.promise_open: "promise", control.async_open: "async"}
    tags |= {control.async_close: "/async", control.sync: "sync"}
    prefill = {"tokens": trace.prompt_tokens}
    yield _box("prefill", MAIN, 0.0, trace.prefill_s, prefill)
    starts_s = list(accumulate((step.seconds for step in trace.steps), initial=trace.prefill_s))
    for fed in trace.fed:
        if fed.step > len(trace.steps):
            continue  # decided, but the answer was stopped before it was fed
        step = trace.steps[fed.step - 1]
        where = {"step": fed.step, "position": fed.position, "cells": step.cells}
        name = tags.get(fed.token) or vocabulary.texts[fed.token] or f"<{fed.token}>"
        yield _box(name, fed.thread, starts_s[fed.step - 1], step.seconds, where)


def _box(
    name: str, thread: int, start_s: float, seconds: float, about: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": 0,
        "tid": thread,
        "ts": round(start_s * MICROSECONDS, 1),
        "dur": round(seconds * MICROSECONDS, 1),
        "args": about,
    }
