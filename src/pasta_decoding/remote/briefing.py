"""The brief of one thread: what its server must know of the rest of the answer."""

from __future__ import annotations

from itertools import takewhile

from pasta_decoding.lang.layout import MAIN, ChunkRun, SyncRun
from pasta_decoding.runtime.briefs import Brief, Kind
from pasta_decoding.runtime.interpreter import Interpreter


def brief_for(interpreter: Interpreter, thread: int) -> Brief | None:
    """Return the brief of a request for `thread`, as things stand; None if biases say it all."""
    rules, topics = interpreter.rules, interpreter.topics
    if not rules.parallel:
        return None
    control, ends = interpreter.vocabulary.control, tuple(sorted(interpreter.vocabulary.eos_ids))
    if thread != MAIN:
        begun = len(interpreter.budget.chunks[thread - 1].ids) > 1
        return Brief(Kind.chunk, control, ends, begun=begun)
    since = takewhile(lambda one: not isinstance(one, SyncRun), reversed(interpreter.segments))
    return Brief(
        Kind.main,
        control,
        ends,
        promises=interpreter.promises_left,
        sync=any(isinstance(one, ChunkRun) for one in since),
        topic=rules.topic,
        max_topic_tokens=rules.max_topic_tokens,
        topics_begin_apart=rules.topics_begin_apart,
        topics=tuple(topics.earlier),
        beginnings=tuple(sorted(topics.beginnings)),
        topic_ids=tuple(topics.ids) if interpreter.in_topic(MAIN) else None,
    )


def texts_before(interpreter: Interpreter, thread: int) -> int:
    """Return how many chunks that are not finished stand before what `thread` writes next."""
    running = [chunk.thread for chunk in interpreter.budget.running]
    return sum(thread == MAIN or one < thread for one in running)
