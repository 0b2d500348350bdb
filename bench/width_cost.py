"""Step time with 1 to 32 live threads, beside the bare library call at the same width.

    python bench/width_cost.py --engines compiled:bfloat16 llama:BF16

Cost is relative to one thread of the same engine; the engines take turns. Cells: how long the cache
is at the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from common import arguments, decoder_named, emit, interleaved, seconds_of, spread

from pasta_decoding.engines.base import Engine, Feed
from pasta_decoding.evaluation.bare import BareCall, bare_call

WIDTHS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cells", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    engines = {name: decoder_named(name, options).engine for name in options.engines}
    calls: dict[tuple[str, str, int], Callable[[], float]] = {}
    for name, engine in engines.items():
        bare = bare_call(engine)
        for width in WIDTHS:
            calls["ours", name, width] = partial(step, engine, width, options.cells)
            calls["bare", name, width] = partial(bare_step, bare, width, options.cells)
    values = interleaved(calls, options.repeats)
    for name, engine in engines.items():
        one = spread(values["ours", name, 1])["median"]
        for width in WIDTHS:
            ours, library = (spread(values[what, name, width]) for what in ("ours", "bare"))
            emit(
                "width_cost",
                engine=engine.name,
                width=width,
                cache_tokens=options.cells,
                seconds=ours,
                bare_seconds=library,
                cost=round(ours["median"] / one, 3),
                of_bare=round(library["median"] / ours["median"], 3),
            )


def bare_step(bare: BareCall, width: int, cells: int) -> float:
    """Return the seconds of one bare call."""
    (taken,) = bare(width, cells, 1)
    return taken


def step(engine: Engine, width: int, cells: int) -> float:
    """Return the seconds of one step of `width` branches that share `cells` cells."""
    main_ = engine.open(reserved_tokens=cells + width)
    prompt = Feed((main_,), (1,) * cells, tuple(range(cells)), wants_logits=False)
    engine.step([prompt])
    if torch.cuda.is_available():  # the prompt wants no logits, so nothing waited for its pass
        torch.cuda.synchronize()
    branches = [main_, *(engine.fork(main_) for _ in range(width - 1))]
    feeds = [Feed((branch,), (1,), (cells,)) for branch in branches]
    taken = seconds_of(lambda: engine.step(feeds))
    for branch in branches:
        engine.close(branch)
    return taken


if __name__ == "__main__":
    main()
