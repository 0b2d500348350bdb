"""Where an answer ends that something cuts off: at a place in reading order.

A budget keeps the first tokens of an answer, a stop string those up to the one that completes it.
So what is kept does not depend on which thread was faster: it is the beginning of what the
threads would have written without limits, as long as they have written that far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pasta_decoding.lang.layout import ChunkRun, PromiseRun, Run, Segment, SyncRun
from pasta_decoding.runtime.stop_filter import StopFilter
from pasta_decoding.runtime.text import ThreadText
from pasta_decoding.runtime.vocabulary import Vocabulary


def tokens_of(segments: Sequence[Segment]) -> int:
    """Count the tokens of some segments: all that are fed, tags included."""
    return sum(1 if isinstance(segment, SyncRun) else len(segment.ids) for segment in segments)


def first_tokens(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """Return what of `segments` the first `tokens` tokens hold.

    A promise stays if its chunk's opening and a first token do. A chunk that the last token belongs
    to is not closed: its end would stand behind it.
    """
    kept: list[Segment] = []
    left = tokens
    for segment in segments:
        if left < _least_tokens(segment):
            break
        kept.append(_beginning(segment, left))
        left -= tokens_of(kept[-1:])
    return kept


def within_limits(
    segments: Sequence[Segment], tokens: int, stops: Sequence[str], vocabulary: Vocabulary
) -> tuple[list[Segment], bool]:
    """Return what a budget of `tokens` and the stop strings keep, and whether one of these did."""
    kept = first_tokens(segments, tokens)
    stop = _tokens_to_stop(kept, stops, vocabulary)
    return (kept, False) if stop is None else (first_tokens(kept, stop), True)


def _tokens_to_stop(
    segments: Sequence[Segment], stops: Sequence[str], vocabulary: Vocabulary
) -> int | None:
    """Return how many tokens it takes until a stop string is complete; None if none ever is."""
    if not stops:
        return None
    found, tokens = StopFilter(stops), 0
    for added, text in _pieces(segments, vocabulary):
        tokens += added
        found.add(text)
        if found.stopped:
            return tokens
    return None


def _least_tokens(segment: Segment) -> int:
    return len(segment.ids) + 2 if isinstance(segment, PromiseRun) else 1


def _beginning(segment: Segment, tokens: int) -> Segment:
    match segment:
        case Run(ids, forced):
            return Run(ids[:tokens], forced)
        case ChunkRun(ids, closed):
            return ChunkRun(ids[:tokens], closed=closed and tokens > len(ids))
        case _:
            return segment


def _pieces(segments: Sequence[Segment], vocabulary: Vocabulary) -> Iterator[tuple[int, str]]:
    """Yield the text in reading order as it becomes certain, and of how many more tokens."""
    for segment in segments:
        match segment:
            case Run(ids):
                yield from _stretch(ids, ThreadText(vocabulary.decode))
            case ChunkRun(ids):
                yield 1, ""
                yield from _stretch(ids[1:], ThreadText(vocabulary.decode, keep_edge=True))
            case _:
                yield tokens_of([segment]), ""


def _stretch(ids: Sequence[int], thread: ThreadText) -> Iterator[tuple[int, str]]:
    for token in ids:
        yield 1, thread.add(token)
    yield 0, thread.end()
