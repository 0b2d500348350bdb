"""Annotated answers replayed in parallel, against the sequential decode of their plain text.

    python bench/answers.py --engines compiled:bfloat16 --rivals llama:BF16
    python bench/answers.py --answers FILE.jsonl.gz --limit 60 --engines llama:F16

All tokens are forced, everything runs in one process, answer by answer in turns. `--rivals` write
the plain text in llama.cpp's own loop. Only answers with a chunk count. `cells_beyond_tokens`:
cells in use at the peak, less prompt and fed tokens, each once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import arguments, decoder_named, emit, ratio, spread
from llama_loop import forced, llama_loop
from rich.console import Console
from rich.progress import track

from pasta_decoding.data.dataset import Row, read_rows
from pasta_decoding.engines.llama import LlamaEngine
from pasta_decoding.evaluation.bare import BareTimes, StepTime, bare_call
from pasta_decoding.evaluation.timing import Timing, time_answer
from pasta_decoding.lang.layout import ChunkRun
from pasta_decoding.lang.measures import geometric_mean
from pasta_decoding.lang.tree import has_chunk, read, strip
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.training.view import segments_of

SAMPLE = Path(__file__).parents[1] / "examples" / "annotated.jsonl"
MANY = 4

Replayed = tuple[int, Timing]
"""How many chunks an answer has, and its times."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--answers", type=Path, default=SAMPLE)
    parser.add_argument("--limit", type=int, help="a sample of so many, the same each time")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=600, help="leave out longer answers")
    parser.add_argument("--rivals", nargs="*", default=[], help="llama:BF16, llama:Q4_0, ...")
    options = parser.parse_args()
    decoders = {name: decoder_named(name, options) for name in options.engines}
    bare = {name: BareTimes(bare_call(decoder.engine)) for name, decoder in decoders.items()}
    rivals = {name: decoder_named(name, options) for name in options.rivals}
    found: dict[str, list[Replayed]] = {name: [] for name in decoders}
    loops_s: dict[str, list[float]] = {name: [] for name in rivals}
    rows = chosen_rows(options.answers, options.limit)
    for number, row in enumerate(track([rows[0], *rows], console=Console(stderr=True))):
        turn = {
            name: replay(decoder, row, bare[name], options.max_tokens, options.repeats)
            for name, decoder in decoders.items()
        }
        if not number:  # a cold engine is slow
            continue
        for name, timed in turn.items():
            if timed is not None:
                found[name].append(timed)
        if all(turn.values()):
            for name, rival in rivals.items():
                loops_s[name].append(loop_seconds(rival, row, options.max_tokens))
    for name, timings in found.items():
        report(decoders[name].engine.name, options.answers.name, timings, loops_s)


def chosen_rows(path: Path, limit: int | None) -> list[Row]:
    """Return the answers with a promise, or a sample of them."""
    rows = [row for row in read_rows(path) if has_chunk(read(row.response))]
    rows.sort(key=lambda row: hashlib.sha256(row.id.encode()).digest())
    return rows[:limit]


def replay(
    decoder: LocalDecoder, row: Row, bare: StepTime, max_tokens: int, repeats: int = 1
) -> Replayed | None:
    """Time an answer; None if it is too long."""
    tree = read(row.response)
    prompt = decoder.prompt_ids(row.instruction, max_tokens)
    segments = segments_of(tree, decoder.vocabulary.control, decoder.encoder.encode_text)
    if sum(len(getattr(segment, "ids", (0,))) for segment in segments) > max_tokens:
        return None
    chunks = sum(isinstance(segment, ChunkRun) for segment in segments)
    return chunks, time_answer(decoder, prompt, segments, strip(tree), bare, repeats=repeats)


def loop_seconds(rival: LocalDecoder, row: Row, max_tokens: int) -> float:
    """Return what llama.cpp's own loop takes for the plain text of an answer."""
    assert isinstance(rival.engine, LlamaEngine), "a rival is llama:..."
    plain = rival.encoder.encode_text(strip(read(row.response)))
    return llama_loop(rival.engine, rival.prompt_ids(row.instruction, max_tokens), forced(plain))


def report(
    engine: str,
    source: str,
    found: Sequence[Replayed],
    loops_s: Mapping[str, Sequence[float]],
    *,
    benchmark: str = "answers",
    **where: str,
) -> None:
    """Print one line for all answers with a chunk, and one for those with many."""
    for label, least in (("all", 1), (f"{MANY} chunks or more", MANY)):
        chosen = [place for place, (chunks, _) in enumerate(found) if chunks >= least]
        timings = [found[place][1] for place in chosen]
        if not timings:
            continue
        parallel_s = [timing.parallel_s for timing in timings]
        emit(
            benchmark,
            engine=engine,
            source=source,
            answers=len(timings),
            with_chunks=label,
            replay_speedup=ratio([t.sequential_s for t in timings], parallel_s),
            speedup_over={
                f"{name} loop": ratio([loop_s[place] for place in chosen], parallel_s)
                for name, loop_s in loops_s.items()
            },
            interpreter_efficiency=geometric_mean(t.interpreter_efficiency for t in timings),
            replay_speedups=spread([t.replay_speedup for t in timings], 3),
            efficiencies=spread([t.interpreter_efficiency for t in timings], 3),
            sequential_s=spread([t.sequential_s for t in timings], 3),
            parallel_s=spread(parallel_s, 3),
            peak_cells=spread([t.peak_cells for t in timings], 0),
            cells_beyond_tokens=max(t.peak_cells - t.tokens_once for t in timings),
            ideal_s=spread([t.ideal_s for t in timings], 3),
            **where,
        )


if __name__ == "__main__":
    main()
