"""Step time against the number of threads of one answer, and against the number of requests.

    python bench/width_cost.py --engines fast:auto llama:auto --model model.gguf --adapter none

Every thread of an answer sees the same slots; every request has slots of its own. The engines take
turns. `cost` is relative to one thread of the same engine. `gpu_step.py` is for GPUs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

from common import arguments, decoder_named, emit, spread

from pasta_decoding.engines.base import Branch, Engine, Feed

WIDTHS = (1, 2, 4, 8, 16, 32)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--slots", type=int, default=256, help="tokens that a thread sees")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    engines = [decoder_named(name, options).engine for name in options.engines]
    kinds = {"threads": open_threads, "requests": open_requests}
    calls: dict[tuple[str, str, int], Callable[[], float]] = {
        (engine.name, kind, width): partial(step_seconds, engine, opened, width, options.slots)
        for engine in engines
        for kind, opened in kinds.items()
        for width in options.widths
    }
    values: dict[tuple[str, str, int], list[float]] = {name: [] for name in calls}
    gc.disable()
    for _ in range(options.repeats + 1):
        for name, call in calls.items():
            values[name].append(call())
    for (name, kind, width), (_warming, *seconds) in values.items():
        _, *one_thread_s = values[name, "threads", options.widths[0]]
        step = spread(seconds)
        cost = round(step["median"] / spread(one_thread_s)["median"], 3)
        fields = {"engine": name, kind: width, "slots": options.slots}
        emit("width_cost", **fields, seconds=step, cost=cost)


def open_threads(engine: Engine, width: int, slots: int) -> list[Branch]:
    """Return `width` branches of one request that share `slots` tokens."""
    first = prompted(engine, slots, width)
    return [first, *(engine.fork(first) for _ in range(width - 1))]


def open_requests(engine: Engine, width: int, slots: int) -> list[Branch]:
    """Return the branches of `width` requests, each with `slots` tokens of its own."""
    return [prompted(engine, slots, 1) for _ in range(width)]


def prompted(engine: Engine, slots: int, new_tokens: int) -> Branch:
    """Return a new request's branch after a prompt, with room for `new_tokens` more."""
    branch = engine.open(reserved_tokens=slots + new_tokens)
    engine.step([Feed((branch,), (1,) * slots, tuple(range(slots)), wants_logits=False)])
    return branch


def step_seconds(
    engine: Engine, opened: Callable[[Engine, int, int], list[Branch]], width: int, slots: int
) -> float:
    """Return the seconds of one step of `width` branches."""
    branches = opened(engine, width, slots)
    feeds = [Feed((branch,), (1,), (slots,)) for branch in branches]
    began_s = time.perf_counter()
    engine.step(feeds)
    taken_s = time.perf_counter() - began_s
    for branch in branches:
        engine.close(branch)
    return taken_s


if __name__ == "__main__":
    main()
