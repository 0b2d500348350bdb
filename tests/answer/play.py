"""Plays an interpreter without an engine, in the order of the scheduler.

A thread may prefer any token; it writes the next larger id that its constraint allows.
"""

import itertools
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
# Texts that need care in the text form, in a topic or at the edge of a chunk.
NASTY = [" ", "\n", "  a", "a ", "x\ny", "\\", "\\\\", '"', "<", "async>", "</async>", "<async>"]
TAGS = ["<sync/>", '<promise topic="a" tokens="20"/>', "<promise "]
TEXTS = (*[""] * 10, *WORDS, *NASTY, *TAGS)
SIZE = len(TEXTS)
ID = {text: token for token, text in enumerate(TEXTS) if text}


def decode(ids: Sequence[int]) -> str:
    return "".join(TEXTS[token] for token in ids)


VOCABULARY = Vocabulary(TEXTS, decode, CONTROL, frozenset({END}), END)
Wants = Callable[[int, int], int]
"""Returns the token that a thread prefers, given the thread and its number of tokens so far."""


def script(threads: Mapping[int, Sequence[int]]) -> Wants:
    """Each thread prefers its own tokens in turn; then chunks close and main ends."""

    def wants(thread: int, index: int) -> int:
        tokens = threads.get(thread, ())
        if index < len(tokens):
            return tokens[index]
        return END if thread == MAIN else CLOSE

    return wants


def cycle(tokens: Sequence[int]) -> Wants:
    """All threads share an endless list: each choice takes its next token."""
    endless = itertools.cycle(tokens)
    return lambda _thread, _index: next(endless)


@dataclass
class Played:
    """One played answer.

    chosen:    the tokens that each thread wrote.
    stretches: the answer's text in reading order, recorded from the actions alone.
    """

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
        """Where the text was trimmed; None if it was not."""
        cuts = [action.characters for action in self.actions if isinstance(action, Trimmed)]
        return cuts[0] if cuts else None

    @property
    def text(self) -> str:
        """The plain text, from `stretches` in place of the interpreter's segments."""
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
        segments = interpreter.segments
        return lay_out(PROMPT, segments, interpreter.scheme, async_close=CLOSE, end=None)

    def do(self, actions: list[Action]) -> None:
        self.steps[-1] += actions
        for action in actions:
            match action:
                case Fork(thread):
                    self.stretches += [(thread, []), (MAIN, [])]
                case Append(thread, token) if not self.interpreter.in_topic(thread):
                    stretches = reversed(self.stretches)
                    last_ids = next(ids for writer, ids in stretches if writer == thread)
                    last_ids.append(token)


def play(rules: Rules, wants: Wants, *, stop_after: int | None = None, **options: Any) -> Played:
    """Play one answer to its end, or stop it after some steps; see `play_steps`."""
    played = play_steps(rules, wants, stop_after, **options)
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
