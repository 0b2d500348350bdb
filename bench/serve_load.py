"""Latency and throughput of a server under load, sequential against parallel.

    python bench/serve_load.py -- --engine llama --dtype Q4_0
    python bench/serve_load.py --rates 0.5 1 2 -- --engine llama
    python bench/serve_load.py --base-url http://localhost:8000/v1 --modes governor

Options behind `--` go to `pasta serve`, which is started for the run; `--base-url` names a running
server instead, which may be of another kind. Modes: `governor` lets the server choose the threads;
`eager` sets `pasta_priority` to high, so all threads of an answer write; `sequential` turns
`pasta_parallel` off; `ban` does so for answers that begin while more than two are running. A cell
is one mode at one load. The modes of a load take turns on the same arrivals, so a slower machine
slows all of them. Goodput: answers a second that end within `--within`, or else within the p95 of
the sequential ones. `of_bar` is the plain rate / (the sequential rate of all tokens x this mode's
share of plain tokens): at 1, tags and vain tokens are the only cost of parallel decoding. Tokens
are those of the plain text, from the characters of the window and the tokens a character of the
finished answers. `warm` is false if the warm-up ran out, so the first answers may be in the cell.
Processor time a token depends less than the clock on other work of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from common import SAMPLE, emit, spread
from load_client import Crowd, Site, Window, watch
from serving import Served, served

from pasta_decoding.data.rows import read_questions

MODES: dict[str, dict[str, Any]] = {
    "sequential": {"pasta_parallel": False},
    "ban": {},
    "eager": {"pasta_priority": "high"},
    "governor": {},
}
BANNED_BEYOND = 2
"""Answers that may be parallel at a time in the mode `ban`."""
SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}

Load = tuple[str, float]
"""Kind of load, `clients` or `rate`, and how much of it."""


def main() -> None:
    options = parsed()
    loads: list[Load] = [("clients", number) for number in options.clients]
    loads += [("rate", number) for number in options.rates]
    cells = len(loads) * len(options.modes) * options.repeats
    at_most_s = cells * (options.warmup + options.seconds)
    print(f"at most {at_most_s / 60:.0f} minutes", file=sys.stderr)
    questions = [one.instruction for one in read_questions(options.prompts)]
    random.Random(options.seed).shuffle(questions)
    with server_of(options) as server:
        for load in loads:
            report(load, options, asyncio.run(run(load, server, questions, options)))


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("serve", nargs="*", help="behind --: options of pasta serve")
    add("--base-url", help="a server that is there, such as http://localhost:8000/v1")
    add("--model", default="", help="with --base-url: the first that it lists if left out")
    add("--clients", type=int, nargs="*", default=[1, 4, 16, 64], help="closed loop")
    add("--rates", type=float, nargs="*", default=[], help="open loop, answers a second")
    add("--most", type=int, default=256, help="open loop: answers under way at a time")
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--seconds", type=float, default=40.0, help="each cell is watched for so long")
    add("--warmup", type=float, default=40.0, help="until each client had a whole answer, at most")
    add("--repeats", type=int, default=1)
    add("--max-tokens", type=int, default=128)
    add("--timeout", type=float, default=120.0, help="seconds that a client waits for an answer")
    add("--prompts", type=Path, default=SAMPLE, help="JSONL with an `instruction` a line")
    add("--seed", type=int, default=0)
    add("--within", type=float, help="seconds in which an answer is good; sequential's p95")
    add("--label", help="what the lines and the plot call the server")
    return parser.parse_args()


def server_of(options: argparse.Namespace) -> AbstractContextManager[Served]:
    """Start a server, or find out what the one that is there calls its model."""
    if not options.base_url:
        return served(options.serve)
    if not options.model:
        listed = httpx2.get(f"{options.base_url}/models", headers=key_header())
        options.model = listed.raise_for_status().json()["data"][0]["id"]
    return nullcontext(Served(options.base_url, options.model))


def key_header() -> dict[str, str]:
    """Return what carries the server's key, if it has one."""
    return {"Authorization": f"Bearer {os.environ.get('PASTA_API_KEY', 'none')}"}


async def run(
    load: Load, server: Served, questions: Sequence[str], options: argparse.Namespace
) -> dict[str, list[Window]]:
    """Watch every mode in turn, `repeats` times; return the windows of each."""
    windows: dict[str, list[Window]] = {mode: [] for mode in options.modes}
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(headers=key_header(), limits=limits, timeout=None) as client:
        for repeat in range(options.repeats):
            for mode in options.modes:
                body = request_body(server.model, mode, options)
                url = f"{server.base_url}/chat/completions"
                banned_beyond = BANNED_BEYOND if mode == "ban" else None
                crowd = Crowd(Site(client, url, body, options.timeout, banned_beyond), questions)
                chance = random.Random(options.seed + repeat)
                window = await cell(load, crowd, chance, options, lambda: server.cpu_s)
                windows[mode].append(window)
                rate = f"{window.characters / window.seconds:.0f} characters/s"
                cold = load[0] == "clients" and not window.warm
                notes = ("not warm: give a longer --warmup",) if cold else ()
                print(*load, mode, rate, *notes, file=sys.stderr)
    return windows


async def cell(
    load: Load,
    crowd: Crowd,
    chance: random.Random,
    options: argparse.Namespace,
    cpu_s: Callable[[], float | None],
) -> Window:
    """Watch one mode at one load."""
    kind, number = load
    if kind == "clients":
        behave, wanted = crowd.closed(int(number)), int(number)
    else:
        behave, wanted = crowd.open(number, options.most, chance), sys.maxsize
    return await watch(
        crowd, behave, options.seconds, lambda: crowd.settled >= wanted, options.warmup, cpu_s
    )


