"""Step time with 1 to 32 live threads, beside the bare library call at the same width.

    python bench/width_cost.py --engines torch:auto llama:F16 llama:Q4_0

Cost is relative to one thread of the same engine. Cells: how long the cache is at the step.
"""

from __future__ import annotations

from functools import partial

from common import arguments, decoder_named, emit, interleaved, seconds_of, spread

from pasta_decoding.engines.base import Engine, Feed
from pasta_decoding.evaluation.bare import BareCall, bare_call

WIDTHS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cells", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    for name in options.engines:
        engine = decoder_named(name, options).engine
        bare = bare_call(engine)
        calls = {("ours", w): partial(step, engine, w, options.cells) for w in WIDTHS}
        calls |= {("bare", w): partial(bare_step, bare, w, options.cells) for w in WIDTHS}
        values = interleaved(calls, options.repeats)
        for width in WIDTHS:
            ours, library = spread(values["ours", width]), spread(values["bare", width])
            emit(
                "width_cost",
                engine=engine.name,
                width=width,
                cells=options.cells,
                seconds=ours,
                bare_seconds=library,
                cost=round(ours["median"] / spread(values["ours", 1])["median"], 3),
                of_bare=round(library["median"] / ours["median"], 3),
            )


def bare_step(bare: BareCall, width: int, cells: int) -> float:
    """Return the seconds of one bare call."""
    (taken,) = bare(width, cells, 1)
    return taken


def step(engine: Engine, width: int, cells: int) -> float:
    """Return the seconds of one step of `width` branches that share `cells` cells."""
    main_ = engine.open(room=cells + width)
    prompt = Feed((main_,), (1,) * cells, tuple(range(cells)), wants_logits=False)
    engine.step([prompt])
    branches = [main_, *(engine.fork(main_) for _ in range(width - 1))]
    feeds = [Feed((branch,), (1,), (cells,)) for branch in branches]
    taken = seconds_of(lambda: engine.step(feeds))
    for branch in branches:
        engine.close(branch)
    return taken


if __name__ == "__main__":
    main()
