"""What a server that writes one thread of an answer is told of the others, as text on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pasta_decoding.errors import PastaError
from pasta_decoding.models.control_tokens import ControlTokens

PROTOCOL = 1
"""Of what is written here. Both sides must have the same."""
XARG = "pasta"
"""The name under which a request carries its brief."""

_MAX_CHARS = 2**18
_MAX_ID = 2**31
_MAX_LIST = 4096


class Kind(StrEnum):
    """Which rules a request obeys; `check` only asks whether there is somebody who knows them."""

    main = "main"
    chunk = "chunk"
    check = "check"


@dataclass(frozen=True, slots=True)
class Brief:
    """One thread's rules, and what follows from the rest of its answer.

    ends:        ids that end an answer.
    begun:       has the chunk a token of its own?
    promises:    how many main may make until its request ends.
    sync:        has main something to wait for?
    topic:       do promises have one? Of at most `max_topic_tokens`, and, where
                 `topics_begin_apart`, not beginning with one of `beginnings`.
    topics:      the earlier ones, as `fold_topic` has them.
    topic_ids:   the tokens of the one that main is writing; None outside topics.
    verdicts:    of a check: what to write if all is well, then if the first one is seen, or is
                 not; and what instead of the first if the vocabulary is another.
    """

    kind: Kind
    control: ControlTokens
    ends: tuple[int, ...]
    begun: bool = False
    promises: int = 0
    sync: bool = False
    topic: bool = True
    max_topic_tokens: int = 12
    topics_begin_apart: bool = True
    topics: tuple[str, ...] = ()
    beginnings: tuple[int, ...] = ()
    topic_ids: tuple[int, ...] | None = None
    verdicts: tuple[int, ...] = ()

    @property
    def ids(self) -> frozenset[int]:
        """All token ids that it names."""
        named = (self.ends, self.beginnings, self.topic_ids or (), self.verdicts)
        return self.control.ids.union(*named)


def write_brief(brief: Brief) -> str:
    """Return what `read_brief` reads."""
    record = asdict(brief)
    control = brief.control
    record["control"] = [
        *(control.promise_open, control.async_open, control.async_close, control.sync),
        *control.promise_close.values(),
    ]
    record["buckets"] = list(control.promise_close)
    return json.dumps({"protocol": PROTOCOL, **record}, separators=(",", ":"))


def read_brief(found: object) -> Brief:
    """Read a brief that came from outside. Raises PastaError, in one sentence, if it is none."""
    record = _record(found)
    if record.pop("protocol", None) != PROTOCOL:
        raise PastaError(
            f"this server's logits processor speaks protocol {PROTOCOL} of Pasta and the request "
            "another: install the same version of Pasta on both sides"
        )
    if record.keys() != _READERS.keys():
        raise _garbage(f"it has the fields {', '.join(sorted(record)) or 'of nothing'}")
    fields: dict[str, Any] = {name: read(name, record[name]) for name, read in _READERS.items()}
    buckets, control = fields.pop("buckets"), fields.pop("control")
    fields["control"] = _control(control, buckets)
    brief = Brief(**fields)
    if not brief.ends:
        raise _garbage("`ends` names no id")
    if brief.kind is Kind.check and len(set(brief.verdicts)) != _VERDICTS:
        raise _garbage(f"`verdicts` are not {_VERDICTS} ids")
    return brief


_VERDICTS = 4


def _record(found: object) -> dict[str, Any]:
    if not isinstance(found, str) or len(found) > _MAX_CHARS:
        raise _garbage(f"it is no text of at most {_MAX_CHARS} characters")
    try:
        record = json.loads(found)
    except (ValueError, RecursionError):
        raise _garbage("it is no JSON") from None
    if not isinstance(record, dict):
        raise _garbage("it is no JSON object")
    return record


def _control(ids: tuple[int, ...], buckets: tuple[int, ...]) -> ControlTokens:
    alone = 4
    if len(ids) != alone + len(buckets) or not buckets or len(set(ids)) < len(ids):
        raise _garbage("`control` does not name every part of a tag once")
    if len(set(buckets)) < len(buckets):
        raise _garbage("`buckets` has a length twice")
    promise_open, async_open, async_close, sync = ids[:alone]
    closes: Mapping[int, int] = dict(zip(buckets, ids[alone:], strict=True))
    return ControlTokens(promise_open, closes, async_open, async_close, sync)


def _kind(name: str, found: object) -> Kind:
    if not isinstance(found, str) or found not in list(Kind):
        raise _garbage(f"`{name}` is none of {', '.join(Kind)}")
    return Kind(found)


def _flag(name: str, found: object) -> bool:
    if not isinstance(found, bool):
        raise _garbage(f"`{name}` is neither true nor false")
    return found


def _number(name: str, found: object) -> int:
    if type(found) is not int or not 0 <= found < _MAX_ID:
        raise _garbage(f"`{name}` holds what is no number from 0 to {_MAX_ID - 1}")
    return found


def _list(name: str, found: object) -> list[Any]:
    if not isinstance(found, list) or len(found) > _MAX_LIST:
        raise _garbage(f"`{name}` is no list of at most {_MAX_LIST}")
    return found


def _ids(name: str, found: object) -> tuple[int, ...]:
    return tuple(_number(name, one) for one in _list(name, found))


def _maybe_ids(name: str, found: object) -> tuple[int, ...] | None:
    return None if found is None else _ids(name, found)


def _texts(name: str, found: object) -> tuple[str, ...]:
    texts = _list(name, found)
    if not all(isinstance(one, str) for one in texts):
        raise _garbage(f"`{name}` holds what is no text")
    return tuple(texts)


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "kind": _kind,
    "control": _ids,
    "buckets": _ids,
    "ends": _ids,
    "begun": _flag,
    "promises": _number,
    "sync": _flag,
    "topic": _flag,
    "max_topic_tokens": _number,
    "topics_begin_apart": _flag,
    "topics": _texts,
    "beginnings": _ids,
    "topic_ids": _maybe_ids,
    "verdicts": _ids,
}


def _garbage(what: str) -> PastaError:
    return PastaError(f"the request's argument `{XARG}` is not what Pasta writes: {what}")