def request_body(model: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a request without its messages."""
    return {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **MODES[mode],
    }


def report(load: Load, options: argparse.Namespace, windows: dict[str, list[Window]]) -> None:
    """Print one line for each mode."""
    where = options.label or options.base_url or " ".join(options.serve) or "pasta serve"
    rates = {mode: [tokens(one) / one.seconds for one in found] for mode, found in windows.items()}
    costs = {mode: cpu_per_token(found) for mode, found in windows.items()}
    base, base_cost = rates.get("sequential"), costs.get("sequential")
    within_s = options.within or limit_s(windows.get("sequential", []))
    for mode, found in windows.items():
        emit(
            "serve_load",
            **{load[0]: load[1]},
            mode=mode,
            server=where,
            max_tokens=options.max_tokens,
            seconds=options.seconds,
            repeats=options.repeats,
            warm=all(one.warm for one in found) if load[0] == "clients" else None,
            plain_tokens_per_s=spread(rates[mode], 2),
            of_sequential=quotients(rates[mode], base) if base else None,
            of_bar=of_bar(found, windows.get("sequential")),
            goodput=goodput(found, within_s),
            cpu_ms_per_token=spread([1e3 * cost for cost in costs[mode]], 3)
            if costs[mode]
            else None,
            cpu_of_sequential=quotients(costs[mode], base_cost) if base_cost else None,
            **figures(found),
        )


def limit_s(windows: Sequence[Window]) -> float | None:
    """Return the p95 of the seconds of some answers."""
    found = percentiles(seconds_of(windows))
    return found["p95"] if found else None


def seconds_of(windows: Sequence[Window]) -> list[float]:
    """Return what the answers of some windows took."""
    answers = chain.from_iterable(one.answers for one in windows)
    return [answer.seconds for answer in answers if answer.seconds is not None]


def goodput(windows: Sequence[Window], within_s: float | None) -> dict[str, float] | None:
    """Return how many answers a second came within a limit, and what share of all that is."""
    found = seconds_of(windows)
    if within_s is None or not found:
        return None
    good = sum(seconds <= within_s for seconds in found)
    rate = good / sum(window.seconds for window in windows)
    return {"within_s": within_s, "per_s": round(rate, 3), "share": round(good / len(found), 3)}


def of_bar(
    windows: Sequence[Window], sequential: Sequence[Window] | None
) -> dict[str, float] | None:
    """Return plain rates over the sequential rates of all tokens times this mode's plain share."""
    shares = [plain_share(one) for one in windows]
    if not sequential or not all(shares):
        return None
    base = [tokens(one) / one.seconds / (plain_share(one) or 1.0) for one in sequential]
    wanted = [rate * (share or 0.0) for rate, share in zip(base, shares, strict=True)]
    return quotients([tokens(one) / one.seconds for one in windows], wanted)


def plain_share(window: Window) -> float | None:
    """Return plain tokens over all that were fed; None where no answer ended, or says so."""
    fed = sum(answer.fed_tokens for answer in window.answers)
    return sum(answer.plain_tokens for answer in window.answers) / fed if fed else None


def quotients(rates: Sequence[float], base: Sequence[float]) -> dict[str, float] | None:
    """Return the spread of rates over those of the same round; None where nothing came."""
    pairs = list(zip(rates, base, strict=True))
    return spread([rate / other for rate, other in pairs], 3) if all(base) else None


def tokens(window: Window) -> float:
    """Return plain tokens that came; 0 if no answer ended, since then nobody said how many."""
    characters = sum(answer.characters for answer in window.answers)
    told = sum(answer.plain_tokens for answer in window.answers)
    return window.characters * told / characters if characters else 0.0


def cpu_per_token(windows: Sequence[Window]) -> list[float]:
    """Return processor seconds a plain token; nothing if that is not known of all windows."""
    pairs = [(one.cpu_s, tokens(one)) for one in windows]
    costs = [cpu_s / found for cpu_s, found in pairs if cpu_s is not None and found]
    return costs if len(costs) == len(windows) else []


def figures(windows: Sequence[Window]) -> dict[str, Any]:
    """Return what some windows of one cell tell together."""
    answers = list(chain.from_iterable(one.answers for one in windows))
    first_s = list(chain.from_iterable(one.first_text_s for one in windows))
    share = partial(share_of, number=len(answers))
    return {
        "answers": len(answers),
        "answers_per_s": round(len(answers) / sum(one.seconds for one in windows), 3),
        "latency_s": percentiles(seconds_of(windows)),
        "first_text_s": percentiles(first_s),
        "plain_tokens_median": median(a.plain_tokens for a in answers) if answers else None,
        "at_limit": share(sum(a.finish == "length" for a in answers)),
        "sequential": share(sum(a.sequential for a in answers)),
        "errors": Counter(chain.from_iterable(one.errors for one in windows)),
        "turned_away": sum(one.turned_away for one in windows),
    }


def share_of(count: int, number: int) -> float | None:
    """Return a share; None of nothing."""
    return round(count / number, 3) if number else None


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p95 and p99 by nearest rank, each a value that was seen; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        name: round(ordered[math.ceil(share * len(ordered)) - 1], 3)
        for name, share in SHARES.items()
    }


if __name__ == "__main__":
    main()
