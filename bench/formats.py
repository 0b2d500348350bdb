"""The same questions on several engines in turn: do the number formats keep the answers?

    python bench/formats.py --engines llama:F32 llama:F16 llama:BF16 llama:Q8_0 llama:Q4_0
    python bench/formats.py --engines llama:F32 llama:F16 --prompts FILE.jsonl.gz --limit 60

Greedy. An answer loops if it is cut off at a limit and more than a fifth of its runs of four words
came before (rep-4). The first engine is the reference: `loops_alone` are those of prompts whose
reference answer does not.
`equal` answers are the reference's, character by character; `seconds_of_reference` is a ratio, per
token, of the same prompt in the same round, so that other work on the machine cancels out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from common import arguments, decoder_named, emit, spread
from rich.console import Console
from rich.progress import track

from pasta_decoding.data.questions import question_of, read_questions
from pasta_decoding.lang.measures import geometric_mean, rep_4, tokens_per_step
from pasta_decoding.models.load import DEFAULT_ADAPTER
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import Rules, SamplingParams

LOOP = 0.2
QUESTIONS = (
    "How can I sleep better?",
    "What are the pros and cons of working from home?",
    "Give me tips for a first job interview.",
    "Explain how a rainbow forms.",
    "Compare tea and coffee.",
    "Plan a weekend in Rome for two.",
    "What should I know before adopting a dog?",
    "Describe the main causes of the First World War.",
    "How do I start a small vegetable garden?",
    "Write a short story about a lighthouse keeper.",
)


@dataclass(frozen=True, slots=True)
class Written:
    """One answer, and what it took."""

    text: str
    seconds_per_token: float
    seconds: float
    repeated: float
    speedup: float
    cut_off: bool

    @property
    def loops(self) -> bool:
        """Does it repeat itself without an end?"""
        return self.cut_off and self.repeated > LOOP


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=Path, help="in place of ten questions of this file")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=512)
    options = parser.parse_args()
    questions = (
        [question_of(text) for text in QUESTIONS]
        if options.prompts is None
        else read_questions(options.prompts)
    )[: options.limit]
    decoders = {name: decoder_named(name, options) for name in options.engines}
    found: dict[str, list[Written]] = {name: [] for name in decoders}
    for decoder in decoders.values():  # a cold engine is slow
        written(decoder, questions[0].instruction, 16)
    for question in track(questions, "answering", console=Console(stderr=True), transient=True):
        for name, decoder in decoders.items():
            found[name].append(written(decoder, question.instruction, options.max_tokens))
    reference = found[options.engines[0]]
    for name, decoder in decoders.items():
        report(decoder.engine.name, name, options, found[name], reference)


def written(decoder: LocalDecoder, question: str, max_tokens: int) -> Written:
    """Answer a question."""
    answer = decoder.answer(
        decoder.request(question, Rules(max_tokens=max_tokens), SamplingParams())
    )
    tokens = max(1, decoder.plain_tokens(answer.text))
    return Written(
        text=answer.text,
        seconds_per_token=answer.seconds / tokens,
        seconds=answer.seconds,
        repeated=rep_4(answer.text),
        speedup=tokens_per_step(tokens, answer.critical_path),
        cut_off=answer.truncated,
    )


def report(
    engine: str,
    name: str,
    options: argparse.Namespace,
    own: list[Written],
    reference: list[Written],
) -> None:
    """Print the line of one engine."""
    both = list(zip(own, reference, strict=True))
    emit(
        "formats",
        engine=engine,
        requested=name,
        adapter=options.adapter or DEFAULT_ADAPTER,
        reference=options.engines[0],
        prompts=options.prompts.name if options.prompts else "ten questions",
        answers=len(own),
        max_tokens=options.max_tokens,
        loops=sum(one.loops for one in own),
        loops_alone=sum(one.loops and not other.loops for one, other in both),
        equal=sum(one.text == other.text for one, other in both),
        truncated=sum(one.cut_off for one in own),
        most_rep_4=round(max(one.repeated for one in own), 4),
        mean_rep_4=round(mean(one.repeated for one in own), 4),
        tokens_per_step=round(geometric_mean(one.speedup for one in own) or 0, 3),
        seconds=spread([one.seconds for one in own], 3),
        ms_per_token=spread([1000 * one.seconds_per_token for one in own], 3),
        seconds_of_reference=spread(
            [one.seconds_per_token / other.seconds_per_token for one, other in both], 3
        ),
    )


if __name__ == "__main__":
    main()
