"""What there is to tell of one answer while it is written, whoever writes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pasta_decoding.lang.layout import MAIN
from pasta_decoding.runtime.actions import (
    Action,
    Append,
    CloseChunk,
    Finish,
    Fork,
    Join,
    Rewrite,
    Trim,
)
from pasta_decoding.runtime.events import (
    Closed,
    Delta,
    Event,
    Finished,
    Opened,
    Ordered,
    Synced,
    TokenLogprobs,
    Trimmed,
)
from pasta_decoding.runtime.interpreter import Interpreter
from pasta_decoding.runtime.sampler import Choice
from pasta_decoding.runtime.stops import StopFilter
from pasta_decoding.runtime.text import ThreadText


@dataclass(slots=True)
class OutputRecorder:
    """The events of one answer, when they came, and how often a constraint overruled the model.

    began_s: when it was asked for, by the clock of whoever stamps.
    chosen:  how many tokens each thread has chosen.
    overruled: which of them were not what the model wanted: thread, and place among its tokens.
    stop_event: the event whose text completes a stop string; None until there is one.
    _told:   what was told of each thread's last token,
    _untold: and of those whose text waits for more.
    """

    interpreter: Interpreter
    began_s: float
    chosen: dict[int, int] = field(default_factory=dict)
    overruled: list[tuple[int, int]] = field(default_factory=list)
    stop_event: int | None = None
    events: list[Event] = field(default_factory=list)
    event_s: list[float] = field(default_factory=list)
    first_token_s: float | None = None
    drained_events: int = 0
    texts: dict[int, ThreadText] = field(default_factory=dict)
    _read_events: int = 0
    _ordered: Ordered = field(default_factory=Ordered)
    _filter: StopFilter = field(init=False)
    _told: dict[int, TokenLogprobs | None] = field(default_factory=dict)
    _untold: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.texts[MAIN] = ThreadText(self.interpreter.vocabulary.decode)
        self._filter = StopFilter(self.interpreter.stops)

    def note(self, thread: int, choice: Choice) -> None:
        """Count a token that was chosen. A chunk that ends the whole answer means its own end."""
        place = self.chosen.get(thread, 0)
        self.chosen[thread] = place + 1
        self._told[thread] = choice.logprobs
        ends_answer = thread != MAIN and choice.token in self.interpreter.vocabulary.eos_ids
        if choice.intervened or ends_answer:
            self.overruled.append((thread, place))

    def has_met_a_stop(self) -> bool:
        """Is a stop string complete in what was told, in reading order?"""
        if not self.interpreter.stops or self.stop_event is not None:
            return self.stop_event is not None
        for place in range(self._read_events, len(self.events)):
            self._filter.add(self._ordered.feed(self.events[place]))
            if self._filter.stopped:
                self.stop_event = place
                break
        self._read_events = len(self.events)
        return self.stop_event is not None

    def tell(self, action: Action) -> None:
        """Turn what the interpreter wants done into what a reader is told."""
        match action:
            case Append(thread, token):
                self._say(thread, token)
            case Fork(thread, _, _, topic, promised):
                decode = self.interpreter.vocabulary.decode
                self.texts[thread] = ThreadText(decode, keep_edge=True)
                self.events += [*self._rest(MAIN), Opened(thread, topic, promised)]
            case CloseChunk(thread, truncated):
                self.events += [*self._rest(thread), Closed(thread, truncated)]
            case Join(threads) | Rewrite(threads):
                self.events += [*self._rest(MAIN), Synced(threads)]
            case Trim(characters):
                # Before what completed a stop string, so that no reader goes further than that.
                place = len(self.events) if self.stop_event is None else self.stop_event
                self.events.insert(place, Trimmed(characters))
            case Finish(truncated):
                self.events += [*self._rest(MAIN), Finished(truncated)]

    def stamp(self, now_s: float) -> None:
        """Note when the events came that are new."""
        elapsed_s = now_s - self.began_s
        if self.first_token_s is None and self.chosen:
            self.first_token_s = elapsed_s
        self.event_s += [elapsed_s] * (len(self.events) - len(self.event_s))

    def drain(self) -> list[Event]:
        """Return the events since the last call."""
        coming = self.events[self.drained_events :]
        self.drained_events = len(self.events)
        return coming

    def _say(self, thread: int, token: int) -> None:
        control = self.interpreter.vocabulary.control.ids
        if token in control or self.interpreter.in_topic(thread):
            return
        if told := self._told.get(thread):
            self._untold.setdefault(thread, []).append(told)
        if text := self.texts[thread].add(token):
            self.events.append(self._delta(thread, text))

    def _rest(self, thread: int) -> list[Event]:
        text = self.texts[thread].end()
        return [self._delta(thread, text)] if text else []

    def _delta(self, thread: int, text: str) -> Delta:
        return Delta(thread, text, tuple(self._untold.pop(thread, ())))
