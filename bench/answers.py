"""Annotated answers replayed in parallel, against the sequential decode of their plain text.

    python bench/answers.py --engines torch:auto llama:F16 llama:Q4_0
    python bench/answers.py --answers FILE.jsonl.gz --limit 60 --engines llama:F16

All tokens are forced, both decodes run in one process, one after the other. Only answers with a
chunk count. `cells_beyond_tokens`: cells in use at the peak, less prompt and fed tokens, each once.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from common import arguments, decoder_named, emit, spread
from rich.console import Console
from rich.progress import track

from pasta_decoding.data.dataset import Row, read_rows
from pasta_decoding.evaluation.bare import BareTimes, StepTime, bare_call
from pasta_decoding.evaluation.timing import Timing, time_answer
from pasta_decoding.lang.layout import ChunkRun
from pasta_decoding.lang.measures import geometric_mean
from pasta_decoding.lang.tree import has_chunk, read, strip
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.training.view import segments_of

SAMPLE = Path(__file__).parents[1] / "examples" / "annotated.jsonl"
MANY = 4


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--answers", type=Path, default=SAMPLE)
    parser.add_argument("--limit", type=int, help="a sample of so many, the same each time")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=600, help="leave out longer answers")
    options = parser.parse_args()
    rows = chosen_rows(options.answers, options.limit)
    for name in options.engines:
        decoder = decoder_named(name, options)
        bare = BareTimes(bare_call(decoder.engine))
        replay(decoder, rows[0], bare, options.max_tokens)  # a cold engine is slow
        found = [
            replay(decoder, row, bare, options.max_tokens, options.repeats)
            for row in track(rows, name, console=Console(stderr=True), transient=True)
        ]
        timings = [timed for timed in found if timed is not None]
        report(decoder, options.answers.name, timings)


def chosen_rows(path: Path, limit: int | None) -> list[Row]:
    """Return the answers with a promise, or a sample of them."""
    rows = [row for row in read_rows(path) if has_chunk(read(row.response))]
    rows.sort(key=lambda row: hashlib.sha256(row.id.encode()).digest())
    return rows[:limit]


def replay(
    decoder: LocalDecoder, row: Row, bare: StepTime, max_tokens: int, repeats: int = 1
) -> tuple[int, Timing] | None:
    """Return how many chunks the answer has, and its times; None if it is too long."""
    tree = read(row.response)
    prompt = decoder.prompt_ids(row.instruction, max_tokens)
    segments = segments_of(tree, decoder.vocabulary.control, decoder.encoder.encode_text)
    if sum(len(getattr(segment, "ids", (0,))) for segment in segments) > max_tokens:
        return None
    chunks = sum(isinstance(segment, ChunkRun) for segment in segments)
    return chunks, time_answer(decoder, prompt, segments, strip(tree), bare, repeats=repeats)


def report(
    decoder: LocalDecoder,
    source: str,
    found: list[tuple[int, Timing]],
    *,
    benchmark: str = "answers",
    **where: str,
) -> None:
    """Print one line for all answers with a chunk, and one for those with many."""
    for label, least in (("all", 1), (f"{MANY} chunks or more", MANY)):
        timings = [timing for chunks, timing in found if chunks >= least]
        if not timings:
            continue
        emit(
            benchmark,
            engine=decoder.engine.name,
            source=source,
            answers=len(timings),
            with_chunks=label,
            replay_speedup=geometric_mean(t.replay_speedup for t in timings),
            interpreter_efficiency=geometric_mean(t.interpreter_efficiency for t in timings),
            replay_speedups=spread([t.replay_speedup for t in timings], 3),
            efficiencies=spread([t.interpreter_efficiency for t in timings], 3),
            sequential_s=spread([t.sequential_s for t in timings], 3),
            parallel_s=spread([t.parallel_s for t in timings], 3),
            peak_cells=spread([t.peak_cells for t in timings], 0),
            cells_beyond_tokens=max(t.peak_cells - t.tokens_once for t in timings),
            ideal_s=spread([t.ideal_s for t in timings], 3),
            **where,
        )


if __name__ == "__main__":
    main()
