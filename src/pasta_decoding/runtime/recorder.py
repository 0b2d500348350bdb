"""The events of one answer while it is written, by an engine or by servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.events import (
    Action,
    Append,
    CloseChunk,
    Closed,
    Delta,
    Event,
    Finished,
    Fork,
    Join,
    Opened,
    Progress,
    Rewrite,
    Synced,
    TokenLogprobs,
    Trimmed,
)
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.sampler import Choice
from pasta_decoding.runtime.text import AnswerText, ThreadText


@dataclass(slots=True)
class OutputRecorder:
    """The events of one answer, and which choices a constraint overruled.

    began_s: the time of the request, by the clock of `stamp`.
    chosen:  how many tokens each thread has chosen.
    overruled: which of them were not what the model wanted: thread, and place among its tokens.
    _noted:  log probabilities of the last token.
    _untold: those of a thread's tokens whose text waits for more.
    _shown:  text in reading order that `drain` has not returned yet.
    _read_events, _drained_events: how many events `_shown` has had, and `drain` has returned.
    """

    interpreter: Interpreter
    began_s: float
    chosen: dict[int, int] = field(default_factory=dict)
    overruled: list[tuple[int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    first_token_s: float | None = None
    _texts: dict[int, ThreadText] = field(default_factory=dict)
    _noted: TokenLogprobs | None = None
    _untold: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    _order: AnswerText = field(init=False)
    _shown: str = ""
    _read_events: int = 0
    _drained_events: int = 0

    def __post_init__(self) -> None:
        self._texts[MAIN] = ThreadText(self.interpreter.vocabulary.decode)
        self._order = AnswerText(self.interpreter.rules.stop)

    def note(self, thread: int, choice: Choice) -> None:
        """Count a token that was chosen. A chunk that ends the whole answer means its own end."""
        place = self.chosen.get(thread, 0)
        self.chosen[thread] = place + 1
        self._noted = choice.logprobs
        ends_answer = thread != MAIN and choice.token in self.interpreter.vocabulary.eos_ids
        if choice.intervened or ends_answer:
            self.overruled.append((thread, place))

    def has_met_a_stop(self) -> bool:
        """Is a stop string complete in what was told, in reading order?"""
        if self.interpreter.rules.stop:
            self._read()
        return self._order.stopped

    def tell(self, action: Action) -> None:
        match action:
            case Append(thread, token):
                self.events += self._say(thread, token)
            case Fork(thread, _, _, topic, promised):
                decode = self.interpreter.vocabulary.decode
                self._texts[thread] = ThreadText(decode, keep_edge=True)
                self.events += [*self._rest(MAIN), Opened(thread, topic, promised)]
            case CloseChunk(thread, truncated):
                self.events += [*self._rest(thread), Closed(thread, truncated)]
            case Join(threads) | Rewrite(threads):
                self.events += [*self._rest(MAIN), Synced(threads)]
            case Trimmed():
                # Before what completed a stop string, so that no reader goes further than that.
                place = self._read_events - 1 if self._order.stopped else len(self.events)
                self.events.insert(place, action)
            case Finished():
                self.events += [*self._rest(MAIN), action]

    def stamp(self, now_s: float) -> None:
        """Note the time, if a first token has been chosen since the last call."""
        if self.first_token_s is None and self.chosen:
            self.first_token_s = now_s - self.began_s

    def drain(self, step: int) -> Progress | None:
        """Return the progress since the last call, if any; `step` steps have been made."""
        if self._drained_events == len(self.events):
            return None
        self._read()
        coming = tuple(self.events[self._drained_events :])
        self._drained_events = len(self.events)
        text, self._shown = self._shown, ""
        return Progress(coming, text, self._order.take_tokens(), step)

    def _read(self) -> None:
        """Put new events in reading order, up to the one that completes a stop string."""
        while self._read_events < len(self.events) and not self._order.stopped:
            self._shown += self._order.feed(self.events[self._read_events])
            self._read_events += 1

    def _say(self, thread: int, token: int) -> list[Delta]:
        control = self.interpreter.vocabulary.control.ids
        if token in control or self.interpreter.in_topic(thread):
            return []
        if self._noted is not None:
            self._untold.setdefault(thread, []).append(self._noted)
        return self._deltas(thread, self._texts[thread].add(token))

    def _rest(self, thread: int) -> list[Delta]:
        return self._deltas(thread, self._texts[thread].end())

    def _deltas(self, thread: int, text: str) -> list[Delta]:
        return [Delta(thread, text, tuple(self._untold.pop(thread, ())))] if text else []
