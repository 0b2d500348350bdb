"""Annotate a plain response with a trained checkpoint: the text is forced, the tags are free.

The checkpoint writes the response again, unit by unit (candidates.py). In front of a unit it may
promise a chunk, or wait for those before; behind a unit of a chunk it may close it. It does

- promise, if PROMISE_OPEN and the unit as a chunk, with its topic in view, are more likely than the
  unit as main text, by more than `promise_nats`. The topic is the checkpoint's own. It is not
  charged: which of many good topics it happens to be says nothing about the unit;
- close, if the probability of ASYNC_CLOSE is at least `close`;
- sync, if the probability of SYNC is at least `sync`.

The promised length is the real one. In the end every tag is fed as training lays it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pasta_decoding.data.annotate.base import Annotated
from pasta_decoding.data.annotate.forcing import side_by_side
from pasta_decoding.data.annotate.writer import Checkpoint, Thresholds, Writer
from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.tree import Span, show


@dataclass(frozen=True, slots=True)
class Model:
    """The annotator `model`; see `Annotator`. As many rows are decoded together as have room."""

    checkpoint: Checkpoint
    thresholds: Thresholds

    def annotate(self, rows: Iterable[Row]) -> Iterator[Annotated]:
        """Yield one result a row, in order; a row that the cache is too small for is rejected.

        `cost`: `plain_tokens` of the response; `model_tokens` that were fed, prompts included.
        """
        batch: list[Writer] = []
        cells = self.checkpoint.engine.max_cells or float("inf")
        for row in rows:
            writer = Writer(self.checkpoint, self.thresholds, row)
            if sum(one.room for one in [*batch, writer]) > cells:
                yield from self._write(batch)
                batch = []
            if writer.room > cells:
                plain = show((Span(row.response),))
                yield Annotated(
                    replace(row, response=plain), f"needs a cache of {writer.room} tokens"
                )
            else:
                batch.append(writer)
        yield from self._write(batch)

    def _write(self, writers: list[Writer]) -> Iterator[Annotated]:
        done = side_by_side([one.write() for one in writers], self.checkpoint.engine)
        for writer, (tree, fed) in zip(writers, done, strict=True):
            cost = {"plain_tokens": len(writer.ids), "model_tokens": fed}
            yield Annotated(replace(writer.row, response=show(tree)), cost=cost)
