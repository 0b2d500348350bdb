"""A finished answer: what it says, how it was written, and what that cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pasta_decoding.lang.layout import (
    MAIN,
    ChunkRun,
    Joining,
    Layout,
    Segment,
    lay_out,
    lay_out_rows,
)
from pasta_decoding.lang.tree import Tree, show, strip
from pasta_decoding.runtime.events import Event
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.recorder import OutputRecorder
from pasta_decoding.runtime.text import tokens_of, tree_of
from pasta_decoding.runtime.trace import Trace


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
