"""Skeleton-of-Thought (Ning et al., ICLR 2024, arXiv 2307.15337) on our engines.

Two stages. The model is asked for a skeleton, a numbered list of points of a few words, its answer
begun with "1." as the paper does for open models. Then every point is expanded by a request of its
own, begun with the point itself, all of them side by side. The answer is their concatenation. No
point sees another one's text, and nothing is written behind them. The paper's router (SoT-R), a
classifier that keeps questions away from the method that do not suit it, is left out.

The prompts say what the paper's say, in our words, with two worked skeletons, as in the authors'
prompts for some models. For models so small that they hardly follow a prompt we add what helps
them: a point is begun with a colon behind it, or it would be taken for the beginning of a list; a
heading that repeats an earlier one is left out; and where a point goes on with the next one in
spite of the prompt, its text ends there, though its steps count.

What it costs. The prompt of the second stage is computed once up to the number of the point, where
the requests part (`Scheduler.add_together`); the authors' code feeds every point's prompt anew.
This second prefill cannot begin before the skeleton is known, so it is one step of the critical
path, for all points at once, and its tokens are in `prompt_tokens`:

    critical path = tokens of the skeleton + 1 + tokens of the longest point

Where the skeleton holds no two points there is nothing to write side by side. The authors' code
expands a single point alone, and has no answer where there is none. We ask for the plain answer, as
their router would have done at once, count the steps of the skeleton, and set the record's
`fallback`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from pasta_decoding.eval.methods.base import Asking
from pasta_decoding.eval.questions import Question
from pasta_decoding.eval.records import Record, record_of, text_times
from pasta_decoding.lang.measures import repeated_chunks
from pasta_decoding.lang.tree import (
    Chunk,
    Node,
    Span,
    Tree,
    show,
    strip,
    valid_tokens,
    valid_topic,
)
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.answer import Answer
from pasta_decoding.runtime.decoder import Decoder
from pasta_decoding.runtime.request import Request
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampler, Sampling

BEGUN = "1."
SKELETON = """\
Write only the outline of an answer, not the answer: a numbered list of 3 to 10 points, each of 3 \
to 5 words.

Question: How can I sleep better?
Outline:
1. Keep a fixed bedtime
2. A dark, cool room
3. No coffee after noon
4. Exercise during the day
5. Put the phone away

Question: Why did the Roman Empire fall?
Outline:
1. Attacks from outside
2. Weak and changing emperors
3. High taxes and debts
4. An army too costly

Question: {question}
Outline:"""
POINT = """\
{question}

The outline of the answer:
{skeleton}

