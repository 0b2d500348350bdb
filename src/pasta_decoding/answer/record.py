"""The record of one answer: events while it is written, and an `Answer` in the end."""

from dataclasses import dataclass, field

from pasta_decoding.answer.events import (
    Action,
    Append,
    CloseChunk,
    Closed,
    Delta,
    Event,
    Finished,
    Fork,
    Opened,
    Progress,
    Rewrite,
    Synced,
    TokenLogprobs,
    Trimmed,
)
from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.sampler import SampledToken
from pasta_decoding.answer.text import AnswerText, ThreadText, fed_count, tree_of
from pasta_decoding.lang.layout import (
    MAIN,
    ChunkRun,
    Joining,
    Layout,
    Segment,
    lay_out,
    lay_out_rows,
)
from pasta_decoding.lang.tree import Tree, strip, text_form


@dataclass(slots=True)
class ServerUsage:
    """The requests of one answer to servers.

    requests:      all requests, retries included.
    corrections:   of these, requests for a single token in place of a forbidden one.
    prompt_tokens: prompt tokens of all requests that were answered to the end.
    cached_tokens: of these, tokens from the server's prefix cache; None if it reports none.
    """

    requests: int = 0
    corrections: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FedToken:
    """One token that an engine computed in step `step`, from 1. The prefill has no entries."""

    step: int
    thread: int
    token: int
    position: int


@dataclass(slots=True)
class Trace:
    """How one answer was computed.

    prefilled_tokens: tokens of its prompt that the engine computed.
    reused_tokens:    tokens of its prompt that were in the engine's prefix cache.
    prefill_s:        seconds of the passes that computed its prompt.
    rewritten_tokens: tokens fed by `text` joins. A join is one step, even in several passes.
    server_usage:     requests to servers; None for an engine in this process.
    fed:              the tokens that the engine computed, in order.
    step_s:           seconds of each forward pass, sampling and bookkeeping included.
    """

    prompt_tokens: int
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    prefill_s: float = 0.0
    rewritten_tokens: int = 0
    server_usage: ServerUsage | None = None
    fed: list[FedToken] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def feed(self, thread: int, token: int, position: int) -> None:
        """Record a token of the step that runs now."""
        self.fed.append(FedToken(len(self.step_s) + 1, thread, token, position))


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer.

    segments:       its token ids, in reading order, as training would see them.
    layouts:        thread, position and visibility of every token, prompt included; several rows
                    under the `text` join, else one.
    end:            the token of `eos_ids` that ended it; None if something else did.
    first_token_s:  seconds from the request to the first token; None if there was none.
    interventions:  how often a constraint overruled the model, without trimmed tokens.
    truncated:      did a limit or a stop string cut the answer or a chunk?
    hit_limit:      did the token budget end it?
    stopped:        did a stop string end it? The text still holds the stop string.
    trimmed_tokens: tokens that were written past its end in reading order and dropped.
    seconds:        from the request to the end.
    queue_s:        seconds from the request to its admission.
    """

    segments: tuple[Segment, ...]
    layouts: tuple[Layout, ...]
    end: int | None
    tree: Tree
    trace: Trace
    events: tuple[Event, ...]
    first_token_s: float | None
    interventions: int
    truncated: bool
    hit_limit: bool
    stopped: bool
    trimmed_tokens: int
    seconds: float
    queue_s: float

    @property
    def text(self) -> str:
        return strip(self.tree)

    @property
    def annotated(self) -> str:
        return text_form(self.tree)

    @property
    def finish_reason(self) -> str:
        """OpenAI's word: "stop" if the model or a stop string ended it, "length" if a limit did."""
        return "length" if self.end is None and not self.stopped else "stop"

    @property
    def chunks(self) -> int:
        return sum(isinstance(segment, ChunkRun) for segment in self.segments)

    @property
    def truncated_chunks(self) -> int:
        return sum(
            isinstance(segment, ChunkRun) and not segment.closed for segment in self.segments
        )

    @property
    def fed_tokens(self) -> int:
        return fed_count(self.segments)

    @property
    def critical_path(self) -> int:
        return self.layouts[-1].critical_path


