"""A finished answer as the front door hands it out."""

from __future__ import annotations

from dataclasses import dataclass

from pasta_decoding.lang.measures import tokens_per_step
from pasta_decoding.lang.tree import Chunk, Tree
from pasta_decoding.runtime.answer import Answer, Sent


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took, in tokens.

    prompt_tokens: of the prompt, chat template included.
    plain_tokens:  of the text that a reader sees, tokenised alone.
    fed_tokens:    computed behind the prompt, tags and text that was cut off included.
    """

    prompt_tokens: int
    plain_tokens: int
    fed_tokens: int


@dataclass(frozen=True, slots=True)
class Thread:
    """One decode thread that wrote a chunk; numbers count from 1 in reading order.

    promised_tokens: the length that its promise named.
    """

    number: int
    topic: str | None
    promised_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """One finished answer.

    text:          without tags; it ends before a stop string.
    annotated:     the text form, tags and escapes included, a stop string and all.
    tree:          the same as nodes: spans, chunks, syncs.
    threads:       those that wrote chunks, without the main one.
    critical_path: forward steps behind the prefill that the answer needs at unlimited width.
    finish_reason: "stop" (the model ended it, or a stop string) or "length" (a limit did).
    interventions: how often a constraint overruled the model.
    seconds:       from the request to the end.
    queue_s:       from the request to its admission.
    first_token_s: from the request to the first token; None if there was none.
    sent:          requests to servers; None for an engine in this process.
    """

    text: str
    annotated: str
    tree: Tree
    threads: tuple[Thread, ...]
    critical_path: int
    usage: Usage
    finish_reason: str
    truncated: bool
    interventions: int
    seconds: float
    queue_s: float
    first_token_s: float | None
    sent: Sent | None = None

    @property
    def tokens_per_step(self) -> float:
        """Plain tokens / critical path: how many tokens a step wrote."""
        return tokens_per_step(self.usage.plain_tokens, self.critical_path)


def result_of(answer: Answer, text: str, plain_tokens: int) -> Result:
    """Return the result of an answer whose visible text is `text`."""
    chunks = [node for node in answer.tree if isinstance(node, Chunk)]
    return Result(
        text=text,
        annotated=answer.annotated,
        tree=answer.tree,
        threads=tuple(
            Thread(number, chunk.topic, chunk.tokens, chunk.text)
            for number, chunk in enumerate(chunks, start=1)
        ),
        critical_path=answer.critical_path,
        usage=Usage(answer.trace.prompt_tokens, plain_tokens, answer.fed_tokens),
        finish_reason="length" if answer.end is None and not answer.stopped else "stop",
        truncated=answer.truncated and not answer.stopped,
        interventions=answer.interventions,
        seconds=answer.seconds,
        queue_s=answer.queue_s,
        first_token_s=answer.first_token_s,
        sent=answer.trace.sent,
    )
