"""Tokens a second and seconds a request with 1 to 64 requests at once, sequential and parallel.

    python bench/throughput.py --engines llama:F16 --max-tokens 128

Requests arrive together. Tokens are those of the plain text; latency is from arrival to the end.
"""

from __future__ import annotations

import time

from answers import SAMPLE
from common import arguments, decoder_named, emit, spread

from pasta_decoding.data.dataset import read_rows
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling

REQUESTS = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-threads", type=int, default=8)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    options = parser.parse_args()
    prompts = [row.instruction for row in read_rows(SAMPLE)]
    for name in options.engines:
        decoder = decoder_named(name, options)
        for number in options.requests:
            chosen = [prompts[n % len(prompts)] for n in range(number)]
            for parallel in (False, True):
                rules = Rules(
                    max_tokens=options.max_tokens,
                    max_threads=options.max_threads,
                    parallel=parallel,
                )
                run(decoder, chosen, rules)


def run(decoder: Decoder, prompts: list[str], rules: Rules) -> None:
    """Answer all prompts at once and print a line."""
    scheduler = decoder.scheduler()
    requests = [decoder.request(prompt, rules, Sampling()) for prompt in prompts]
    began_s = time.perf_counter()
    numbers = [scheduler.add(request) for request in requests]
    while scheduler.busy:
        scheduler.step()
    taken_s = time.perf_counter() - began_s
    answers = [answer for n in numbers if (answer := scheduler.result(n)) is not None]
    plain_tokens = sum(decoder.plain_tokens(answer.text) for answer in answers)
    emit(
        "throughput",
        engine=decoder.engine.name,
        requests=len(prompts),
        mode="parallel" if rules.parallel else "sequential",
        max_tokens=rules.max_tokens,
        plain_tokens_per_s=round(plain_tokens / taken_s, 2),
        latency_s=spread([answer.seconds for answer in answers], 3),
    )


if __name__ == "__main__":
    main()
