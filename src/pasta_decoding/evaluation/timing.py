"""Seconds: the same answer decoded in parallel and sequentially, and what the engine alone needs.

- replay speedup: seconds of the plain text decoded sequentially / seconds of the same answer
  decoded in parallel; all tokens forced, same engine, same process, one after the other.
- ideal seconds: prefill + the sum over the trace's steps of the bare model call at that width and
  cache length, measured in the same run.
- interpreter efficiency: ideal seconds / measured seconds of the parallel decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pasta_decoding.evaluation.bare import StepTime
from pasta_decoding.lang.layout import Run, Segment
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.local import LocalDecoder


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one answer, three ways.

    peak_cells:  cells in use at the end of the parallel decode.
    tokens_once: prompt and fed tokens, each once.
    """

    sequential_s: float
    parallel_s: float
    ideal_s: float
    peak_cells: int = 0
    tokens_once: int = 0

    @property
    def replay_speedup(self) -> float:
        """Sequential / parallel."""
        return self.sequential_s / self.parallel_s

    @property
    def interpreter_efficiency(self) -> float:
        """Ideal / measured."""
        return self.ideal_s / self.parallel_s


def time_answer(
    decoder: LocalDecoder,
    prompt: Sequence[int],
    segments: Sequence[Segment],
    text: str,
    bare: StepTime,
    *,
    end: int | None = None,
    repeats: int = 1,
) -> Timing:
    """Replay an answer in parallel and its plain `text` sequentially, and time the bare calls.

    Both end with the token `end`, if the answer did.

    With `repeats` the two take turns in going first, and each one's median counts. Replay
    something before the first timing: a cold engine is slow.
    """
    plain = [Run(tuple(decoder.encoder.encode_text(text)))]
    requests = {
        "sequential": decoder.replay(prompt, plain, end=end),
        "parallel": decoder.replay(prompt, segments, end=end),
    }
    answers: dict[str, list[Answer]] = {name: [] for name in requests}
    for turn in range(repeats):
        for name in list(requests)[:: -1 if turn % 2 else 1]:
            answers[name].append(decoder.answer(requests[name]))
    sequential, parallel = (_median(answers[name]) for name in requests)
    trace = parallel.trace
    cells = len(prompt)
    ideal_s = trace.prefill_s
    for step in trace.steps:
        ideal_s += bare(step.fed, cells)
        cells += step.fed
    peak = trace.steps[-1].cells + trace.steps[-1].fed if trace.steps else len(prompt)
    once = len(prompt) + parallel.fed_tokens
    return Timing(sequential.seconds, parallel.seconds, ideal_s, peak, once)


def _median(answers: list[Answer]) -> Answer:
    return sorted(answers, key=lambda answer: answer.seconds)[len(answers) // 2]
