"""The strict side of the language: `check` reports everything that `tree.read` tolerates.

A response passes if and only if the text form of its tree is the response itself, and no chunk is
empty or has white space at its edges.
"""

from bisect import bisect_right
from dataclasses import dataclass

from pasta_decoding.lang import tags
from pasta_decoding.lang.markup import opening_markup
from pasta_decoding.lang.tree import (
    MAX_TOKENS,
    MAX_TOPIC_CHARS,
    MAX_TOPIC_WORDS,
    read,
    valid_tokens,
    valid_topic,
)

RULES: dict[str, str] = {
    "missing-topic": "the promise has no topic",
    "missing-tokens": "the promise has no tokens",
    "doubled-attribute": "an attribute is given twice; the first one counts",
    "unknown-attribute": "a promise has no attributes but topic and tokens",
    "bad-topic": "a topic is plain words with single spaces between them, without quotes, "
    f"brackets, backslashes or line breaks, at most {MAX_TOPIC_CHARS} characters long",
    "long-topic": f"a topic has at most {MAX_TOPIC_WORDS} words",
    "bad-tokens": f"tokens is a positive multiple of 10, at most {MAX_TOKENS}",
    "promise-form": 'a promise is written <promise topic="..." tokens="N"/>',
    "promise-without-async": "the promise is not followed by its <async>",
    "async-without-promise": "<async> keeps no promise",
    "space-before-async": "white space between a promise and its <async>",
    "unclosed-async": "<async> is never closed",
    "stray-close": "</async> closes nothing",
    "empty-chunk": "the chunk is empty",
    "space-in-chunk": "white space at the edge of a chunk; it belongs to the main thread",
    "tag-in-chunk": "a tag inside a chunk; chunks do not nest",
    "idle-sync": "<sync/> with no chunk to wait for",
}
"""The message of each rule. The corpus and docs/language.md have an entry for every rule."""

WARNINGS: dict[str, str] = {
    "markup-in-chunk": "markup opens the chunk; it belongs to the main thread",
}
"""Messages of what is well-formed but teaches a model a bad habit; documented like RULES."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule, or one warning. `line` and `column` count characters from 1."""

    line: int
    column: int
    rule: str
    message: str


def check(text: str, *, topic_required: bool = True) -> list[Problem]:
    """Return the broken rules of a response in the text form, in reading order."""
    broken_rules: list[tuple[int, str]] = []
    read(text, lambda pos, rule: broken_rules.append((pos, rule)))
    for event in tags.parse(text):
        if isinstance(event, tags.Promise):
            rules = _promise_rules(event, topic_required=topic_required)
            broken_rules += [(event.pos, rule) for rule in rules]
    broken_rules.sort(key=lambda pos_and_rule: pos_and_rule[0])
    return _located(text, broken_rules)


def warn(text: str) -> list[Problem]:
    """Return the warnings about a response in the text form, in reading order."""
    events = tags.parse(text)
    warnings: list[tuple[int, str]] = []
    for promise, opening, body in zip(events, events[1:], events[2:], strict=False):
        match promise, opening, body:
            case tags.Promise(), tags.AsyncOpen(), tags.Text(pos, words) if opening_markup(words):
                warnings.append((pos, "markup-in-chunk"))
    return _located(text, warnings)


def _promise_rules(promise: tags.Promise, *, topic_required: bool) -> list[str]:
    names = [name for name, _ in tags.attributes(promise.source)]
    topic = valid_topic(promise.topic)
    tokens = valid_tokens(promise.tokens)
    is_long = len((promise.topic or "").split()) > MAX_TOPIC_WORDS
    broken = {
        "missing-topic": topic_required and "topic" not in names,
        "missing-tokens": "tokens" not in names,
        "doubled-attribute": len(set(names)) < len(names),
        "unknown-attribute": not {"topic", "tokens"}.issuperset(names),
        "long-topic": is_long,
        "bad-topic": promise.topic != topic and not is_long,
        "bad-tokens": "tokens" in names and promise.tokens != tokens,
    }
    rules = [rule for rule, is_broken in broken.items() if is_broken]
    if not rules and promise.source != tags.promise_tag(topic, tokens):
        return ["promise-form"]
    return rules


def _located(text: str, broken_rules: list[tuple[int, str]]) -> list[Problem]:
    """Give each position in `text` and rule its line, its column and its message."""
    line_starts = [0, *(pos + 1 for pos, char in enumerate(text) if char == "\n")]
    problems = []
    for pos, rule in broken_rules:
        line = bisect_right(line_starts, pos)
        column = pos - line_starts[line - 1] + 1
        message = (RULES | WARNINGS)[rule]
        problems.append(Problem(line, column, rule, message))
    return problems
