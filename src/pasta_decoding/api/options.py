"""What may be said of one answer, and the prompts that it may be asked with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypedDict

from pasta_decoding.errors import PastaError
from pasta_decoding.models.prompt import Message
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.runtime.sampling import Sampling

Prompt = str | Sequence[Mapping[str, str] | Message]
"""A question, or a conversation as OpenAI's API has it: role and content of each message."""

DEFAULT_MAX_TOKENS = 512


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
    logit_bias:  token id -> what is added to its logit; none.
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


def check_options(options: Options) -> None:
    """Raise PastaError for an unknown option, naming the nearest one, and for one out of range."""
    known = list(Options.__annotations__)
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Known are: {', '.join(known)}."
            raise PastaError(f"no option {name!r}", hint=hint)
    rules_of(options)
    sampling_of(options)
    stops_of(options)


def rules_of(options: Options) -> Rules:
    """Return how far an answer may go. Raises PastaError for limits that leave nothing."""
    max_tokens = options.get("max_tokens", DEFAULT_MAX_TOKENS)
    max_threads = options.get("max_threads", Rules().max_threads)
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
    default = Sampling()
    return Sampling(
        temperature=options.get("temperature", default.temperature),
        top_p=options.get("top_p", default.top_p),
        top_k=options.get("top_k", default.top_k),
        min_p=options.get("min_p", default.min_p),
        repetition_penalty=options.get("repetition_penalty", default.repetition_penalty),
        presence_penalty=options.get("presence_penalty", default.presence_penalty),
        frequency_penalty=options.get("frequency_penalty", default.frequency_penalty),
        logit_bias=options.get("logit_bias", default.logit_bias),
        seed=options.get("seed", default.seed),
    )


def stops_of(options: Options) -> tuple[str, ...]:
    """Return the stop strings. Raises PastaError for an empty one."""
    stop = options.get("stop", ())
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
