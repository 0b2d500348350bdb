"""The forms in which programs keep a conversation, one JSON object each.

- `instruction` and `response`, which is ours. Alpaca's `input` and Dolly's `context` follow the
  instruction behind a blank line, and Alpaca's `output` is the response;
- `messages`, each with `role` and `content`, or ShareGPT's `conversations`, each with `from` and
  `value`: the last one is the response;
- `prompt` and `completion`, each a text or a list of messages.

`system` may stand beside them. A column that belongs to the prompt is never passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pasta_decoding.errors import PastaError
from pasta_decoding.models.prompt import ROLES, Message

Found = Mapping[str, Any]

COLUMNS = frozenset(
    {
        *("instruction", "response", "history", "system", "input", "context", "output"),
        *("messages", "conversations", "prompt", "completion"),
    }
)
"""What says a conversation in one form or another."""

_FORMS = ("instruction", "messages", "conversations", "prompt")
_BESIDE = ("input", "context", "tools")  # other programs put these columns into the prompt
_SHAREGPT = {"human": "user", "gpt": "assistant"}


def turns_of(found: Found, *, answered: bool) -> list[Message]:
    """Return the turns of a row, a system message first; the response last if it is `answered`."""
    form = next((name for name in _FORMS if name in found), "instruction")
    for name in _BESIDE:
        if found.get(name) and (name == "tools" or form != "instruction"):
            raise PastaError(f"{name!r} has no place in a prompt of {form!r}")
    answer = "completion"
    if form == "instruction":
        more = [text_of(found, name, "") for name in ("input", "context")]
        asked = [text_of(found, "instruction"), *filter(str.strip, more)]
        turns = [*_messages(found, "history"), Message("user", "\n\n".join(asked))]
        answer = "output" if "output" in found and "response" not in found else "response"
    else:
        turns = _side(found, form, "user") if form == "prompt" else _messages(found, form)
    if answered and form in ("instruction", "prompt"):
        turns += _side(found, answer, "assistant")
    if not answered and turns and turns[-1].role == "assistant":
        del turns[-1]
    return _with_system(text_of(found, "system", ""), turns)


def _with_system(system: str, turns: list[Message]) -> list[Message]:
    if system and any(turn.role == "system" for turn in turns):
        raise PastaError("'system' stands beside a system message")
    return [Message("system", system), *turns] if system else turns


def one_question(found: Found) -> str:
    """Return the one thing that is asked, whatever form the row has."""
    turns = turns_of(found, answered=False)
    if [turn.role for turn in turns] != ["user"]:
        raise PastaError("the prompt is a conversation, not one user's message")
    return turns[0].content


def _side(found: Found, name: str, role: str) -> list[Message]:
    """Return a prompt or a completion as turns: a text is what `role` says."""
    if isinstance(found.get(name), list):
        return _messages(found, name)
    return [Message(role, text_of(found, name))]


def _messages(found: Found, name: str) -> list[Message]:
    turns = found.get(name, [])
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise PastaError(f"{name!r} is not a list of messages")
    return [_message(turn) for turn in turns]


def _message(turn: Found) -> Message:
    role_name, content_name = ("from", "value") if "from" in turn else ("role", "content")
    role = text_of(turn, role_name)
    role = _SHAREGPT.get(role, role)
    if role not in ROLES:
        raise PastaError(f"unknown role {role!r}: roles are {', '.join(ROLES)}")
    content = turn.get(content_name)
    if isinstance(content, list) and all(_is_text(part) for part in content):
        turn = {content_name: "\n".join(part["text"] for part in content)}
    return Message(role, text_of(turn, content_name))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def text_of(found: Found, name: str, default: str | None = None) -> str:
    value = found.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise PastaError(f"{name!r} is not a string" if name in found else f"no {name!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PastaError(f"{name!r} holds half a surrogate pair") from error
    return value
