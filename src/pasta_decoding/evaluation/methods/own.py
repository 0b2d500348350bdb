"""One request a question: learned parallel decoding, and its sequential baseline."""

from __future__ import annotations

from dataclasses import dataclass, field

from pasta_decoding.data.questions import Question
from pasta_decoding.evaluation.methods.base import Asking, of_question
from pasta_decoding.evaluation.records import Record, record_of
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.request import Rules, SamplingParams


@dataclass(frozen=True, slots=True)
class Own:
    """Decoding by the interpreter.

    max_tokens: of an answer, all threads together, tags included.
    parallel:   False bans promises, whatever the weights have learnt.
    sampling:   greedy unless told otherwise.
    """

    decoder: Decoder
    max_tokens: int
    parallel: bool
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def ask(self, question: Question) -> Asking[Record]:
        """See `Method`."""
        rules = Rules(max_tokens=self.max_tokens, parallel=self.parallel)
        sampling = of_question(self.sampling, question)
        [answer] = yield [self.decoder.request(question.instruction, rules, sampling)]
        return record_of(self.decoder, question, answer)
