"""The same prompts and weights: `transformers.generate`, llama.cpp's own loop, and Pasta.

    python bench/peers.py --engines fast:auto --rivals llama:auto --clients 1 4 16
    python bench/peers.py --engines fast:auto --rivals llama:auto --replay annotated.jsonl.gz

Greedy, control tokens banned except in Pasta's parallel mode. All engines are loaded at once and
take turns, so ratios are of one run; of `--rivals` only the library's loops run, and without an
adapter if it decodes a GGUF file. A turn has as many prompts as clients: they arrive together, and
each engine decodes them together, llama.cpp as the sequences of one batch. Prompt lookup is the
same loop, which drafts up to `--drafts` tokens: what followed when the last three tokens, or two,
stood in prompt or answer before. Seconds are for a plain token of all clients and for a whole
answer, prompt included. In JSON, `same` is the share of answers that equal the rival's: llama.cpp
rounds wider passes otherwise, so prompt lookup may decide a near-tie otherwise than the loop. With
`--replay` annotated answers are forced, of those with `--chunks` chunks or more, and the rivals
write the same plain text; nothing samples then. `--out FILE` keeps each turn, and the same command
goes on behind the last one.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from common import ROOT, arguments, decoder_named, emit, ratio, spread
from drivers import Task, Timed, by_llama, by_pasta, by_transformers

from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.data.rows import read_questions, read_rows
from pasta_decoding.engines.llama import LlamaEngine
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.lang.tree import Chunk, read
from pasta_decoding.scheduling.decoder import LocalDecoder

FIGURES = ("token_s", "answer_s", "token_behind_prompt_s")
Peer = tuple[int, str, str]
"""How many clients, an engine's name, and who drives it."""


def main() -> None:
    options = parsed()
    tasks = tasks_of(options)
    results = earlier_results(options)
    decoders = [
        replace(decoder_named(name, options), eagerness=options.eagerness)
        for name in options.engines
    ]
    rival_options = options
    if options.model is not None and options.model.suffix == ".gguf":
        rival_options = Namespace(**{**vars(options), "adapter": "none"})
    rivals = [decoder_named(name, rival_options) for name in options.rivals]
    for decoder in [*decoders, *rivals]:  # a cold engine is slow
        decoder.answer(decoder.request(tasks[0].prompt, Rules(max_tokens=4), SamplingParams()))
    turns = list(turns_of(tasks, options.clients))
    for number in range(len(results), len(turns)):
        calls: dict[Peer, Callable[[], Timed]] = {}
        for decoder in decoders:
            calls |= pasta_calls(decoder, turns[number], options)
        for decoder in [*decoders, *rivals]:
            calls |= library_calls(decoder, turns[number], options)
        results.append({peer: call() for peer, call in calls.items()})
        append_result(options.out, results[-1])
        print(f"{number + 1} of {len(turns)} turns", file=sys.stderr)
    report(results, options)


def parsed() -> Namespace:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--questions", type=Path, default=ROOT / "examples" / "annotated.jsonl")
    add("--replay", type=Path, metavar="FILE", help="annotated answers to force")
    add("--chunks", type=int, default=4, help="the fewest of a forced answer")
    add("--rivals", nargs="*", default=[], help="llama:auto, torch:auto, ...")
    add("--drafts", type=int, nargs="*", default=[2], help="of prompt lookup; none: without it")
    add("--clients", type=int, nargs="+", default=[1])
    add("--max-tokens", type=int, default=96, help="of an answer that is not forced")
    add("--prompts", type=int, default=5, help="for each number of clients")
    add("--eagerness", type=float, default=0.0, help="of answers that are not forced")
    add("--out", type=Path, metavar="FILE", help="keep turns here, and go on")
    add("--json", action="store_true", help="print lines of JSON")
    return parser.parse_args()


