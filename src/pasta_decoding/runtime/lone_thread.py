"""One thread of an answer where nobody knows the others: what it may write next."""

from __future__ import annotations

from pasta_decoding.runtime.allowed import Constraint
from pasta_decoding.runtime.briefs import Brief, Kind
from pasta_decoding.runtime.constraints import Topics, main_constraint, open_chunk_constraint
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.vocabulary import Vocabulary


class LoneThread:
    """Main until it waits or ends, or one chunk: the interpreter's constraints from a brief.

    Limits are not its business: whoever sends the brief ends what comes to one.
    """

    def __init__(self, vocabulary: Vocabulary, brief: Brief) -> None:
        assert brief.kind is not Kind.check, "a check is no thread"
        self._vocabulary = vocabulary
        self._is_chunk = brief.kind is Kind.chunk
        self._begun = brief.begun
        self._promises = brief.promises
        self._may_sync = brief.sync
        self._in_topic = brief.topic_ids is not None
        self._allowed: Constraint | None = None
        rules = Rules(
            max_topic_tokens=brief.max_topic_tokens,
            topics_begin_apart=brief.topics_begin_apart,
            topic=brief.topic,
        )
        self._topics = Topics(
            vocabulary,
            rules,
            ids=list(brief.topic_ids or ()),
            earlier=list(brief.topics),
            beginnings=set(brief.beginnings),
        )

    def constraint(self) -> Constraint:
        """Return what it may write next: the same object for as long as that is the same."""
        if self._allowed is None:
            self._allowed = self._find()
        return self._allowed

    def on_token(self, token: int) -> None:
        """Hear what it wrote."""
        if self._is_chunk:
            if not self._begun:
                self._begun, self._allowed = True, None
        elif self._in_topic or token == self._vocabulary.control.promise_open:
            self._allowed = None
            self._on_promise_token(token)

    def _find(self) -> Constraint:
        if self._is_chunk:
            return open_chunk_constraint(self._vocabulary, begun=self._begun)
        if self._in_topic:
            return self._topics.constraint()
        may_promise = self._promises > 0
        return main_constraint(self._vocabulary, promise=may_promise, sync=self._may_sync)

    def _on_promise_token(self, token: int) -> None:
        if not self._in_topic:
            self._in_topic = True
        elif token in self._vocabulary.promise_close_ids:
            self._topics.finish()
            self._in_topic = False
            self._promises -= 1
            self._may_sync = True
        elif token not in self._vocabulary.eos_ids:
            self._topics.ids.append(token)
