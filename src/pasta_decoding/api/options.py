"""What may be said of one answer, and the prompts that it may be asked with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

from typer import Option

from pasta_decoding.errors import PastaError
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.rules import Rules

if TYPE_CHECKING:
    from pasta_decoding.runtime.sampling import Sampling

Prompt = str | Sequence[Mapping[str, str] | Message]
"""A question, or a conversation as OpenAI's API has it: role and content of each message."""


_LIMITS = Rules()


class Options(TypedDict, total=False):
    """What may be said of one answer; each has a default.

    max_tokens:  tokens behind the prompt, all threads together, tags included; 512.
    temperature: 0, the default, is greedy.
    top_p:       share of the probability that is sampled from; 1.
    top_k:       how many of the likeliest tokens are sampled from; None: all.
    min_p:       tokens are kept that have this share of the likeliest one's probability; 0.
    repetition_penalty: what was said or asked is divided by it; 1.
    presence_penalty, frequency_penalty: taken from the logits of what was said, once or as often
                 as it was; 0.
    logit_bias:  token id -> what is added to its logit; none. Ids may be texts, as JSON has them.
    seed:        of the noise; 0. The same seed gives the same answer, whoever else is there.
    parallel:    False bans promises: sequential decoding with the same weights. True.
    stop:        a string, or several, before which the text ends; none.
    max_seconds: limit on the wall clock, time in the queue included; None: no limit.
    max_threads: threads that write at the same time; 32.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    parallel: bool
    stop: str | Sequence[str]
    max_seconds: float | None
    max_threads: int


MaxTokens = Annotated[
    int, Option(min=1, help="End the answer after so many tokens, tags included.")
]


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """The defaults of `Options`, which are the commands' options, too."""

    max_tokens: MaxTokens = _LIMITS.max_tokens
    max_threads: Annotated[
        int, Option(min=1, help="Let so many threads write at a time, at most.")
    ] = _LIMITS.max_threads
    max_seconds: Annotated[
        float | None, Option(min=0, help="Stop after so long; what is written stays.")
    ] = None
    temperature: Annotated[
        float, Option(help="How freely tokens are drawn; 0 takes the likeliest.")
    ] = 0.0
    top_p: Annotated[
        float, Option(help="Draw from the likeliest tokens that make up this probability.")
    ] = 1.0
    top_k: Annotated[int | None, Option(help="Draw from so many likeliest tokens.")] = None
    min_p: Annotated[
        float, Option(help="Draw from tokens with this share of the likeliest's probability.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Option(help="Above 1: what was said, or asked, comes again less easily.")
    ] = 1.0
    presence_penalty: Annotated[
        float, Option(help="Above 0: what was said comes again less easily.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option(help="Above 0: the more often it was said, the less easily.")
    ] = 0.0
    seed: Annotated[int, Option(min=0, help="The same seed gives the same answer.")] = 0

    def options(self, *, parallel: bool = True) -> Options:
        """Return them as a model takes them. Raises PastaError for what is out of range."""
        options = Options(**cast(Options, asdict(self)), parallel=parallel)
        check_options(options)
        return options


_DEFAULT = AnswerSettings()


def check_options(options: Options) -> None:
    """Raise PastaError for an unknown option, naming the nearest one, and for one out of range."""
    known = list(Options.__annotations__)
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known are: {', '.join(known)}."
            raise PastaError(f"no option {name!r}", hint=hint)
        _check_type(name, options[name])  # type: ignore[literal-required]
    rules_of(options)
    sampling_of(options)
    stops_of(options)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def _is_truth(value: object) -> bool:
    return isinstance(value, bool)


def _are_stops(value: object) -> bool:
    several = isinstance(value, Sequence) and all(isinstance(one, str) for one in value)
    return isinstance(value, str) or several


def _are_biases(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        (_is_whole(token) or (isinstance(token, str) and token.isdecimal())) and _is_number(bias)
        for token, bias in value.items()
    )


_KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("max_tokens", "max_threads", "seed"), (_is_whole, "a whole number")),
    "top_k": (_is_whole, "a whole number, or None"),
    "max_seconds": (_is_number, "a number of seconds, or None"),
    "parallel": (_is_truth, "True or False"),
    "stop": (_are_stops, "a string, or several"),
    "logit_bias": (_are_biases, "token ids, and what is added to the logit of each"),
}
_MAY_BE_NONE = ("top_k", "max_seconds", "stop", "logit_bias")


def _check_type(name: str, value: object) -> None:
    """Raise PastaError for a value of another type than `Options` has, or that is no number."""
    fits, meaning = _KINDS.get(name, (_is_number, "a number"))
    if not fits(value) and not (value is None and name in _MAY_BE_NONE):
        raise PastaError(f"{name} is {value!r}", hint=f"It is {meaning}.")


def rules_of(options: Options) -> Rules:
    """Return how far an answer may go. Raises PastaError for limits that leave nothing."""
    max_tokens = options.get("max_tokens", _DEFAULT.max_tokens)
    max_threads = options.get("max_threads", _DEFAULT.max_threads)
    for name, value in (("max_tokens", max_tokens), ("max_threads", max_threads)):
        if value < 1:
            raise PastaError(f"{name} is {value}", hint="It is at least 1.")
    seconds = options.get("max_seconds")
    if seconds is not None and seconds < 0:
        raise PastaError(f"max_seconds is {seconds}", hint="It is at least 0.")
    parallel = options.get("parallel", True)
    return Rules(max_tokens=max_tokens, max_threads=max_threads, parallel=parallel)


def sampling_of(options: Options) -> Sampling:
    """Return how tokens are chosen. Raises PastaError for what is out of range."""
    from pasta_decoding.runtime.sampling import Sampling

    told: dict[str, Any] = asdict(_DEFAULT) | dict(options)
    bias = options.get("logit_bias") or {}
    told["logit_bias"] = {int(token): float(one) for token, one in bias.items()}
    return Sampling(**{one.name: told[one.name] for one in fields(Sampling) if one.name in told})


def stops_of(options: Options) -> tuple[str, ...]:
    """Return the stop strings. Raises PastaError for an empty one."""
    stop = options.get("stop", ())
    stop = () if stop is None else stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise PastaError("a stop string is empty", hint="Leave it out.")
    return stops


def messages_of(prompt: Prompt) -> list[Message]:
    """Return a prompt as a conversation. Raises PastaError for what is none.

    Roles and order are checked where it is encoded.
    """
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    return [_message(one) for one in prompt]


def _message(one: Mapping[str, str] | Message) -> Message:
    if isinstance(one, Message):
        return one
    try:
        role, content = one["role"], one["content"]
    except (KeyError, TypeError) as error:
        raise PastaError(
            f"{one!r} is no message", hint='One looks like {"role": "user", "content": "Why ...?"}.'
        ) from error
    if not isinstance(role, str) or not isinstance(content, str):
        raise PastaError(f"{one!r} is no message", hint="Role and content are strings.")
    return Message(role, content)
