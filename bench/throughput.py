"""Tokens a second and seconds a request with 1 to 64 requests at once, sequential and parallel.

    python bench/throughput.py --engines llama:F16 --max-tokens 96

Requests arrive together and all of them are decoded together. Tokens are those of the plain text;
latency is from arrival to the end.
"""

from __future__ import annotations

import time
from statistics import median

from common import SAMPLE, arguments, decoder_named, emit, spread

from pasta_decoding.data.rows import read_rows
from pasta_decoding.runtime.decoder import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.runtime.scheduler import Scheduler

REQUESTS = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(ctx=16_384)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-threads", type=int, default=3, help="llama.cpp has 256 sequences")
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    options = parser.parse_args()
    prompts = [row.instruction for row in read_rows(SAMPLE)]
    for name in options.engines:
        decoder = decoder_named(name, options)
        rules = {
            mode: Rules(
                max_tokens=options.max_tokens,
                max_threads=options.max_threads,
                parallel=mode == "parallel",
            )
            for mode in ("sequential", "parallel")
        }
        run(decoder, prompts[:1], rules["parallel"])  # a cold engine is slow
        for number in options.requests:
            chosen = [prompts[n % len(prompts)] for n in range(number)]
            for mode, rule in rules.items():
                fields = run(decoder, chosen, rule)
                emit("throughput", requests=number, mode=mode, **fields)


def run(decoder: LocalDecoder, prompts: list[str], rules: Rules) -> dict[str, object]:
    """Answer all prompts at once and return what that took."""
    parts = decoder.engine, decoder.vocabulary, decoder.scheme
    scheduler = Scheduler(*parts)
    requests = [decoder.request(prompt, rules, SamplingParams()) for prompt in prompts]
    began_s = time.perf_counter()
    numbers = [scheduler.add(request) for request in requests]
    together = 0
    while scheduler.busy:
        scheduler.step()
        together = max(together, scheduler.activity.running)
    taken_s = time.perf_counter() - began_s
    answers = [answer for n in numbers if (answer := n.result()) is not None]
    plain_tokens = [decoder.plain_tokens(answer.text) for answer in answers]
    return {
        "engine": decoder.engine.name,
        "most_at_once": together,
        "max_tokens": rules.max_tokens,
        "plain_tokens_per_s": round(sum(plain_tokens) / taken_s, 2),
        "plain_tokens_median": median(plain_tokens),
        "latency_s": spread([answer.seconds for answer in answers], 3),
        "queue_s": spread([answer.queue_s for answer in answers], 3),
    }


if __name__ == "__main__":
    main()