def tasks_of(options: Namespace) -> list[Task]:
    """Return the first prompts, or answers with enough chunks from all of the file."""
    if options.replay is None:
        questions = read_questions(options.questions)
        return [Task(question.instruction) for question in questions][: options.prompts]
    tasks = [Task(row.instruction, read(row.response)) for row in read_rows(options.replay)]
    tasks = [task for task in tasks if chunks_of(task) >= options.chunks]
    if not tasks:
        raise SystemExit(f"no answer in {options.replay} has {options.chunks} chunks")
    step = max(1, len(tasks) // options.prompts)
    return tasks[::step][: options.prompts]


def chunks_of(task: Task) -> int:
    return sum(isinstance(node, Chunk) for node in task.tree or ())


def turns_of(tasks: Sequence[Task], clients: Sequence[int]) -> Iterator[list[Task]]:
    """Yield what is decoded together: all tasks for each number of clients, in full turns."""
    for number in clients:
        for start in range(0, max(1, len(tasks) - number + 1), number):
            yield [tasks[(start + n) % len(tasks)] for n in range(number)]


def pasta_calls(
    decoder: LocalDecoder, turn: Sequence[Task], options: Namespace
) -> dict[Peer, Callable[[], Timed]]:
    call = partial(by_pasta, decoder, turn, options.max_tokens)
    peer = (len(turn), decoder.engine.name)
    return {
        (*peer, "pasta sequential"): partial(call, parallel=False),
        (*peer, "pasta parallel"): partial(call, parallel=True),
    }


def library_calls(
    decoder: LocalDecoder, turn: Sequence[Task], options: Namespace
) -> dict[Peer, Callable[[], Timed]]:
    """Return the greedy loops of the library below the engine, if it has one."""
    call_arguments = (decoder, turn, options.max_tokens)
    peer = (len(turn), decoder.engine.name)
    if isinstance(decoder.engine, TorchEngine):
        return {(*peer, "transformers generate"): partial(by_transformers, *call_arguments)}
    if not isinstance(decoder.engine, LlamaEngine):
        return {}
    lookups = {
        (*peer, f"prompt lookup of {drafted}"): partial(by_llama, *call_arguments, drafted=drafted)
        for drafted in options.drafts
    }
    return {(*peer, "llama.cpp loop"): partial(by_llama, *call_arguments), **lookups}


def earlier_results(options: Namespace) -> list[dict[Peer, Timed]]:
    """Return the turns that an earlier run wrote to `--out`; begin the file if there is none."""
    if options.out is None:
        return []
    settings = {name: str(value) for name, value in vars(options).items() if name != "json"}
    if not options.out.exists():
        options.out.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    first, *lines = options.out.read_text(encoding="utf-8").splitlines()
    if json.loads(first) != settings:
        raise SystemExit(f"{options.out} is of a run with other options")
    return [{tuple(peer): Timed(**timed) for peer, timed in json.loads(line)} for line in lines]


def append_result(out: Path | None, result: dict[Peer, Timed]) -> None:
    if out is not None:
        pairs = [[peer, asdict(timed)] for peer, timed in result.items()]
        with out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(pairs) + "\n")


def report(turns: Sequence[dict[Peer, Timed]], options: Namespace) -> None:
    """Print a line for each peer: its seconds, and how many times as fast it is as each rival."""
    turns_of_peer: dict[Peer, list[Timed]] = {}
    for turn in turns:
        for peer, timed in turn.items():
            turns_of_peer.setdefault(peer, []).append(timed)
    if not options.json:
        print(f"{'clients':>7}  {'':42}{'s/token':>9}{'s/answer':>10}  times as fast, a token")
    for (clients, engine, name), timings in turns_of_peer.items():
        faster = {
            f"{rival_name}, {rival_engine}": compared(rival_timings, timings)
            for (rival_clients, rival_engine, rival_name), rival_timings in turns_of_peer.items()
            if rival_clients == clients and not rival_name.startswith("pasta")
        }
        seconds = {figure: spread(values_of(timings, figure)) for figure in FIGURES}
        token_s = seconds["token_s"]["median"]
        answer_s = seconds["answer_s"]["median"]
        ratios = ", ".join(
            f"{figures['token_s']['median']} ({rival})" for rival, figures in faster.items()
        )
        row = f"{clients:7}  {engine + ', ' + name:42}{token_s:9.4f}{answer_s:10.2f}  {ratios}"
        emit(
            "peers",
            text=None if options.json else row,
            engine=engine,
            peer=name,
            clients=clients,
            adapter=options.adapter,
            eagerness=options.eagerness,
            replay=options.replay and options.replay.name,
            turns=len(timings),
            tokens_per_pass=round(fmean(timed.tokens / timed.passes for timed in timings), 3),
            max_tokens=options.max_tokens,
            seconds=seconds,
            times_as_fast_as=faster,
        )


def compared(rival: Sequence[Timed], timings: Sequence[Timed]) -> dict[str, Any]:
    """Return how many times as fast as the rival a peer is, and the share of equal answers."""
    faster = {
        figure: ratio(values_of(rival, figure), values_of(timings, figure)) for figure in FIGURES
    }
    answers = zip(written_in(rival), written_in(timings), strict=True)
    return {**faster, "same": fmean(theirs == ours for theirs, ours in answers)}


def written_in(turns: Sequence[Timed]) -> Iterator[list[int]]:
    return chain.from_iterable(timed.written for timed in turns)


def values_of(turns: Sequence[Timed], figure: str) -> list[float]:
    return [getattr(timed, figure) for timed in turns]


if __name__ == "__main__":
    main()
