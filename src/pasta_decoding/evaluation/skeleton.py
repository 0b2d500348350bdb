"""Skeleton-of-Thought (Ning et al., ICLR 2024, arXiv 2307.15337) on our engines.

First the model writes a skeleton: a numbered list of points of a few words, begun with "1." as the
paper does for open models. Then a request for each point, begun with the point itself, expands it,
all side by side. The answer is their concatenation. The paper's router (SoT-R) is left out. The
prompts say what the paper's say, with two worked skeletons, which small models need.

The requests for points share one prefill, which is one step:

    critical path = tokens of the skeleton + 1 + tokens of the longest point

Without two points we ask for the plain answer, and count the steps of the skeleton as well.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request, Rules, SamplingParams
from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import Question
from pasta_decoding.evaluation.methods import Ask, of_question
from pasta_decoding.evaluation.records import Record, record_of
from pasta_decoding.lang.measures import repetitions
from pasta_decoding.lang.tree import (
    Chunk,
    Node,
    Span,
    Tree,
    strip,
    text_form,
    valid_tokens,
    valid_topic,
)
from pasta_decoding.scheduling.asking import DecodingTask
from pasta_decoding.scheduling.decoder import LocalDecoder

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


def ask_skeleton(
    decoder: LocalDecoder, config: GenerationConfig, question: Question, ask: Ask
) -> DecodingTask[Record]:
    """Ask for the skeleton, then for all points; plainly if there are no two points.

    `config.max_tokens` are of skeleton and points together; each point gets an equal share of what
    the skeleton leaves. A plain answer in their place may have all of them.
    """
    asked, sampling = question.instruction, of_question(config, question)
    most = max(1, int(config.max_tokens * SKELETON_SHARE))
    ends = ("\nQuestion:", *_beginnings([1, MOST_POINTS + 1]))  # another list, or too long a one
    rules = Rules(max_tokens=most, parallel=False, stop=ends)
    outlining = _begun(decoder, SKELETON.format(question=asked), BEGUN, rules, sampling)
    [skeleton] = yield from ask([outlining])
    points = points_of(f"{BEGUN}{skeleton.text}", cut_off=skeleton.hit_limit)
    if len(points) >= 2:
        most = max(1, (config.max_tokens - skeleton.fed_tokens) // len(points))
        outline = "\n".join(f"{number}. {heading}" for number, heading in points.items())
        requests = [
            _begun(
                decoder,
                POINT.format(question=asked, skeleton=outline, number=number),
                f"{number}. {heading}:",
                replace(rules, max_tokens=most, stop=_beginnings(points.keys() - {number})),
                of_question(config, question, number),
            )
            for number, heading in points.items()
        ]
        answers = yield from ask(requests)
        record = _record_of_points(decoder, question, points, answers)
    else:
        alone = replace(config.rules, parallel=False)
        [plain] = yield from ask([decoder.request(asked, alone, sampling)])
        record = record_of(decoder, question, plain)
    return replace(  # all of it waited for the skeleton, and its prefill is one step more
        record,
        critical_path=skeleton.critical_path + 1 + record.critical_path,
        fed_tokens=skeleton.fed_tokens + record.fed_tokens,
        interventions=skeleton.interventions + record.interventions,
    )


def _beginnings(numbers: Iterable[int]) -> tuple[str, ...]:
    """Return how lines begin that are one of these points."""
    return tuple(f"\n{mark}{n}{end}" for n in numbers for mark in ("", "**", "- ") for end in ".)")


def _begun(
    decoder: LocalDecoder, text: str, begun: str, rules: Rules, sampling: SamplingParams
) -> Request:
    """Return the request that answers `text` with an answer that has been begun."""
    started = tuple(decoder.encoder.encode_text(begun))
    prompt = decoder.prompt_ids(text, rules.max_tokens + len(started))
    return Request(prompt + started, Sampler(sampling), rules)


def _record_of_points(
    decoder: LocalDecoder, question: Question, points: dict[int, str], answers: Sequence[Answer]
) -> Record:
    """Return the record of the second stage, as if it were all."""
    tree = concatenated(points, [one.text for one in answers], decoder.plain_tokens)
    text = strip(tree)
    return Record(
        **asdict(question),
        text=text,
        annotated=text_form(tree),
        plain_tokens=decoder.plain_tokens(text),
        critical_path=max(answer.critical_path for answer in answers),
        fed_tokens=sum(answer.fed_tokens for answer in answers),
        chunks=sum(isinstance(node, Chunk) for node in tree),
        interventions=sum(answer.interventions for answer in answers),
        repeated_chunks=len(repetitions(tree)),
        truncated_chunks=sum(answer.hit_limit for answer in answers),
        hit_limit=any(answer.hit_limit for answer in answers),
    )


def points_of(outline: str, *, cut_off: bool = False) -> dict[int, str]:
    """Return the headings of a skeleton's points by their numbers, which rise; at most ten.

    cut_off: a limit ended the skeleton, so that its last line may be a part of one.
    """
    whole = outline.rpartition("\n")[0] if cut_off else outline
    points: dict[int, str] = {}
    last = -1
    for digits, line in _POINT.findall(whole):
        number, heading = int(digits), line.replace("**", "").strip().rstrip(" .:;,")
        if number <= last:
            break
        last = number
        known = {one.casefold() for one in ("", *points.values())}
        if heading.casefold() not in known and len(points) < MOST_POINTS:
            points[number] = heading
    return points


def concatenated(
    points: dict[int, str], texts: Sequence[str], count_tokens: Callable[[str], int]
) -> Tree:
    """Return the answer: every point and its text on lines of their own, the texts as chunks."""
    nodes: list[Node] = []
    main = ""
    for (number, heading), text in zip(points.items(), texts, strict=True):
        main += f"\n{number}. {heading}" if nodes or main else f"{number}. {heading}"
        ends = _beginnings(points.keys() - {number})  # a text still holds the one that ended it
        if body := min((text.partition(end)[0] for end in ends), key=len).strip():
            tokens = valid_tokens(count_tokens(body))
            nodes += [Span(f"{main}: "), Chunk(valid_topic(heading), tokens, body)]
            main = ""
    return (*nodes, Span(main)) if main else tuple(nodes)
