"""Reads one JSON object as the turns of a conversation, in each form that programs write.

- `instruction` and `response` are Pasta's own form. Alpaca's `input` and Dolly's `context` follow
  the instruction after a blank line. Blank parts are left out.
- `messages` have `role` and `content`; ShareGPT's `conversations` have `from` and `value`. The last
  message is the response.
- `prompt` and `completion` are each a text or a list of messages. Alpaca's `output` is another name
  for the response, here and in the first form.
- `chosen` and `rejected` take the place of the response in each of these forms, as TRL has them. A
  list of messages may begin with the prompt.

Each form may have `system` or `system_prompt` as well. A column that belongs to the prompt or to
the answer and that no form reads is an error: it is never dropped silently.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pasta_decoding.errors import PastaError
from pasta_decoding.models.template import ROLES, Message

JsonObject = Mapping[str, Any]

_PROMPT_COLUMNS = ("instruction", "messages", "conversations", "prompt")
"""The first of these columns that an object has tells its form."""
_INPUT_COLUMNS = ("input", "context")
_SYSTEM_COLUMNS = ("system", "system_prompt")
_ANSWER_COLUMNS = ("response", "completion", "output")
COLUMNS = (*_PROMPT_COLUMNS, *_INPUT_COLUMNS, *_SYSTEM_COLUMNS, *_ANSWER_COLUMNS, "history")
"""All columns that are read here, except for `chosen` and `rejected`."""

# Columns of prompts and parts of messages in other programs. Pasta cannot train on them.
_UNSUPPORTED_COLUMNS = (
    *("tools", "functions", "documents", "chat_template_kwargs"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
_UNSUPPORTED_PARTS = ("tool_calls", "function_call", "reasoning", "reasoning_content", "thinking")
_ROLE_NAMES = {"human": "user", "gpt": "assistant", "developer": "system"}


def turns_of(fields: JsonObject, *, answered: bool) -> list[Message]:
    """Return the turns of a row, a system message first; the response last if it is `answered`.

    Raises PastaError for an object without a prompt, or with something that no form reads.
    """
    form = next((name for name in _PROMPT_COLUMNS if name in fields), "instruction")
    _refuse_unsupported_columns(fields, form)
    if form == "instruction":
        turns = [*messages_of(fields, "history"), Message("user", _instruction(fields))]
    else:
        turns = messages_of(fields, form, "user" if form == "prompt" else None)
    answer_column = _answer_column(fields, form)
    if answered:
        if answer_column != form:
            turns += messages_of(fields, answer_column, "assistant")
        _refuse_untrained_answer(fields.get(answer_column))
    elif turns and turns[-1].role == "assistant":
        del turns[-1]
    return [*_system_message(fields, turns), *turns]


def _refuse_unsupported_columns(fields: JsonObject, form: str) -> None:
    unsupported = list(_UNSUPPORTED_COLUMNS)
    if form != "instruction":
        unsupported += _INPUT_COLUMNS
    for name in unsupported:
        if fields.get(name):
            raise PastaError(f"{name!r} has no place in a prompt of {form!r}")


def _instruction(fields: JsonObject) -> str:
    inputs = [text_field(fields, name, "") for name in _INPUT_COLUMNS]
    instruction = text_field(fields, "instruction")
    return "\n\n".join(filter(str.strip, [instruction, *inputs])) or instruction


def _answer_column(fields: JsonObject, form: str) -> str:
    """Return the column that holds the answer: `form` itself if its messages end with the answer.

    Without an answer, it is the column that an error should name.
    """
    if form in ("messages", "conversations"):
        return form
    default = "completion" if form == "prompt" else "response"
    return next((name for name in _ANSWER_COLUMNS if name in fields), default)


def _refuse_untrained_answer(messages: Any) -> None:
    """Raise PastaError if the last message has `weight` or `train` 0: it is not for training."""
    if not isinstance(messages, list) or not messages:
        return
    if 0 in (messages[-1].get("weight"), messages[-1].get("train")):
        raise PastaError("the answer is marked as one not to learn")


def _system_message(fields: JsonObject, turns: list[Message]) -> list[Message]:
    """Return the system message of the columns as a list of one, or an empty list."""
    texts = [text_field(fields, name, "") for name in _SYSTEM_COLUMNS]
    system = "\n\n".join(filter(str.strip, texts))
    if not system:
        return []
    if any(turn.role == "system" for turn in turns):
        raise PastaError("'system' stands beside a system message")
    return [Message("system", system)]


def judged_turns_of(fields: JsonObject, name: str) -> list[Message]:
    """Return the turns that end with the answer in the column `chosen` or `rejected`."""
    answer = messages_of(fields, name, "assistant")
    if len(answer) == 1:
        return [*turns_of(fields, answered=False), *answer]
    other_fields = {key: value for key, value in fields.items() if key not in _PROMPT_COLUMNS}
    return turns_of(other_fields | {"messages": fields[name]}, answered=True)


def messages_of(fields: JsonObject, name: str, text_role: str | None = None) -> list[Message]:
    """Return a column as turns.

    text_role: the column may be a text as well; the text is one turn of this role.
    """
    turns = fields.get(name, [])
    if text_role and not isinstance(fields.get(name), list):
        return [Message(text_role, text_field(fields, name))]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise PastaError(f"{name!r} is not a list of messages")
    return [_message(turn) for turn in turns]


def _message(turn: JsonObject) -> Message:
    if "from" in turn:
        role_key = "from"
        content_key = "value"
    else:
        role_key = "role"
        content_key = "content"
    role_name = text_field(turn, role_key)
    role = _ROLE_NAMES.get(role_name, role_name)
    if role not in ROLES:
        raise PastaError(f"unknown role {role!r}: roles are {', '.join(ROLES)}")
    for name in _UNSUPPORTED_PARTS:
        if turn.get(name):
            raise PastaError(f"{name!r} has no place in a message")
    if isinstance(turn.get(content_key), list):
        # `text_field` refuses a list with parts that are not text.
        with suppress(KeyError, TypeError):
            texts = [part["text"] for part in turn[content_key]]
            turn = {content_key: "\n".join(filter(str.strip, texts))}
    return Message(role, text_field(turn, content_key))


def text_field(fields: JsonObject, name: str, default: str | None = None) -> str:
    """Return a field that is text, or `default` if it is missing or null.

    Raises PastaError without a default, for another type, and for text that UTF-8 cannot hold.
    """
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise PastaError(f"{name!r} is not a string" if name in fields else f"no {name!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PastaError(f"{name!r} holds half a surrogate pair") from error
    return value
