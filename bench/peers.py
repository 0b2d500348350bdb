"""The same prompts and weights: `transformers.generate`, llama.cpp's own loop, and Pasta.

    python bench/peers.py --engines torch:float32 llama:F32

Greedy, control tokens banned except in Pasta's parallel mode. Runs are interleaved prompt by
prompt. Sequential answers are cut at the same number of tokens everywhere, so seconds compare.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from answers import SAMPLE
from common import arguments, decoder_named, emit, interleaved, seconds_of, spread

from pasta_decoding.data.dataset import read_rows
from pasta_decoding.engines.llama import LlamaEngine
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    prompts = [row.instruction for row in read_rows(SAMPLE)][: options.prompts]
    for name in options.engines:
        decoder = decoder_named(name, options)
        for number, prompt in enumerate(prompts):
            ids = decoder.prompt_ids(prompt, options.max_tokens)
            calls = {
                library_name(decoder): partial(library_loop, decoder, ids, options.max_tokens),
                "pasta sequential": partial(ours, decoder, prompt, options.max_tokens, False),
                "pasta parallel": partial(ours, decoder, prompt, options.max_tokens, True),
            }
            for peer, values in interleaved(calls, options.repeats).items():
                emit(
                    "peers",
                    engine=decoder.engine.name,
                    prompt=number,
                    peer=peer,
                    seconds_per_token=spread(values),
                )


def library_name(decoder: LocalDecoder) -> str:
    """Return what the library below an engine calls its own loop."""
    return "llama.cpp loop" if isinstance(decoder.engine, LlamaEngine) else "transformers generate"


def library_loop(decoder: LocalDecoder, ids: tuple[int, ...], max_tokens: int) -> float:
    """Return seconds a token of the library's own greedy loop."""
    banned = sorted(decoder.vocabulary.control.ids)
    if isinstance(decoder.engine, LlamaEngine):
        return llama_loop(decoder.engine, ids, max_tokens, banned, decoder.vocabulary.eos_ids)
    assert isinstance(decoder.engine, TorchEngine), "the engines with a library below"
    return generate(decoder.engine.model, ids, max_tokens, banned)


def generate(model: Any, ids: tuple[int, ...], max_tokens: int, banned: list[int]) -> float:
    """Time `generate` with transformers' own attention and cache."""
    import torch

    ours_ = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    prompt = torch.tensor([ids])
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
    return taken_s / (output.shape[1] - len(ids))


def llama_loop(
    engine: LlamaEngine,
    ids: tuple[int, ...],
    max_tokens: int,
    banned: list[int],
    ends: frozenset[int],
) -> float:
    """Time `llama_decode` token by token, with nothing around it but an argmax."""
    llama, context = engine.library, engine.context
    memory, batch = llama.llama_get_memory(context), llama.llama_batch_init(len(ids), 0, 1)
    began_s, tokens, position = time.perf_counter(), list(ids), 0
    written = 0
    while True:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position + i, 0
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.logits[len(tokens) - 1] = 1
        position += len(tokens)
        llama.llama_decode(context, batch)
        row = llama.llama_get_logits_ith(context, len(tokens) - 1)
        logits_V = np.ctypeslib.as_array(row, (engine.vocabulary_size,))
        logits_V[banned] = -np.inf
        tokens = [int(logits_V.argmax())]
        written += 1
        if written == max_tokens or tokens[0] in ends:
            break
    taken_s = time.perf_counter() - began_s
    llama.llama_batch_free(batch)
    llama.llama_memory_clear(memory, False)
    return taken_s / written


def ours(decoder: LocalDecoder, prompt: str, max_tokens: int, parallel: bool) -> float:
    """Return seconds for each plain token (parallel) or token (sequential) of Pasta."""
    rules = Rules(max_tokens=max_tokens, parallel=parallel)
    request = decoder.request(prompt, rules, Sampling())
    answers = []
    taken_s = seconds_of(lambda: answers.append(decoder.answer(request)))
    (answer,) = answers
    tokens = decoder.plain_tokens(answer.text) if parallel else answer.fed_tokens + 1
    return taken_s / max(1, tokens)


if __name__ == "__main__":
    main()
