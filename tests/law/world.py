"""A tiny world for the law: a vocabulary of made-up words, a control, and answers in segments."""

from collections.abc import Sequence

from hypothesis import strategies as st

from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.lang.layout import ChunkRun, MainRun, PromiseRun, Segment, SyncRun
from pasta_decoding.lang.positions import SHARED_MAX

SIZE = 100
END = 0
OPEN = 1
ASYNC = 2
CLOSE = 3
SYNC = 4
P20 = 5
P50 = 6
OTHER_END = 7
ENDS = (END, OTHER_END)
FIRST_WORD = 10
CONTROL = ControlTokens(OPEN, {20: P20, 50: P50}, ASYNC, CLOSE, SYNC)
SCHEME = SHARED_MAX

# Ids below FIRST_WORD are special; the words are w10, w11, ...; the last ten begin with a space.
TEXTS = tuple(
    "" if n < FIRST_WORD else f" w{n}" if n >= SIZE - 10 else f"w{n}" for n in range(SIZE)
)


def decode(ids: Sequence[int]) -> str:
    return "".join(TEXTS[token] for token in ids)


VOCABULARY = Vocabulary(TEXTS, decode, CONTROL, frozenset(ENDS), OTHER_END)

WORDS = st.integers(FIRST_WORD, SIZE - 11)
PROMPTS = st.lists(WORDS, min_size=1, max_size=4).map(tuple)


@st.composite
def answers(draw: st.DrawFn) -> list[Segment]:
    """Any well-formed answer: runs, promises with their chunks, syncs with something to join.

    Its promises have topics, or, as those of a checkpoint without topics, none of them has.
    """
    segments: list[Segment] = []
    unjoined = 0
    has_topics = draw(st.booleans())
    for number in range(draw(st.integers(1, 6))):
        if run := draw(st.lists(WORDS, max_size=3)):
            segments.append(MainRun(tuple(run)))
        if draw(st.booleans()):
            # Topics are distinct by construction: two words, the second one counts.
            topic = (draw(WORDS), FIRST_WORD + number) if has_topics else ()
            bucket = draw(st.sampled_from([20, 50]))
            close = CONTROL.promise_close[bucket]
            segments.append(PromiseRun((OPEN, *topic, close), bucket))
            body = draw(st.lists(WORDS, min_size=1, max_size=5))
            segments.append(ChunkRun((ASYNC, *body)))
            unjoined += 1
        elif unjoined and draw(st.booleans()):
            segments.append(SyncRun(SYNC))
            unjoined = 0
    return merge_runs(segments)


def merge_runs(segments: Sequence[Segment]) -> list[Segment]:
    """Join neighbouring runs, as the interpreter would have written them."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and isinstance(segment, MainRun) and isinstance(merged[-1], MainRun):
            merged[-1] = MainRun(merged[-1].ids + segment.ids)
        else:
            merged.append(segment)
    return merged


CHUNK_AFTER_SYNC: list[Segment] = [
    MainRun((11, 12)),
    PromiseRun((OPEN, 20, P20), 20),
    ChunkRun((ASYNC, 30, 31, 32, 33)),
    MainRun((13,)),
    PromiseRun((OPEN, 21, P50), 50),
    ChunkRun((ASYNC, 40, 41)),
    SyncRun(SYNC),
    MainRun((14,)),
    PromiseRun((OPEN, 22, P20), 20),
    ChunkRun((ASYNC, 50, 51)),
    MainRun((15, 16)),
]
"""Two siblings of different length, a sync, and a chunk that may see both of them."""
