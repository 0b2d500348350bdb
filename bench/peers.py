"""The same prompts and weights: `transformers.generate`, llama.cpp's own loop, and Pasta.

    python bench/peers.py --engines fast:auto --rivals llama:BF16 llama:Q4_0

Greedy, control tokens banned except in Pasta's parallel mode. All engines are loaded at once and
take turns prompt by prompt, so that ratios are of one run; of `--rivals` only the library's loop
runs. Each writes up to the limit or its own end. Seconds are for a plain token and for a whole
answer, prompt included. The rivals of a GGUF file decode it without an adapter.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import SAMPLE, arguments, decoder_named, emit, interleaved, ratio, seconds_of, spread
from llama_loop import greedy, llama_loop

from pasta_decoding.data.rows import read_questions
from pasta_decoding.engines.llama import LlamaEngine
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.runtime.decoder import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams

RIVAL = "llama.cpp loop"
Peer = tuple[str, str]
"""An engine's name and who drives it."""
Call = Callable[[], tuple[float, float]]
"""Returns the seconds of an answer, and of each of its tokens."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--questions", type=Path, default=SAMPLE, help="with `instruction`s")
    parser.add_argument("--rivals", nargs="*", default=[], help="llama:BF16, llama:Q4_0, ...")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    prompts = [one.instruction for one in read_questions(options.questions)][: options.prompts]
    decoders = [decoder_named(name, options) for name in options.engines]
    alone = options.model is not None and options.model.suffix == ".gguf"
    without = Namespace(**{**vars(options), "adapter": "none"}) if alone else options
    rivals = [decoder_named(name, without) for name in options.rivals]
    found: dict[Peer, list[tuple[float, float]]] = {}
    for number, prompt in enumerate(prompts):
        calls: dict[Peer, Call] = {}
        for decoder in [*decoders, *rivals]:
            calls |= calls_of(decoder, prompt, options.max_tokens, decoder in decoders)
        for peer, values in interleaved(calls, options.repeats, warm=not number).items():
            found.setdefault(peer, []).append(tuple(np.median(values, axis=0).tolist()))
        print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr)
    report(found, options.max_tokens, options.adapter)


def report(
    found: dict[Peer, list[tuple[float, float]]], max_tokens: int, adapter: str | None
) -> None:
    """Print a line for each peer: its seconds, and how many times as fast it is as each rival."""
    rivals = {engine: values for (engine, peer), values in found.items() if peer == RIVAL}
    for (engine, peer), values in found.items():
        emit(
            "peers",
            engine=engine,
            peer=peer,
            adapter=adapter,
            prompts=len(values),
            max_tokens=max_tokens,
            seconds_per_token=spread([per_token for _, per_token in values]),
            seconds_per_answer=spread([whole for whole, _ in values]),
            times_as_fast_as={
                f"{RIVAL}, {rival}, {what}": ratio(
                    *([v[n] for v in both] for both in (theirs, values))
                )
                for rival, theirs in rivals.items()
                for n, what in enumerate(("answer", "token"))
            },
        )


def calls_of(
    decoder: LocalDecoder, prompt: str, max_tokens: int, ours_too: bool
) -> dict[Peer, Call]:
    """Return Pasta's two ways to write the answer, and the loop of the library below the engine."""
    engine, calls = decoder.engine, {}
    if not engine.name.startswith("fast"):
        name = RIVAL if isinstance(engine, LlamaEngine) else "transformers generate"
        ids = decoder.prompt_ids(prompt, max_tokens)
        calls[engine.name, name] = partial(library_loop, decoder, ids, max_tokens)
    for mode in ("sequential", "parallel") if ours_too else ():
        parallel = mode == "parallel"
        calls[engine.name, f"pasta {mode}"] = partial(ours, decoder, prompt, max_tokens, parallel)
    return calls


def library_loop(
    decoder: LocalDecoder, ids: tuple[int, ...], max_tokens: int
) -> tuple[float, float]:
    """Time the library's own greedy loop."""
    banned = sorted(decoder.vocabulary.control.ids)
    if isinstance(decoder.engine, LlamaEngine):
        choose, written = greedy(banned, decoder.vocabulary.eos_ids, max_tokens)
        taken_s = llama_loop(decoder.engine, ids, choose)
        return taken_s, taken_s / len(written)
    assert isinstance(decoder.engine, TorchEngine), "the engines with a library below"
    return generate(decoder.engine.model, ids, max_tokens, banned)


def generate(
    model: Any, ids: tuple[int, ...], max_tokens: int, banned: list[int]
) -> tuple[float, float]:
    """Time `generate` with transformers' own attention and cache."""
    import torch

    ours_ = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    prompt = torch.tensor([ids], device=model.device)
    began_s = time.perf_counter()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        do_sample=False,
        suppress_tokens=banned,
    )
    taken_s = time.perf_counter() - began_s
    model.set_attn_implementation(ours_)
    return taken_s, taken_s / (output.shape[1] - len(ids))


def ours(
    decoder: LocalDecoder, prompt: str, max_tokens: int, parallel: bool
) -> tuple[float, float]:
    """Time Pasta, for each plain token (parallel) or token (sequential)."""
    rules = Rules(max_tokens=max_tokens, parallel=parallel)
    request = decoder.request(prompt, rules, SamplingParams())
    answers = []
    taken_s = seconds_of(lambda: answers.append(decoder.answer(request)))
    (answer,) = answers
    tokens = decoder.plain_tokens(answer.text) if parallel else answer.fed_tokens + 1
    return taken_s, taken_s / max(1, tokens)


if __name__ == "__main__":
    main()
