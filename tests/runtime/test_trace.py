"""The trace that opens in Perfetto: a lane a thread, a box a token, nothing overlapping."""

from __future__ import annotations

import json
from itertools import pairwise

from pasta_decoding.engines.scripted import ScriptedEngine, follow
from pasta_decoding.runtime.local import answer_of
from pasta_decoding.runtime.request import Request, Rules, SamplingParams
from pasta_decoding.runtime.sampler import Sampler
from pasta_decoding.runtime.scheduler import Scheduler
from pasta_decoding.runtime.trace import chrome_trace
from tests.law.world import ASYNC, CLOSE, END, OPEN, P20, SCHEME, SYNC
from tests.runtime.play import ID, SIZE, VOCABULARY

A, B, C = (ID[text] for text in ("a", "b", "c"))
LINES = [(A, OPEN, B, P20), (B, ASYNC), (P20, ASYNC, C, A, CLOSE), (P20, C, SYNC, A, END)]


def test_every_fed_token_is_a_box_in_its_threads_lane() -> None:
    scheduler = Scheduler(
        ScriptedEngine(follow(*LINES, vocabulary_size=SIZE), SIZE), VOCABULARY, SCHEME
    )
    answer = answer_of(scheduler, Request((C, A), Sampler(SamplingParams()), Rules(max_tokens=40)))
    events = json.loads(json.dumps(chrome_trace(answer, VOCABULARY)))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "0 main", 1: "1 b"}
    prefill, *boxes = (event for event in events if event["ph"] == "X")
    assert (prefill["name"], prefill["args"]) == ("prefill", {"tokens": 2})
    assert len(boxes) == answer.fed_tokens
    assert [box["name"] for box in boxes if box["tid"] == 1][1:] == ["c", "a"]
    for lane in (0, 1):
        own = [(box["ts"], box["ts"] + box["dur"]) for box in boxes if box["tid"] == lane]
        assert all(end <= start + 0.2 for (_, end), (start, _) in pairwise(own))
