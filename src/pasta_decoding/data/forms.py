"""One JSON object of a row as the turns of a conversation, in any form in which programs keep one.

- `instruction` and `response`, which is ours. Alpaca's `input` and Dolly's `context` follow the
  instruction behind a blank line;
- `messages`, each with `role` and `content`, or ShareGPT's `conversations`, each with `from` and
  `value`: the last one is the response;
- `prompt` and `completion`, each a text or messages; here and above, Alpaca's `output` is one too;
- any of them with `chosen` and `rejected` in the place of the response, as TRL has preferences: a
  list of these may begin with the prompt.

`system` or `system_prompt` may stand beside them; what else belongs to prompt or answer is never
passed over.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pasta_decoding.errors import PastaError
from pasta_decoding.models.template import ROLES, Message

JsonObject = Mapping[str, Any]
_FORMS = ("instruction", "messages", "conversations", "prompt")
_INPUTS, _SYSTEMS = ("input", "context"), ("system", "system_prompt")
_ANSWERS = ("response", "completion", "output")
COLUMNS = (*_FORMS, *_INPUTS, *_SYSTEMS, *_ANSWERS, "history")
# Other programs put these columns into a prompt, and these parts into a message.
_FOREIGN = ("tools", "functions", "documents", "chat_template_kwargs",
            "image", "images", "video", "videos", "audio", "audios")  # fmt: skip
_FOREIGN_PARTS = ("tool_calls", "function_call", "reasoning", "reasoning_content", "thinking")
_ROLE_NAMES = {"human": "user", "gpt": "assistant", "developer": "system"}


def turns_of(found: JsonObject, *, answered: bool) -> list[Message]:
    """Return the turns of a row, a system message first; the response last if it is `answered`."""
    form = next((name for name in _FORMS if name in found), "instruction")
    beside = _FOREIGN if form == "instruction" else (*_FOREIGN, *_INPUTS)
    if foreign := [name for name in beside if found.get(name)]:
        raise PastaError(f"{foreign[0]!r} has no place in a prompt of {form!r}")
    if form == "instruction":
        more = [text_field(found, name, "") for name in _INPUTS]
        asked = [text_field(found, "instruction"), *filter(str.strip, more)]
        turns = [*messages_of(found, "history"), Message("user", "\n\n".join(asked))]
    else:
        turns = messages_of(found, form, "user" if form == "prompt" else None)
    is_whole = form in ("messages", "conversations")
    named = "completion" if form == "prompt" else "response"
    answer = form if is_whole else next((name for name in _ANSWERS if name in found), named)
    if answered and not is_whole:
        turns += messages_of(found, answer, "assistant")
    told = found.get(answer) if answered else None
    if isinstance(told, list) and told and 0 in (told[-1].get("weight"), told[-1].get("train")):
        raise PastaError("the answer is marked as one not to learn")
    if not answered and turns and turns[-1].role == "assistant":
        del turns[-1]
    if system := "\n\n".join(filter(None, (text_field(found, name, "") for name in _SYSTEMS))):
        if any(turn.role == "system" for turn in turns):
            raise PastaError("'system' stands beside a system message")
        turns = [Message("system", system), *turns]
    return turns


def judged_turns_of(found: JsonObject, name: str) -> list[Message]:
    """Return the turns that end with the answer in the column `chosen` or `rejected`."""
    answer = messages_of(found, name, "assistant")
    if len(answer) == 1:
        return [*turns_of(found, answered=False), *answer]
    beside = {key: value for key, value in found.items() if key not in _FORMS}
    return turns_of(beside | {"messages": found[name]}, answered=True)


def messages_of(found: JsonObject, name: str, role: str | None = None) -> list[Message]:
    """Return a column as turns. `role`: it may be a text as well, which that one says."""
    turns = found.get(name, [])
    if role and not isinstance(found.get(name), list):
        return [Message(role, text_field(found, name))]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise PastaError(f"{name!r} is not a list of messages")
    return [_message(turn) for turn in turns]


def _message(turn: JsonObject) -> Message:
    role_name, content_name = ("from", "value") if "from" in turn else ("role", "content")
    role = text_field(turn, role_name)
    role = _ROLE_NAMES.get(role, role)
    if role not in ROLES:
        raise PastaError(f"unknown role {role!r}: roles are {', '.join(ROLES)}")
    if foreign := [name for name in _FOREIGN_PARTS if turn.get(name)]:
        raise PastaError(f"{foreign[0]!r} has no place in a message")
    if isinstance(turn.get(content_name), list):
        with suppress(KeyError, TypeError):  # parts that are no text: told below
            turn = {content_name: "\n".join(part["text"] for part in turn[content_name])}
    return Message(role, text_field(turn, content_name))


def text_field(found: JsonObject, name: str, default: str | None = None) -> str:
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
