"""Seconds of a `kv` join against the number of tokens that it joins. Nothing is computed again.

python bench/join.py --engines torch:auto llama:F16
"""

from __future__ import annotations

from functools import partial

from common import arguments, decoder_named, emit, interleaved, seconds_of, spread

from pasta_decoding.engines.base import Engine, Feed

CHUNKS = 5
TOKENS = (50, 100, 250, 500, 1000, 2000)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    for name in options.engines:
        engine = decoder_named(name, options).engine
        calls = {tokens: partial(join, engine, tokens // CHUNKS) for tokens in TOKENS}
        for tokens, values in interleaved(calls, options.repeats).items():
            emit(
                "join",
                engine=engine.name,
                joined_tokens=tokens,
                chunks=CHUNKS,
                seconds=spread(values),
            )


def join(engine: Engine, chunk_tokens: int) -> float:
    """Return the seconds in which main joins `CHUNKS` chunks of so many tokens."""
    main_ = engine.open(reserved_tokens=64 + CHUNKS * chunk_tokens)
    engine.step([Feed((main_,), (1,) * 64, tuple(range(64)), wants_logits=False)])
    chunks = [engine.fork(main_) for _ in range(CHUNKS)]
    positions = tuple(range(64, 64 + chunk_tokens))
    for chunk in chunks:
        engine.step([Feed((chunk,), (1,) * chunk_tokens, positions, wants_logits=False)])
    taken = seconds_of(lambda: engine.join(main_, chunks))
    engine.close(main_)
    return taken


if __name__ == "__main__":
    main()
