"""Samplers for tests: one records the logits of each choice, one replays an answer."""

from collections.abc import Callable, Sequence

from pasta_decoding.answer.constraints import Constraint
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Logits, RowParams, SampledToken, Sampler
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.lang.layout import MAIN, ChunkRun, MainRun, PromiseRun, Segment
from pasta_decoding.scheduling.decoder import LocalDecoder


class Watched(Sampler):
    """Chooses as `source` does. `logits`: by (thread, index of the token in the thread)."""

    def __init__(self, source: Sampler) -> None:
        super().__init__(source.params, source.request)
        self.source = source
        self.logits: dict[tuple[int, ...], Logits] = {}

    def accept(
        self, row: RowParams, choice: int, logits: Callable[[], Logits], allowed: Constraint
    ) -> SampledToken:
        self.logits[row.key[2:]] = logits().copy()
        return self.source.accept(row, choice, logits, allowed)


class Replay(Sampler):
    """Writes a given answer again, whatever the model thinks."""

    def __init__(self, segments: Sequence[Segment], *, async_close: int, end: int) -> None:
        super().__init__(SamplingParams())
        self._threads: dict[int, list[int]] = {MAIN: []}
        for segment in segments:
            match segment:
                case MainRun(ids) | PromiseRun(ids):
                    self._threads[MAIN].extend(ids)
                case ChunkRun(ids):
                    self._threads[len(self._threads)] = [*ids[1:], async_close]
                case _:
                    self._threads[MAIN].append(segment.id)
        self._threads[MAIN].append(end)

    def accept(self, row: RowParams, *_: object) -> SampledToken:
        thread, index = row.key[2:]
        return SampledToken(self._threads[thread][index], intervened=False)


def replay(
    decoder: LocalDecoder, prompt: Sequence[int], segments: Sequence[Segment], end: int
) -> Request:
    """Return the request that writes a given answer again, every token forced."""
    tokens = sum(len(getattr(segment, "ids", (0,))) for segment in segments)
    chunks = sum(isinstance(segment, ChunkRun) for segment in segments)
    rules = Rules(tokens + 20, chunks + 1, chunks, min_chunk_tokens=tokens)
    source = Replay(segments, async_close=decoder.vocabulary.control.async_close, end=end)
    return Request(tuple(prompt), source, rules)
