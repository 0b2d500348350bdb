"""One request a question: learned parallel decoding, and its sequential baseline."""

from __future__ import annotations

from dataclasses import dataclass

from pasta_decoding.data.questions import Question
from pasta_decoding.evaluation.methods.base import Asking
from pasta_decoding.evaluation.records import Record, record_of
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Own:
    """Greedy decoding by the interpreter.

    max_tokens: of an answer, all threads together, tags included.
    parallel:   False bans promises, whatever the weights have learnt.
    """

    decoder: Decoder
    max_tokens: int
    parallel: bool

    def ask(self, question: Question) -> Asking[Record]:
        """See `Method`."""
        rules = Rules(max_tokens=self.max_tokens, parallel=self.parallel)
        [answer] = yield [self.decoder.request(question.instruction, rules, Sampling())]
        return record_of(self.decoder, question, answer)