@dataclass(slots=True)
class OutputRecorder:
    """Passes tokens to an interpreter and records the events that follow.

    began_s:         the time of the request, by the clock of `stamp`.
    token_counts:    tokens that each thread has chosen.
    overruled:       tokens that a constraint imposed: thread, index among the thread's tokens.
    _texts:          the text of each thread.
    _unrecorded:     log probabilities of tokens whose text is not certain yet, by thread.
    _order:          turns the first `_read_events` events into text in reading order.
    _shown:          text of these events that `drain` has not returned yet.
    _drained_events: events that `drain` has returned.
    """

    interpreter: Interpreter
    prompt: tuple[int, ...]
    began_s: float
    trace: Trace = field(init=False)
    token_counts: dict[int, int] = field(default_factory=dict)
    overruled: list[tuple[int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    first_token_s: float | None = None
    _texts: dict[int, ThreadText] = field(default_factory=dict)
    _unrecorded: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    _order: AnswerText = field(init=False)
    _shown: str = ""
    _read_events: int = 0
    _drained_events: int = 0

    def __post_init__(self) -> None:
        self.trace = Trace(len(self.prompt))
        self._texts[MAIN] = ThreadText(self.interpreter.vocabulary.decode)
        self._order = AnswerText(self.interpreter.rules.stop)

    def take(self, thread: int, choice: SampledToken) -> list[Action]:
        """Take a token of `thread` and return the actions for the engine.

        If a stop string is complete with it, the actions end the answer. An end-of-answer token in
        a chunk ends the chunk, and counts as an intervention.
        """
        index = self.token_counts.get(thread, 0)
        self.token_counts[thread] = index + 1
        ends_answer = thread != MAIN and choice.token in self.interpreter.vocabulary.eos_ids
        if choice.intervened or ends_answer:
            self.overruled.append((thread, index))
        actions = self._record(self.interpreter.on_token(thread, choice.token), choice.logprobs)
        if self.interpreter.rules.stop:
            self._read()
        return actions + self.cut_off() if self._order.stopped else actions

    def cut_off(self) -> list[Action]:
        """End the answer now and return the actions for the engine; none if it has ended."""
        return [] if self.interpreter.finished else self._record(self.interpreter.cut_off())

    def stamp(self, now_s: float) -> None:
        """Note the time of the first token, if there is one and none is noted."""
        if self.first_token_s is None and self.token_counts:
            self.first_token_s = now_s - self.began_s

    def drain(self, step: int) -> Progress | None:
        """Return the progress since the last call, if any; `step` steps have been made."""
        if self._drained_events == len(self.events):
            return None
        self._read()
        new_events = tuple(self.events[self._drained_events :])
        self._drained_events = len(self.events)
        text = self._shown
        self._shown = ""
        return Progress(new_events, text, self._order.take_tokens(), step)

    def conclude(self, now_s: float, queue_s: float) -> Answer:
        """Return the finished answer."""
        self.stamp(now_s)
        interpreter = self.interpreter
        vocabulary = interpreter.vocabulary
        segments = tuple(interpreter.segments)
        end = interpreter.end
        close = vocabulary.control.async_close
        if interpreter.joining is Joining.text:
            layouts = lay_out_rows(self.prompt, segments, async_close=close, end=end)
        else:
            scheme = interpreter.scheme
            layouts = (lay_out(self.prompt, segments, scheme, async_close=close, end=end),)
        cut_off = interpreter.stopped or interpreter.hit_limit
        return Answer(
            segments=segments,
            layouts=layouts,
            end=end,
            tree=tree_of(segments, vocabulary, cut_off=cut_off),
            trace=self.trace,
            events=tuple(self.events),
            first_token_s=self.first_token_s,
            interventions=self._interventions(segments),
            truncated=interpreter.truncated,
            hit_limit=interpreter.hit_limit,
            stopped=interpreter.stopped,
            trimmed_tokens=interpreter.budget.written_tokens - fed_count(segments),
            seconds=now_s - self.began_s,
            queue_s=queue_s,
        )

    def _interventions(self, segments: tuple[Segment, ...]) -> int:
        """Count the overruled tokens that were not trimmed, ASYNC_CLOSE and the end included."""
        chunks = [segment for segment in segments if isinstance(segment, ChunkRun)]
        kept_tokens = {
            thread: len(chunk.ids) - 1 + chunk.closed
            for thread, chunk in enumerate(chunks, start=1)
        }
        has_end = self.interpreter.end is not None
        kept_tokens[MAIN] = fed_count(segments) - fed_count(chunks) + has_end
        return sum(index < kept_tokens.get(thread, 0) for thread, index in self.overruled)

    def _record(self, actions: list[Action], logprobs: TokenLogprobs | None = None) -> list[Action]:
        for action in actions:
            match action:
                case Append(thread, token):
                    self._add(thread, token, logprobs)
                case Fork(thread, _, _, topic, promised):
                    decode = self.interpreter.vocabulary.decode
                    self._texts[thread] = ThreadText(decode, strip_end=True)
                    self._end_stretch(MAIN, Opened(thread, topic, promised))
                case CloseChunk(thread, truncated):
                    self._end_stretch(thread, Closed(thread, truncated))
                case Synced(threads) | Rewrite(threads):
                    self._end_stretch(MAIN, Synced(threads))
                case Finished():
                    self._end_stretch(MAIN, action)
                case Trimmed():
                    # Readers stop at the event that completes a stop string, so it goes before.
                    index = self._read_events - 1 if self._order.stopped else len(self.events)
                    self.events.insert(index, action)
        return actions

    def _add(self, thread: int, token: int, logprobs: TokenLogprobs | None) -> None:
        control = self.interpreter.vocabulary.control.ids
        if token not in control and not self.interpreter.in_topic(thread):
            if logprobs is not None:
                self._unrecorded.setdefault(thread, []).append(logprobs)
            self._record_text(thread, self._texts[thread].add(token))

    def _end_stretch(self, thread: int, event: Event) -> None:
        self._record_text(thread, self._texts[thread].end())
        self.events.append(event)

    def _record_text(self, thread: int, text: str) -> None:
        if text:
            self.events.append(Delta(thread, text, tuple(self._unrecorded.pop(thread, ()))))

    def _read(self) -> None:
        """Put new events in reading order, up to the one that completes a stop string."""
        while self._read_events < len(self.events) and not self._order.stopped:
            self._shown += self._order.feed(self.events[self._read_events])
            self._read_events += 1