Write one or two sentences about point {number} only."""
MOST_POINTS = 10
SKELETON_SHARE = 1 / 3  # of the answer's tokens; ten points of five words need about a hundred

_POINT = re.compile(r"^[ \t*#-]*(\d{1,2})[.)][ \t*]*(\S.*)$", re.MULTILINE)
_NEXT_POINT = re.compile(r"\n[ \t*#-]*(\d{1,2})[.)][ \t*]")


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a skeleton: its number as written, and its few words."""

    number: int
    heading: str

    @property
    def text(self) -> str:
        """How the answer begins it."""
        return f"{self.number}. {self.heading}"


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The method, greedy. Needs no trained model.

    max_tokens: of skeleton and points together; each point gets an equal share of what the
                skeleton leaves. A plain answer in their place may have all of them.
    """

    decoder: Decoder
    max_tokens: int

    def ask(self, question: Question) -> Asking[Record]:
        """See `Method`."""
        [skeleton] = yield [self._ask_skeleton(question)]
        outline = f"{BEGUN}{skeleton.text}"
        points = points_of(outline, cut_off=skeleton.hit_limit)
        if len(points) < 2:
            [plain] = yield [self._ask_plainly(question)]
            record = replace(record_of(self.decoder, question, plain), fallback=True)
            return behind(skeleton, record, requests=1)
        share = max(1, (self.max_tokens - skeleton.fed_tokens) // len(points))
        listed = "\n".join(point.text for point in points)
        answers = yield [self._expand(question, listed, point, share) for point in points]
        return behind(skeleton, self._record(question, points, answers), requests=len(points))

    def _ask_skeleton(self, question: Question) -> Request:
        text = SKELETON.format(question=question.instruction)
        return self._request(text, BEGUN, max(1, int(self.max_tokens * SKELETON_SHARE)))

    def _expand(self, question: Question, listed: str, point: Point, max_tokens: int) -> Request:
        text = POINT.format(question=question.instruction, skeleton=listed, number=point.number)
        return self._request(text, f"{point.text}:", max_tokens)

    def _ask_plainly(self, question: Question) -> Request:
        return self._request(question.instruction, "", self.max_tokens)

    def _request(self, text: str, begun: str, max_tokens: int) -> Request:
        """Return the request that answers `text` with an answer that has been begun."""
        encoder = self.decoder.encoder
        started = tuple(encoder.encode_text(begun)) if begun else ()
        room = self.decoder.engine.max_positions - max_tokens - len(started)
        prompt = tuple(encoder.encode([Message("user", text)], max_tokens=room))
        rules = Rules(max_tokens=max_tokens, parallel=False)
        return Request(prompt + started, Sampler(Sampling()), rules)

    def _record(
        self, question: Question, points: Sequence[Point], answers: Sequence[Answer]
    ) -> Record:
        """Return the record of the second stage, as if it were all."""
        texts = [answer.text for answer in answers]
        tree = concatenated(points, texts, self.decoder.plain_tokens)
        text = strip(tree)
        ends = [end for answer in answers if (end := text_times(answer)[1]) is not None]
        firsts = [first for answer in answers if (first := answer.first_token_s) is not None]
        return Record(
            question.id,
            question.instruction,
            question.dataset,
            text=text,
            annotated=show(tree),
            plain_tokens=self.decoder.plain_tokens(text),
            critical_path=max(answer.critical_path for answer in answers),
            fed_tokens=sum(answer.fed_tokens for answer in answers),
            prompt_tokens=sum(answer.trace.prefilled_tokens for answer in answers),
            chunks=sum(isinstance(node, Chunk) for node in tree),
            widths=widths_beside([answer.critical_path for answer in answers]),
            interventions=sum(answer.overruled for answer in answers),
            repeated_chunks=repeated_chunks(tree),
            truncated_chunks=sum(answer.truncated for answer in answers),
            hit_limit=any(answer.hit_limit for answer in answers),
            seconds=max(answer.seconds for answer in answers),
            first_token_s=min(firsts, default=None),
            first_text_s=0.0,  # the first heading is known from the skeleton
            last_text_s=max(ends, default=0.0),
        )


def points_of(outline: str, *, cut_off: bool = False) -> list[Point]:
    """Return the points of a skeleton, at most ten; a number once, and a heading once.

    cut_off: a limit ended the skeleton, so that its last line may be a part of one.
    """
    whole = outline.rpartition("\n")[0] if cut_off else outline
    points: list[Point] = []
    for digits, line in _POINT.findall(whole):
        number, heading = int(digits), line.replace("**", "").strip().rstrip(" .:;,")
        if heading and all(
            number != other.number and heading.casefold() != other.heading.casefold()
            for other in points
        ):
            points.append(Point(number, heading))
    return points[:MOST_POINTS]


def concatenated(
    points: Sequence[Point], texts: Sequence[str], count_tokens: Callable[[str], int]
) -> Tree:
    """Return the answer: every point and its text on lines of their own, the texts as chunks."""
    numbers = {point.number for point in points}
    nodes: list[Node] = []
    main = ""
    for point, text in zip(points, texts, strict=True):
        main += "\n" * bool(nodes or main) + point.text
        if body := until_next_point(text, numbers - {point.number}).strip():
            tokens = valid_tokens(count_tokens(body))
            nodes += [Span(f"{main}: "), Chunk(valid_topic(point.heading), tokens, body)]
            main = ""
    return (*nodes, Span(main)) if main else tuple(nodes)


def until_next_point(text: str, others: Collection[int]) -> str:
    """Return the text of one point, without what it says of others behind its first line."""
    for found in _NEXT_POINT.finditer(text):
        if int(found[1]) in others:
            return text[: found.start()]
    return text


def widths_beside(steps: Sequence[int]) -> dict[int, int]:
    """Return how many steps have how many live threads, of threads that begin together."""
    widths = Counter(sum(own > step for own in steps) for step in range(max(steps)))
    return dict(sorted(widths.items()))


def behind(skeleton: Answer, record: Record, *, requests: int) -> Record:
    """Return the record of an answer whose `requests` had to wait for `skeleton`.

    Their prefill is one step, as wide as they are many.
    """
    widths = Counter(record.widths)
    widths[1] += skeleton.critical_path
    widths[requests] += 1
    later_s = skeleton.seconds
    return replace(
        record,
        critical_path=skeleton.critical_path + 1 + record.critical_path,
        fed_tokens=skeleton.fed_tokens + record.fed_tokens,
        prompt_tokens=skeleton.trace.prefilled_tokens + record.prompt_tokens,
        widths=dict(sorted(widths.items())),
        interventions=skeleton.overruled + record.interventions,
        first_token_s=skeleton.first_token_s,
        first_text_s=None if record.first_text_s is None else later_s + record.first_text_s,
        last_text_s=None if record.last_text_s is None else later_s + record.last_text_s,
    )
