"""One thread of an answer at a server that sees no other thread: its rules, sent as text.

`GuidedParams` go with the request, as text; `ThreadGrammar` gives from them, token by token, the
constraints that the interpreter would give.
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

PROTOCOL = "4"
"""Of what is written here. Both sides must have the same."""
XARG = "pasta"
"""The name under which a request carries its params."""

_MAX_CHARS = 2**18
_MAX_ID = 2**31
_VERDICTS = 4  # of a check


class GuideKind(StrEnum):
    """Which rules a request obeys; `check` only asks whether the processor is there."""

    main = "main"
    chunk = "chunk"
    check = "check"


@dataclass(frozen=True, slots=True)
class GuidedParams:
    """One thread's rules, and what follows from the rest of its answer.

    ends:        ids that end an answer.
    begun:       has the chunk a token of its own?
    promises:    how many main may make until its request ends.
    eagerness:   added to the logit of a promise.
    sync:        has main something to wait for?
    topic:       do promises have one? Of at most `max_topic_tokens`, not beginning with one of
                 `beginnings`.
    topics:      the earlier ones, as `fold_topic` has them.
    topic_ids:   the tokens of the one that main is writing; None outside topics.
    verdicts:    of a check: what to write if all is well, then if the first one is seen, or is
                 not; and what instead of the first if the vocabulary is another.
    """

    kind: GuideKind
    control: ControlTokens
    ends: tuple[int, ...]
    begun: bool = False
    promises: int = 0
    eagerness: float = 0.0
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
        named = (self.ends, self.beginnings, self.topic_ids or (), self.verdicts)
        return self.control.ids.union(*named)


def guided_params(interpreter: Interpreter, thread: int) -> GuidedParams | None:
    """Return the params of a request for `thread` now; None if logit biases suffice."""
    rules, topics = interpreter.rules, interpreter.topics
    if not rules.parallel:
        return None
    control, ends = interpreter.vocabulary.control, tuple(sorted(interpreter.vocabulary.eos_ids))
    if thread != MAIN:
        has_text = len(interpreter.budget.chunks[thread - 1].ids) > 1
        return GuidedParams(GuideKind.chunk, control, ends, begun=has_text)
    return GuidedParams(
        GuideKind.main,
        control,
        ends,
        promises=interpreter.promises_left,
        eagerness=rules.eagerness or 0.0,
        sync=bool(interpreter.unjoined),
        topic=rules.topic,
        max_topic_tokens=rules.max_topic_tokens,
        topics=tuple(topics.earlier),
        beginnings=tuple(sorted(topics.beginnings)),
        topic_ids=tuple(topics.ids) if interpreter.in_topic(MAIN) else None,
    )


class ThreadGrammar:
    """Main until it waits or ends, or one chunk: the interpreter's constraints from its params.

    Limits are not its business: the client ends what comes to one.
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
        """Return what the thread may write next."""
        if self._params.kind is GuideKind.chunk:
            return open_chunk_constraint(self._vocabulary, has_text=self._has_text)
        if self._in_topic:
            return self._topics.constraint()
        return main_constraint(
            self._vocabulary,
            promise=self._promises > 0,
            sync=self._may_sync,
            eagerness=self._params.eagerness,
        )

    def on_token(self, token: int) -> None:
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


def read_params(found: object) -> GuidedParams:
    """Read params that came from outside. Raises PastaError, in one sentence, for anything else."""
    from pydantic import ValidationError  # the servers that read params have it

    if not isinstance(found, str) or len(found) > _MAX_CHARS:
        raise _garbage(f"it is no text of at most {_MAX_CHARS} characters")
    protocol, _, record = found.partition(" ")
    if protocol != PROTOCOL:
        message = f"this server's logits processor speaks protocol {PROTOCOL} of Pasta"
        remedy = "install the same version of Pasta on both sides"
        raise PastaError(f"{message} and the request another: {remedy}")
    try:
        params = _reader().validate_json(record, strict=True)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise _garbage(f"`{where}`" if where else "it is no JSON object") from None
    control, check = params.control, params.kind is GuideKind.check
    numbers = (params.promises, params.max_topic_tokens, *params.ids)
    for is_good, what in (
        (control.promise_close, "`control` names no closing"),
        (control.distinct, "`control` names an id twice"),
        (all(0 <= number < _MAX_ID for number in numbers), "a number is negative or too large"),
        (params.ends, "`ends` names no id"),
        (
            not check or len(set(params.verdicts)) == _VERDICTS,
            f"`verdicts` are not {_VERDICTS} ids",
        ),
    ):
        if not is_good:
            raise _garbage(what)
    return params


@cache
def _reader() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(GuidedParams)


def _garbage(what: str) -> PastaError:
    return PastaError(f"the request's argument `{XARG}` is not what Pasta writes: {what}")
