"""The constraints of one thread, at a server that does not see the other threads.

A request carries `GuidedParams` as text. From these, `ThreadGrammar` derives the constraints that
the interpreter would return, token by token.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar

from pasta_decoding.answer.constraints import (
    Constraint,
    Topics,
    main_constraint,
    open_chunk_constraint,
)
from pasta_decoding.answer.interpreter import Interpreter
from pasta_decoding.answer.settings import Rules
from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.lang.layout import MAIN

PROTOCOL = "5"
"""Version of the text of `GuidedParams`. Client and server must have the same."""
XARG = "pasta"
"""The name under which a request carries its params."""

_MAX_CHARS = 2**18
_MAX_ID = 2**31
_VERDICTS = 4  # ids in `GuidedParams.verdicts` of a check


class GuideKind(StrEnum):
    """The thread that a request writes; `check` only tests that the server has the processor."""

    main = "main"
    chunk = "chunk"
    check = "check"


@dataclass(frozen=True, slots=True)
class GuidedParams:
    """The rules of one thread and its state when the request begins.

    ends:             ids that end an answer.
    begun:            does the chunk have text already?
    promises:         promises that main may make until its request ends.
    eagerness:        added to the logit of PROMISE_OPEN.
    sync_bias:        added to the logit of SYNC.
    sync:             may main sync? There are chunks that it has not joined.
    topic:            do promises have topics?
    max_topic_tokens: tokens of a topic, at most.
    topics:           the earlier topics, folded by `fold_topic`.
    beginnings:       their first tokens, with which no topic may begin.
    topic_ids:        the tokens of the topic that main is writing; None outside topics.
    verdicts:         of a check, ids to write: the first if all is well; then, if the processor
                      sees the first in its input, and if it does not; the last in place of the
                      first if the vocabulary differs.
    """

    kind: GuideKind
    control: ControlTokens
    ends: tuple[int, ...]
    begun: bool = False
    promises: int = 0
    eagerness: float = 0.0
    sync_bias: float = 0.0
    sync: bool = False
    topic: bool = True
    max_topic_tokens: int = 12
    topics: tuple[str, ...] = ()
    beginnings: tuple[int, ...] = ()
    topic_ids: tuple[int, ...] | None = None
    verdicts: tuple[int, ...] = ()
    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    @property
    def ids(self) -> frozenset[int]:
        """All token ids that the params name."""
        groups = (self.ends, self.beginnings, self.topic_ids or (), self.verdicts)
        return self.control.ids.union(*groups)


def guided_params(interpreter: Interpreter, thread: int) -> GuidedParams | None:
    """Return the params of a request for `thread` now; None if logit biases suffice."""
    rules = interpreter.rules
    topics = interpreter.topics
    if not rules.parallel:
        return None
    control = interpreter.vocabulary.control
    ends = tuple(sorted(interpreter.vocabulary.eos_ids))
    if thread != MAIN:
        has_text = len(interpreter.budget.chunks[thread - 1].ids) > 1
        return GuidedParams(GuideKind.chunk, control, ends, begun=has_text)
    return GuidedParams(
        GuideKind.main,
        control,
        ends,
        promises=interpreter.promises_left,
        eagerness=rules.eagerness or 0.0,
        sync_bias=rules.sync_bias,
        sync=bool(interpreter.unjoined),
        topic=rules.topic,
        max_topic_tokens=rules.max_topic_tokens,
        topics=tuple(topics.earlier),
        beginnings=tuple(sorted(topics.beginnings)),
        topic_ids=tuple(topics.ids) if interpreter.in_topic(MAIN) else None,
    )


class ThreadGrammar:
    """The constraints of main, until it syncs or ends, or of one chunk.

    The client applies the limits and ends the request when the thread reaches one.
    """

    def __init__(self, vocabulary: Vocabulary, params: GuidedParams) -> None:
        assert params.kind is not GuideKind.check, "a check is no thread"
        self._vocabulary = vocabulary
        self._params = params
        self._has_text = params.begun
        self._promises = params.promises
        self._may_sync = params.sync
        self._in_topic = params.topic_ids is not None
        rules = Rules(max_topic_tokens=params.max_topic_tokens, topic=params.topic)
        ids = list(params.topic_ids or ())
        earlier = list(params.topics)
        self._topics = Topics(vocabulary, rules, ids, earlier, set(params.beginnings))

    def constraint(self) -> Constraint:
        """Return the constraint on the thread's next token."""
        if self._params.kind is GuideKind.chunk:
            return open_chunk_constraint(self._vocabulary, has_text=self._has_text)
        if self._in_topic:
            return self._topics.constraint()
        return main_constraint(
            self._vocabulary,
            promise=self._promises > 0,
            sync=self._may_sync,
            eagerness=self._params.eagerness,
            sync_bias=self._params.sync_bias,
        )

    def on_token(self, token: int) -> None:
        """Take a token that the constraint allows."""
        vocabulary = self._vocabulary
        if self._params.kind is GuideKind.chunk:
            self._has_text = True
        elif not self._in_topic:
            self._in_topic = token == vocabulary.control.promise_open
        elif token in vocabulary.promise_close_ids:
            self._topics.finish()
            self._in_topic = False
            self._may_sync = True
            self._promises -= 1
        elif token not in vocabulary.eos_ids:
            self._topics.ids.append(token)


def write_params(params: GuidedParams) -> str:
    return f"{PROTOCOL} {json.dumps(asdict(params), separators=(',', ':'))}"


def read_params(argument: object) -> GuidedParams:
    """Read the params of a request. Raises PastaError unless `write_params` wrote them."""
    from pydantic import ValidationError  # only servers read params, and they have pydantic

    if not isinstance(argument, str) or len(argument) > _MAX_CHARS:
        raise _garbage(f"it is no text of at most {_MAX_CHARS} characters")
    protocol, _, record = argument.partition(" ")
    if protocol != PROTOCOL:
        message = f"this server's logits processor speaks protocol {PROTOCOL} of Pasta"
        remedy = "install the same version of Pasta on both sides"
        raise PastaError(f"{message} and the request another: {remedy}")
    try:
        params = _reader().validate_json(record, strict=True)
    except ValidationError as error:
        field_path = ".".join(map(str, error.errors()[0]["loc"]))
        raise _garbage(f"`{field_path}`" if field_path else "it is no JSON object") from None
    _check_params(params)
    return params


def _check_params(params: GuidedParams) -> None:
    control = params.control
    is_check = params.kind is GuideKind.check
    numbers = (params.promises, params.max_topic_tokens, *params.ids)
    for is_valid, problem in (
        (control.promise_close, "`control` names no closing"),
        (control.distinct, "`control` names an id twice"),
        (all(0 <= number < _MAX_ID for number in numbers), "a number is negative or too large"),
        (params.ends, "`ends` names no id"),
        (
            not is_check or len(set(params.verdicts)) == _VERDICTS,
            f"`verdicts` are not {_VERDICTS} ids",
        ),
    ):
        if not is_valid:
            raise _garbage(problem)


@cache
def _reader() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(GuidedParams)


def _garbage(problem: str) -> PastaError:
    return PastaError(f"the request's argument `{XARG}` is not what Pasta writes: {problem}")
