"""Sources of tokens: one that keeps the logits of each choice, and a given answer's."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pasta_decoding.lang.layout import MAIN, ChunkRun, PromiseRun, Run, Segment
from pasta_decoding.runtime.constraints import Constraint
from pasta_decoding.runtime.decoder import LocalDecoder
from pasta_decoding.runtime.request import Request, Rules
from pasta_decoding.runtime.sampler import Choice, Logits, TokenSource


@dataclass
class Watched:
    """Chooses as `source` does. `logits`: by thread, and by place among the thread's tokens."""

    source: TokenSource
    logits: dict[tuple[int, int], Logits] = field(default_factory=dict)

    def sample(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:
        self.logits[thread, index] = logits_V.copy()
        return self.source.sample(thread, index, logits_V, allowed)


class Replay:
    """Writes a given answer again, whatever the model thinks."""

    def __init__(self, segments: Sequence[Segment], *, async_close: int, end: int) -> None:
        self._threads: dict[int, list[int]] = {MAIN: []}
        for segment in segments:
            match segment:
                case Run(ids) | PromiseRun(ids):
                    self._threads[MAIN].extend(ids)
                case ChunkRun(ids):
                    self._threads[len(self._threads)] = [*ids[1:], async_close]
                case _:
                    self._threads[MAIN].append(segment.id)
        self._threads[MAIN].append(end)

    def sample(self, thread: int, index: int, logits_V: Logits, allowed: Constraint) -> Choice:  # noqa: ARG002
        return Choice(self._threads[thread][index], intervened=False)


def replay(
    decoder: LocalDecoder, prompt: Sequence[int], segments: Sequence[Segment], end: int
) -> Request:
    """Return the request that writes a given answer again, every token forced."""
    tokens = sum(len(getattr(segment, "ids", (0,))) for segment in segments)
    chunks = sum(isinstance(segment, ChunkRun) for segment in segments)
    rules = Rules(tokens + 20, chunks + 1, chunks, min_chunk_tokens=tokens)
    source = Replay(segments, async_close=decoder.vocabulary.control.async_close, end=end)
    return Request(tuple(prompt), source, rules)
