"""Skeleton-of-Thought (Ning et al., ICLR 2024, arXiv 2307.15337) on our engines.

First the model writes a skeleton: a numbered list of points of a few words each. Its answer is
started with "1.", as in the paper for open models. Then one request a point expands that point, all
of them side by side; each answer is started with the point itself. The whole answer is their
concatenation. The paper's router (SoT-R) is left out. Our prompts ask for the same as the paper's;
the two example skeletons are there for small models.

The requests for points share one prefill, which counts as one step:

    critical path = tokens of the skeleton + 1 + tokens of the longest point

If the skeleton has fewer than two points, a plain answer takes the place of the points. The steps
of the skeleton count as well.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import Question
from pasta_decoding.evaluation.ask import Ask, question_sampling
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

OUTLINE_START = "1."
OUTLINE_PROMPT = """\
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
POINT_PROMPT = """\
{question}

The outline of the answer:
{outline}

Write one or two sentences about point {number} only."""
MAX_POINTS = 10
SKELETON_SHARE = 1 / 3  # of the answer's tokens; ten points of five words need about a hundred

_POINT = re.compile(r"^[ \t*#-]*(\d{1,2})[.)][ \t*]*(\S.*)$", re.MULTILINE)


def ask_skeleton(
    decoder: LocalDecoder, config: GenerationConfig, question: Question, ask: Ask
) -> DecodingTask[Record]:
    """Ask for the skeleton, then for all points, or for a plain answer if there are fewer than two.

    Skeleton and points have `config.max_tokens` together; the points get equal shares of the tokens
    that the skeleton leaves. A plain answer has `config.max_tokens` by itself.
    """
    [skeleton] = yield from ask([_skeleton_request(decoder, config, question)])
    points = points_of(f"{OUTLINE_START}{skeleton.text}", cut_off=skeleton.hit_limit)
    if len(points) >= 2:
        max_point_tokens = max(1, (config.max_tokens - skeleton.fed_tokens) // len(points))
        requests = _point_requests(decoder, config, question, points, max_point_tokens)
        answers = yield from ask(requests)
        record = _record_of_points(decoder, question, points, answers)
    else:
        sequential = replace(config.rules, parallel=False)
        sampling = question_sampling(config, question)
        [answer] = yield from ask([decoder.request(question.instruction, sequential, sampling)])
        record = record_of(decoder, question, answer)
    return replace(
        record,
        # The second stage waited for the skeleton, and its prefill is one more step.
        critical_path=skeleton.critical_path + 1 + record.critical_path,
        fed_tokens=skeleton.fed_tokens + record.fed_tokens,
        interventions=skeleton.interventions + record.interventions,
    )


def _skeleton_request(
    decoder: LocalDecoder, config: GenerationConfig, question: Question
) -> Request:
    max_tokens = max(1, int(config.max_tokens * SKELETON_SHARE))
    # Stop where the model begins another question, another list, or too many points.
    stop = ("\nQuestion:", *_line_starts([1, MAX_POINTS + 1]))
    rules = Rules(max_tokens=max_tokens, parallel=False, stop=stop)
    prompt = OUTLINE_PROMPT.format(question=question.instruction)
    sampling = question_sampling(config, question)
    return _started_request(decoder, prompt, OUTLINE_START, rules, sampling)


def _point_requests(
    decoder: LocalDecoder,
    config: GenerationConfig,
    question: Question,
    points: Mapping[int, str],
    max_point_tokens: int,
) -> list[Request]:
    """Return one request a point. Its answer ends where the model begins another point."""
    outline = "\n".join(f"{number}. {heading}" for number, heading in points.items())
    requests = []
    for number, heading in points.items():
        prompt = POINT_PROMPT.format(question=question.instruction, outline=outline, number=number)
        stop = _line_starts(points.keys() - {number})
        rules = Rules(max_tokens=max_point_tokens, parallel=False, stop=stop)
        sampling = question_sampling(config, question, number)
        start = f"{number}. {heading}:"
        requests.append(_started_request(decoder, prompt, start, rules, sampling))
    return requests


def _line_starts(numbers: Iterable[int]) -> tuple[str, ...]:
    """Return the ways in which a line of one of these points begins, each after a line break."""
    return tuple(
        f"\n{mark}{number}{closing}"
        for number in numbers
        for mark in ("", "**", "- ")
        for closing in ".)"
    )


def _started_request(
    decoder: LocalDecoder, text: str, start: str, rules: Rules, sampling: SamplingParams
) -> Request:
    """Return a request for an answer to `text` of which the prompt already holds the start."""
    start_ids = tuple(decoder.encoder.encode_text(start))
    prompt = decoder.prompt_ids(text, rules.max_tokens + len(start_ids))
    return Request(prompt + start_ids, Sampler(sampling), rules)


def _record_of_points(
    decoder: LocalDecoder, question: Question, points: Mapping[int, str], answers: Sequence[Answer]
) -> Record:
    """Return the record of the second stage alone."""
    tree = concatenated(points, [answer.text for answer in answers], decoder.plain_tokens)
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
    """Return the headings of a skeleton's points by number: the first ten that differ.

    Numbers must rise: a point with a lower number ends the list.

    cut_off: a limit ended the skeleton. Its last line may be incomplete and is left out.
    """
    complete_lines = outline.rpartition("\n")[0] if cut_off else outline
    points: dict[int, str] = {}
    seen_headings = {""}
    last_number = -1
    for digits, line in _POINT.findall(complete_lines):
        number = int(digits)
        if number <= last_number:
            break
        last_number = number
        heading = line.replace("**", "").strip().rstrip(" .:;,")
        if heading.casefold() not in seen_headings and len(points) < MAX_POINTS:
            points[number] = heading
            seen_headings.add(heading.casefold())
    return points


def concatenated(
    points: Mapping[int, str], texts: Sequence[str], count_tokens: Callable[[str], int]
) -> Tree:
    """Return the answer: each point on a line of its own, its text as a chunk after the heading.

    A point without a text has no chunk. `texts` are in the order of the points.
    """
    nodes: list[Node] = []
    main_text = ""  # the headings after the last chunk
    for (number, heading), text in zip(points.items(), texts, strict=True):
        if nodes or main_text:
            main_text += "\n"
        main_text += f"{number}. {heading}"
        other_points = _line_starts(points.keys() - {number})
        if body := _text_before(text, other_points).strip():
            nodes.append(Span(f"{main_text}: "))
            nodes.append(Chunk(valid_topic(heading), valid_tokens(count_tokens(body)), body))
            main_text = ""
    if main_text:
        nodes.append(Span(main_text))
    return tuple(nodes)


def _text_before(text: str, ends: Iterable[str]) -> str:
    """Return `text` up to the first of `ends`: the text of an answer holds its stop string."""
    for end in ends:
        text = text.partition(end)[0]
    return text
