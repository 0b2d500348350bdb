"""Plays an interpreter without an engine, in the order in which the scheduler would.

What a thread wants may be anything; what it gets is the nearest token that its constraint allows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pasta_decoding.answer.events import Action, Append, Finished, Fork, Rewrite, Trimmed
from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.settings import Rules
from pasta_decoding.answer.text import tree_of
from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.lang.layout import MAIN, ChunkRun, Joining, Layout, PromiseRun, lay_out
from pasta_decoding.lang.positions import Scheme
from pasta_decoding.lang.tree import Tree
from tests.law.world import CLOSE, CONTROL, END, SCHEME

PROMPT = (11, 12, 13)
WORDS = ["a", "b", "c", "A", "as", " a", " b", " c", " B", "-", " -", "b."]
# What the text form, a topic or a chunk's edge could stumble over.
NASTY = [" ", "\n", "  a", "a ", "x\ny", "\\", "\\\\", '"', "<", "async>", "</async>", "<async>"]
TAGS = ["<sync/>", '<promise topic="a" tokens="20"/>', "<promise "]
TEXTS = (*[""] * 10, *WORDS, *NASTY, *TAGS)
SIZE = len(TEXTS)
ID = {text: token for token, text in enumerate(TEXTS) if text}


def decode(ids: Sequence[int]) -> str:
    return "".join(TEXTS[token] for token in ids)


VOCABULARY = Vocabulary(TEXTS, decode, CONTROL, frozenset({END}), END)
Wants = Callable[[int, int], int]
"""From a thread and how much it has chosen before to the token it would like."""


def script(threads: Mapping[int, Sequence[int]]) -> Wants:
    """Each thread's tokens; then chunks close and main ends."""

    def wants(thread: int, index: int) -> int:
        line = threads.get(thread, ())
        return line[index] if index < len(line) else END if thread == MAIN else CLOSE

    return wants


def cycle(tokens: Sequence[int]) -> Wants:
    """Whoever asks gets the next token of an endless list."""
    asked = 0

    def wants(_thread: int, _index: int) -> int:
        nonlocal asked
        asked += 1
        return tokens[(asked - 1) % len(tokens)]

    return wants


@dataclass
class Played:
    """One answer as it was played; `stretches` is its text in reading order, kept apart."""

    interpreter: Interpreter
    steps: list[list[Action]] = field(default_factory=list)
    chosen: dict[int, list[int]] = field(default_factory=dict)
    stretches: list[tuple[int, list[int]]] = field(default_factory=lambda: [(MAIN, [])])

    @property
    def actions(self) -> list[Action]:
        return [action for step in self.steps for action in step]

    @property
    def fed_tokens(self) -> int:
        sizes = {Append: 1, Fork: 2, Rewrite: 1}  # a join feeds again, but counts its SYNC
        return sum(sizes.get(type(action), 0) for action in self.actions)

    @property
    def tree(self) -> Tree:
        return tree_of(self.interpreter.segments, self.interpreter.vocabulary)

    @property
    def characters(self) -> int | None:
        """How much of the text is kept; None for all of it."""
        cuts = [action.characters for action in self.actions if isinstance(action, Trimmed)]
        return cuts[0] if cuts else None

    @property
    def text(self) -> str:
        """What a reader is owed, put together without the interpreter's segments."""
        pieces = [(thread, decode(ids)) for thread, ids in self.stretches]
        text = "".join(text if thread == MAIN else text.rstrip() for thread, text in pieces)
        return text[: self.characters]

    @property
    def topics(self) -> list[tuple[int, ...]]:
        segments = self.interpreter.segments
        return [segment.ids[1:-1] for segment in segments if isinstance(segment, PromiseRun)]

    @property
    def chunks(self) -> list[ChunkRun]:
        return [seg for seg in self.interpreter.segments if isinstance(seg, ChunkRun)]

    @property
    def layout(self) -> Layout:
        interpreter = self.interpreter
        segments, scheme = interpreter.segments, interpreter.scheme
        return lay_out(PROMPT, segments, scheme, async_close=CLOSE, end=None)

    def do(self, actions: list[Action]) -> None:
        self.steps[-1] += actions
        for action in actions:
            match action:
                case Fork(thread):
                    self.stretches += [(thread, []), (MAIN, [])]
                case Append(thread, token) if not self.interpreter.in_topic(thread):
                    held = next(ids for who, ids in reversed(self.stretches) if who == thread)
                    held.append(token)


def play(rules: Rules, wants: Wants, *, stop_after: int | None = None, **about: Any) -> Played:
    """Play one answer to its end, or stop it after some steps; see `play_steps`."""
    played = play_steps(rules, wants, stop_after, **about)
    if not played.interpreter.finished:
        played.steps.append([])
        played.do(played.interpreter.cut_off())
    assert isinstance(played.actions[-1], Finished)
    assert played.interpreter.finished
    return played


def play_steps(
    rules: Rules,
    wants: Wants,
    steps: int | None,
    *,
    scheme: Scheme = SCHEME,
    max_positions: int = 10**6,
    joining: Joining = Joining.kv,
) -> Played:
    """Play the first steps of an answer, or all of it."""
    interpreter = Interpreter(VOCABULARY, scheme, rules, len(PROMPT), max_positions, joining)
    played = Played(interpreter)
    threads = [MAIN]
    while threads and (steps is None or len(played.steps) < steps):
        played.steps.append([])
        for thread in threads:
            if thread in interpreter.writing_threads:
                advance(played, thread, wants)
        threads = fed_threads(played.steps[-1])
    return played


def advance(played: Played, thread: int, wants: Wants) -> None:
    """Let one thread choose its next token."""
    chosen = played.chosen.setdefault(thread, [])
    score_V = -((np.arange(SIZE) - wants(thread, len(chosen))) % SIZE).astype(np.float32)
    token = played.interpreter.constraint(thread).best(score_V)
    chosen.append(token)
    played.do(played.interpreter.on_token(thread, token))


def fed_threads(actions: Sequence[Action]) -> list[int]:
    """Return the threads that are fed because of `actions`, in order: those choose next."""
    threads: list[int] = []
    for action in actions:
        match action:
            case Append(thread):
                threads.append(thread)
            case Fork(thread):
                threads += [MAIN, thread]
            case Rewrite():
                threads.append(MAIN)
    return threads
