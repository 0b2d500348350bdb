"""`pasta bench answers`: what parallel decoding buys on a set of prompts, failures included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pasta_decoding.data.lines import (
    append_line,
    parse_lines,
    read_lines,
    refuse_other_settings,
)
from pasta_decoding.data.questions import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.asking import Ended, ask_all
from pasta_decoding.evaluation.bare import StepTime
from pasta_decoding.evaluation.machine import commit, machine
from pasta_decoding.evaluation.methods.base import Asking
from pasta_decoding.evaluation.records import Record, failed, from_line, record_of
from pasta_decoding.evaluation.timing import Timing, time_answer
from pasta_decoding.lang.check import check
from pasta_decoding.lang.measures import (
    bucket_shares,
    buckets_in_use,
    empty_items,
    geometric_mean,
    rep_4,
)
from pasta_decoding.lang.tree import read, show, strip
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.events import ordered
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Examined:
    """One prompt's answer, and what only a bench asks of it.

    well_formed: its text form is without a fault, and reads back to the same.
    shown_equals_text: the streamed pieces add up to the answer's text.
    sequential_*: the same weights with promises banned; None where that was left out.
    """

    record: Record
    well_formed: bool = True
    shown_equals_text: bool = True
    sequential_tokens: int | None = None
    sequential_hit_limit: bool | None = None
    sequential_s: float | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """What is to be measured of every prompt.

    compared: questions that are answered sequentially, too.
    timed:    questions whose answer's replay is timed, by `bare` calls; none of a server's.
    """

    decoder: Decoder
    max_tokens: int
    compared: frozenset[str]
    timed: frozenset[str]
    bare: StepTime | None

    def ask(self, question: Question) -> Asking[Examined]:
        """Answer one question and examine the answer."""
        [answer] = yield [self._request(question, parallel=True)]
        found = examine(self.decoder, question, answer)
        if question.id in self.compared:
            [plain] = yield [self._request(question, parallel=False)]
            found = replace(
                found,
                sequential_tokens=self.decoder.plain_tokens(plain.text),
                sequential_hit_limit=plain.hit_limit,
                sequential_s=plain.seconds,
            )
        if question.id in self.timed and answer.text:
            found = replace(found, timing=self._time(answer))
        return found

    def _request(self, question: Question, *, parallel: bool) -> Request:
        rules = Rules(max_tokens=self.max_tokens, parallel=parallel)
        return self.decoder.request(question.instruction, rules, Sampling())

    def _time(self, answer: Answer) -> Timing:
        """Time a replay; the engine is warm, it has just answered."""
        prompt = answer.layouts[0].tokens[: answer.trace.prompt_tokens]
        assert isinstance(self.decoder, LocalDecoder), "servers replay nothing"
        assert self.bare is not None, "who times has something to compare with"
        return time_answer(
            self.decoder, prompt, answer.segments, answer.text, self.bare, end=answer.end
        )


def examine(decoder: Decoder, question: Question, answer: Answer) -> Examined:
    """Return the record of an answer, and whether its text forms agree."""
    annotated, text = answer.annotated, answer.text
    problems = check(annotated, topic_required=decoder.topic)
    return Examined(
        record_of(decoder, question, answer),
        well_formed=not problems and show(read(annotated)) == annotated,
        shown_equals_text="".join(ordered(answer.events)) == text == strip(read(annotated)),
    )


def bench(
    plan: Bench,
    questions: Sequence[Question],
    *,
    settings: Mapping[str, Any],
    out: Path | None,
    tick: Callable[[], None],
    max_concurrency: int = 1,
) -> list[Examined]:
    """Bench every question. With `max_concurrency` > 1 several are answered together, untimed.

    With `out`, what is found is kept there line by line, and a stopped run goes on where it was.

    settings: what the answers depend on; the first line of `out`. Raises PastaError if it was begun
              with other ones.
    """
    if out is not None:
        _begin(out, settings)
    found = [] if out is None else read_examined(out, resume=True)
    known = {one.record.id: one for one in found}
    waiting = [question for question in questions if question.id not in known]
    for _ in range(len(questions) - len(waiting)):
        tick()
    for ended in ask_all(plan.decoder, plan.ask, waiting, max_concurrency=max_concurrency):
        one = _found(ended)
        if out is not None:
            append_line(out, asdict(one))
        known[one.record.id] = one
        tick()
    return [known[question.id] for question in questions]


def _begin(out: Path, settings: Mapping[str, Any]) -> None:
    """Begin a file of records, or refuse to go on with one of other settings."""
    lines = read_lines(out, resume=True)
    if not lines:
        append_line(out, {"settings": settings})
        return
    there = lines[0].get("settings", settings)  # an older version kept none
    hint = "Choose another --records file, or repeat its settings to resume it."
    refuse_other_settings(out, there, settings, hint=hint)


def _found(ended: Ended[Examined]) -> Examined:
    if isinstance(ended.outcome, PastaError):
        return Examined(failed(ended.question, str(ended.outcome)))
    return ended.outcome


def read_examined(path: Path, *, resume: bool = False) -> list[Examined]:
    """Return what a bench kept. Raises PastaError for a line of something else.

    resume: the file is to grow on, so a torn last line is cut away.
    """
    what, hint = "a record of this bench", "Choose another --records file."
    lines = parse_lines(path, _examined, what=what, hint=hint, resume=resume)
    return [one for one in lines if one is not None]


def _examined(line: dict[str, Any]) -> Examined | None:
    """Return what a line holds; None of the first one, which holds the settings."""
    if "settings" in line:
        return None
    timing = line.pop("timing")
    record = from_line(line.pop("record"))
    return Examined(record, **line, timing=Timing(**timing) if timing else None)


def summary(examined: Sequence[Examined]) -> dict[str, Any]:
    """Return the figures of a bench; a failed request counts in `failures` and nowhere else."""
    sound = [one for one in examined if one.record.error is None]
    done = [one.record for one in sound]
    promised = [record for record in done if record.chunks]
    compared = [one for one in sound if one.sequential_tokens is not None]
    timed = [one.timing for one in sound if one.timing is not None]
    chunks = sum(record.chunks for record in done)
    return {
        "answers": len(examined),
        "failures": len(examined) - len(done),
        "malformed": sum(not (one.well_formed and one.shown_equals_text) for one in sound),
        "with_promise": _share(len(promised), len(done)),
        "own_speedup": geometric_mean(record.own_speedup for record in done),
        "own_speedup_with_promise": geometric_mean(record.own_speedup for record in promised),
        "replay_speedup": geometric_mean(timing.replay_speedup for timing in timed),
        "interpreter_efficiency": geometric_mean(t.interpreter_efficiency for t in timed),
        "timed": len(timed),
        "interventions": sum(record.interventions for record in done),
        "interventions_per_token": _share(
            sum(record.interventions for record in done), sum(record.fed_tokens for record in done)
        ),
        "chunks": chunks,
        "syncs": sum(record.syncs for record in done),
        "repeated_chunks": _share(sum(record.repeated_chunks for record in done), chunks),
        "truncated_chunks": _share(sum(record.truncated_chunks for record in done), chunks),
        **_lengths(done),
        "hit_limit": _share(sum(record.hit_limit for record in done), len(done)),
        "empty_scaffolds": _share(sum(empty_items(r.text) > 0 for r in done), len(done)),
        "rep_4": _mean([rep_4(record.text) for record in done]),
        "plain_tokens_mean": _mean([record.plain_tokens for record in done]),
        "compared": len(compared),
        "compared_hit_limit": _share(sum(r.record.hit_limit for r in compared), len(compared)),
        "sequential_hit_limit": _share(
            sum(bool(r.sequential_hit_limit) for r in compared), len(compared)
        ),
        "sequential_tokens_mean": _mean([r.sequential_tokens or 0 for r in compared]),
        "machine": machine(),
        "commit": commit(),
    }


def _lengths(done: Sequence[Record]) -> dict[str, Any]:
    """Return what is known of the lengths promised, of chunks that ended by themselves."""
    promises = [promised for record in done for promised, _ in record.promises]
    buckets = bucket_shares(promises)
    return {
        "near_promises": _share(sum(record.near_promises for record in done), len(promises)),
        "buckets": buckets,
        "buckets_in_use": buckets_in_use(buckets),
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
