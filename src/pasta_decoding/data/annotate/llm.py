"""Annotates through a chat endpoint: a large language model inserts the tags.

Without its tags, the model's answer must be exactly the response, and its tags must be correct. If
not, the model gets the reason and another try. Lengths are counted here: a model cannot.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from pasta_decoding.data.annotate.base import AnnotatedRow, finish_tree, reject
from pasta_decoding.data.endpoint import (
    AskEndpoint,
    Endpoint,
    EndpointError,
    EndpointMessage,
    ask_concurrently,
)
from pasta_decoding.data.rows import Row, read_rows
from pasta_decoding.lang.check import check
from pasta_decoding.lang.tree import Chunk, Node, Span, Tree, read, strip, text_form

# Lengths are counted here and promises are printed anew, so these mistakes do not matter.
_HARMLESS_RULES = {"missing-tokens", "bad-tokens", "promise-form"}
_EXCERPT_CHARS = 40
RETRIES = 2
"""How often to ask again after an answer that was rejected."""

# The limit of an answer: the endpoint's tokenizer is another one, and tags cost tokens.
_LIMIT_FACTOR = 2
_EXTRA_TOKENS = 1000


class AnswerError(Exception):
    """The model's answer is rejected. `kind` is for counting, the message for the model."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def accept(answer: str, response: str, count_tokens: Callable[[str], int]) -> str:
    """Return the model's annotation of `response` in text form, its lengths counted.

    Text that the model wrote before or after it is dropped, such as a code fence. Raises
    AnswerError if the text is not the response's or a rule of the language is broken.
    """
    stripped = response.strip()
    before, _, after = response.partition(stripped)
    tree = _tree_of(read(answer), stripped)
    for problem in check(answer):
        if problem.rule not in _HARMLESS_RULES:
            position = f"line {problem.line}, column {problem.column}"
            raise AnswerError(problem.rule, f"At {position}: {problem.message}.")
    topics = [node.topic for node in tree if isinstance(node, Chunk)]
    if twice := [topic for topic in topics if topics.count(topic) > 1]:
        raise AnswerError("same topic", f"{len(twice)} parts have the topic {twice[0]!r}.")
    return before + text_form(finish_tree(tree, count_tokens)) + after


def _tree_of(tree: Tree, response: str) -> Tree:
    """Return the part of an answer's tree whose text is the response.

    Raises AnswerError if there is none, or if a chunk holds text before or after the response.
    """
    answer_text = strip(tree)
    start = answer_text.find(response)
    end = start + len(response)
    nodes: list[Node] = []
    position = 0  # where the node begins in `answer_text`
    for node in tree:
        if isinstance(node, Span):
            inside = node.text[max(0, start - position) : max(0, end - position)]
            if inside:
                nodes.append(Span(inside))
        else:
            nodes.append(node)
        position += len(getattr(node, "text", ""))
    if start < 0 or strip(tuple(nodes)) != response:
        raise AnswerError("text differs", _difference(answer_text.strip(), response))
    return tuple(nodes)


def _difference(answer_text: str, response: str) -> str:
    """Return a sentence that shows where an answer's text leaves the response."""
    equal_chars = 0
    for answer_char, response_char in zip(answer_text, response, strict=False):
        if answer_char != response_char:
            break
        equal_chars += 1
    equal_text = response[max(0, equal_chars - _EXCERPT_CHARS) : equal_chars]
    return (
        f"Without its tags your answer is not the response: behind {equal_text!r} "
        f"the response goes on with {_excerpt_from(response, equal_chars)}, "
        f"your answer with {_excerpt_from(answer_text, equal_chars)}."
    )


def _excerpt_from(text: str, start: int) -> str:
    return repr(text[start : start + _EXCERPT_CHARS]) if text[start:] else "the end"


def by_endpoint(
    endpoint: Endpoint, count_tokens: Callable[[str], int], rows: Iterable[Row]
) -> Iterator[AnnotatedRow]:
    """Annotate rows, several at the same time.

    The costs of a row are `requests` (tries included), `prompt_tokens`, `completion_tokens`, and
    `retries: REASON` for each rejected answer after which the model was asked again.

    Raises EndpointError if no request can succeed, or if many rows one after the other were not
    answered; these rows are not yielded.
    """
    return ask_concurrently(endpoint, rows, partial(_annotate_row, count_tokens))


async def _annotate_row(
    count_tokens: Callable[[str], int], ask: AskEndpoint, row: Row
) -> tuple[AnnotatedRow, EndpointError | None]:
    conversation = [*introduction(), _turn("user", _question(row))]
    max_tokens = _LIMIT_FACTOR * count_tokens(row.response) + _EXTRA_TOKENS
    cost: Counter[str] = Counter()
    for retries_left in range(RETRIES, -1, -1):
        try:
            reply = await ask(conversation, max_tokens)
        except EndpointError as failure:
            return reject(row, f"endpoint: {failure.kind}", cost), failure
        cost.update(reply.cost)
        try:
            annotated = accept(reply.text, row.response, count_tokens)
            return AnnotatedRow(replace(row, response=annotated), cost=cost), None
        except AnswerError as error:
            if not retries_left:
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
    # In the text form, a literal tag of the plain response has its backslash.
    response = text_form((Span(row.response.strip()),))
    return f"Question:\n\n{row.instruction}\n\nResponse:\n\n{response}"


def _turn(role: str, content: str) -> EndpointMessage:
    return {"role": role, "content": content}
