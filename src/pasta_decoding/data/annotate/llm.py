"""Annotate through a chat endpoint: a large language model inserts the tags, and is checked.

What it writes must read as exactly the response with correct tags around its parts. If not, it is
told why and may try again. Token counts are counted here: a model cannot.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from pasta_decoding.data.annotate.base import AnnotatedRow, finish_tree, reject
from pasta_decoding.data.endpoint import (
    Ask,
    Endpoint,
    EndpointError,
    EndpointMessage,
    ask_concurrently,
)
from pasta_decoding.data.rows import Row, read_rows
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Node, Span, Tree, read, strip, text_form

# Token counts are replaced, and promises are printed anew: mistakes in these cost nothing.
_MENDED = {"missing-tokens", "bad-tokens", "promise-form"}
_SHOWN_CHARS = 40
RETRIES = 2
"""How often to ask again where an answer could not be taken."""

# Tokens that an answer may have. The endpoint's tokenizer is another one, and tags cost tokens.
_ROOM_FACTOR = 2
_ROOM_TOKENS = 1000


class AnswerError(Exception):
    """The model's answer cannot be taken. `kind` is for counting, the message for the model."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def accept(answer: str, response: str, count_tokens: Callable[[str], int]) -> str:
    """Return the model's annotation of `response` in text form, its token counts put right.

    What the model wrote around it is dropped: white space, a code fence, a remark. Raises
    AnswerError if the text is not that of the response or a rule of the language is broken.
    """
    core = response.strip()
    before, _, after = response.partition(core)
    tree = _cut_out(read(answer), core)
    if broken := [one for one in check(answer) if one.rule not in _MENDED]:
        first = broken[0]
        where = f"line {first.line}, column {first.column}"
        raise AnswerError(first.rule, f"At {where}: {first.message}.")
    topics = [node.topic for node in tree if isinstance(node, Chunk)]
    if twice := [topic for topic in topics if topics.count(topic) > 1]:
        raise AnswerError("same topic", f"{len(twice)} parts have the topic {twice[0]!r}.")
    return before + text_form(finish_tree(tree, count_tokens)) + after


def _cut_out(tree: Tree, core: str) -> Tree:
    """Return the part of `tree` whose text is `core`, if all that is around it is main text."""
    text = strip(tree)
    start, at = text.find(core), 0
    nodes: list[Node] = []
    for node in tree:
        if isinstance(node, Span):
            kept = node.text[max(0, start - at) : max(0, start + len(core) - at)]
            nodes += [Span(kept)] if kept else []
        else:
            nodes.append(node)
        at += len(getattr(node, "text", ""))
    if start < 0 or strip(tuple(nodes)) != core:
        raise AnswerError("text differs", _difference(text, core))
    return tuple(nodes)


def _difference(text: str, core: str) -> str:
    """Say where the text without its tags leaves the response."""
    text = text.strip()
    differ = (place for place, pair in enumerate(zip(text, core, strict=False)) if len({*pair}) > 1)
    same = next(differ, min(len(text), len(core)))
    expected, found = (
        repr(one[same : same + _SHOWN_CHARS]) if one[same:] else "the end" for one in (core, text)
    )
    behind = repr(core[max(0, same - _SHOWN_CHARS) : same])
    return (
        f"Without its tags your answer is not the response: behind {behind} "
        f"the response goes on with {expected}, your answer with {found}."
    )


def by_endpoint(
    endpoint: Endpoint, count_tokens: Callable[[str], int], rows: Iterable[Row]
) -> Iterator[AnnotatedRow]:
    """Annotate by asking about several rows at the same time, and checking the answers.

    The costs of a row: `requests` (tries included), `prompt_tokens`, `completion_tokens`, and
    `retries: REASON` for every answer that was not taken and asked for again. Raises EndpointError
    if no request can succeed, or if many rows one after the other were not answered; these are not
    yielded.
    """
    return ask_concurrently(endpoint, rows, partial(_annotate_row, count_tokens))


async def _annotate_row(
    count_tokens: Callable[[str], int], ask: Ask, row: Row
) -> tuple[AnnotatedRow, EndpointError | None]:
    conversation = [*introduction(), _turn("user", _question(row))]
    room = _ROOM_FACTOR * count_tokens(row.response) + _ROOM_TOKENS
    cost: Counter[str] = Counter()
    for again in range(RETRIES, -1, -1):
        try:
            reply = await ask(conversation, room)
        except EndpointError as failure:
            return reject(row, f"endpoint: {failure.kind}", cost), failure
        cost.update(reply.cost)
        try:
            annotated = accept(reply.text, row.response, count_tokens)
            return AnnotatedRow(replace(row, response=annotated), cost=cost), None
        except AnswerError as error:
            if not again:
                return reject(row, error.kind, cost), None
            cost[f"retries: {error.kind}"] += 1
            conversation += [
                _turn("assistant", reply.text or "(nothing)"),
                _turn("user", f"{error} Write the whole annotated response again."),
            ]
    raise AssertionError("the last try returns")


@cache
def introduction() -> tuple[EndpointMessage, ...]:
    """Return the beginning of every conversation: the guide, and the demonstrations as turns."""
    folder = Path(__file__).parent
    turns = [_turn("system", (folder / "guide.md").read_text(encoding="utf-8"))]
    for row in read_rows(folder / "demonstrations.jsonl"):
        plain = replace(row, response=strip(read(row.response)))
        turns += [_turn("user", _question(plain)), _turn("assistant", row.response)]
    return tuple(turns)


def _question(row: Row) -> str:
    # The text form of the plain response: what looks like a tag in it carries its backslash.
    response = text_form((Span(row.response.strip()),))
    return f"Question:\n\n{row.instruction}\n\nResponse:\n\n{response}"


def _turn(role: str, content: str) -> EndpointMessage:
    return {"role": role, "content": content}
