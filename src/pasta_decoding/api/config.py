"""How an answer is written, and on what: `GenerationConfig` and `EngineConfig`.

Every door (Python, command line, server, harness, llm plugin, transformers) converts into these
two at its edge. Both check themselves when they are made. A field's annotation holds its help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any

from pasta_decoding.answer.request import Rules, SamplingParams
from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining

DTYPES = (
    "auto", "float32", "bfloat16", "float16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0",
)  # fmt: skip
"""Number formats of weights; those with a Q are llama.cpp's."""

_Check = tuple[type, Callable[[Any], bool], str]
_BIAS: _Check = (Real, lambda value: -100 <= value <= 100, "a number from -100 to 100")
_CHECKS: Mapping[str, _Check] = {
    **dict.fromkeys(
        ("max_tokens", "max_threads", "top_k", "max_model_len", "cache_tokens", "threads"),
        (Integral, lambda value: value >= 1, "a whole number of at least 1"),
    ),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"),
        (Real, lambda value: -2 <= value <= 2, "a number from -2 to 2"),
    ),
    "seed": (Integral, lambda value: value >= 0, "a whole number of at least 0"),
    "temperature": (Real, lambda value: 0 <= value <= 100, "a number from 0 to 100"),
    "top_p": (Real, lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": (Real, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (Real, lambda value: 0 < value <= 2, "a number above 0 and at most 2"),
    "max_seconds": (Real, lambda value: value >= 0, "a number of at least 0"),
    "eagerness": _BIAS,
    "parallel": (bool, lambda _value: True, "true or false"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How one answer is written. Raises PastaError for a value of a wrong type or out of range."""

    max_tokens: Annotated[int, "Maximum tokens of the answer, tags included."] = 512
    temperature: Annotated[float, "Sampling temperature; 0 is greedy."] = 0.0
    top_p: Annotated[float, "Nucleus sampling (top-p)."] = 1.0
    top_k: Annotated[int | None, "Sample from the likeliest tokens only (top-k)."] = None
    min_p: Annotated[float, "Minimum probability, as a share of the likeliest (min-p)."] = 0.0
    repetition_penalty: Annotated[
        float, "Penalty for tokens already in the prompt or answer (1 = off)."
    ] = 1.0
    presence_penalty: Annotated[float, "Penalty for tokens already in the answer (0 = off)."] = 0.0
    frequency_penalty: Annotated[
        float, "Penalty for each time that a token is already in the answer (0 = off)."
    ] = 0.0
    logit_bias: Mapping[int, float] | Mapping[str, float] = field(default_factory=dict)
    seed: Annotated[int, "The same seed gives the same answer."] = 0
    parallel: Annotated[bool, "False bans promises: the same weights write one thread."] = True
    stop: Annotated[str | Sequence[str], "End the text before this string."] = ()
    max_seconds: Annotated[float | None, "Time limit of the answer, waiting included."] = None
    max_threads: Annotated[int, "Threads that may write at the same time."] = 32
    eagerness: Annotated[float | None, "Added to the promise's logit; 0 is as trained."] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        _check(self)

    def updated(self, **options: Any) -> GenerationConfig:
        """Return a copy with some fields replaced. Raises PastaError for an unknown name."""
        check_names(GenerationConfig, options)
        return replace(self, **options)

    @property
    def rules(self) -> Rules:
        return Rules(**self._shared(Rules))

    def sampling(self, *, logprobs: int | None = None) -> SamplingParams:
        """Return how tokens are chosen; `logprobs` is how many alternatives are reported."""
        return SamplingParams(**self._shared(SamplingParams), logprobs=logprobs)

    def _shared(self, kind: type[Any]) -> dict[str, Any]:
        names = [one.name for one in fields(kind) if hasattr(self, one.name)]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which checkpoint, on which engine. Raises PastaError for invalid values.

    adapter:  None takes that of a known base model (`pasta models`), and none for another one.
    model:    None takes the adapter's, or the default one. It or `adapter` may name a whole model
              (a GGUF file or a merged folder that `pasta export` wrote); the other is None then.
    engine:   "auto" asks the servers of `base_url` if there are any, takes torch on a GPU, and on a
              CPU fast for a GGUF file, else the first of llama, fast and torch that can run it.
    join:     kv reuses the keys and values of finished chunks, text reads them again.
    dtype:    "auto" is float16 for llama; bfloat16 for torch where it is native.
    base_url: servers that hold the merged checkpoint; several are replicas.
    """

    adapter: Annotated[str | None, "Name or folder; `none` for the model alone."] = None
    model: Annotated[Path | None, "Base or merged model: folder, hub name or GGUF file."] = None
    engine: Annotated[str, "auto, fast, torch, llama or remote."] = "auto"
    join: Annotated[Joining | None, "How the main thread reads chunks; else as trained."] = None
    dtype: Annotated[
        str, "auto, float32, bfloat16; llama: float16, Q8_0, Q6_K, Q5_K_M, Q4_K_M, Q4_0."
    ] = "auto"
    max_model_len: Annotated[int | None, "Context length of a request; else the model's."] = None
    cache_tokens: Annotated[int, "Size of the KV cache in tokens, all requests together."] = (
        DEFAULT_CACHE_TOKENS
    )
    threads: Annotated[int | None, "Processor threads; all cores if left out."] = None
    device: Annotated[str | None, "cpu, cuda, cuda:1, ...; the first GPU if there is one."] = None
    base_url: Annotated[tuple[str, ...], "remote: a server's URL, such as http://host/v1."] = ()
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None:
            object.__setattr__(self, "adapter", str(self.adapter))
        if self.model is not None:
            object.__setattr__(self, "model", Path(self.model))
        urls = (self.base_url,) if isinstance(self.base_url, str) else tuple(self.base_url)
        object.__setattr__(self, "base_url", urls)
        if self.join is not None:
            object.__setattr__(self, "join", Joining(check_name("join", self.join, list(Joining))))
        check_name("dtype", self.dtype, DTYPES)
        _check(self)

    @property
    def is_remote(self) -> bool:
        return self.engine == "remote" or (self.engine == "auto" and bool(self.base_url))


def _check(config: GenerationConfig | EngineConfig) -> None:
    for one in fields(config):
        value = getattr(config, one.name)
        if one.name in _CHECKS and not (value is None and one.default is None):
            _check_value(one.name, value, _CHECKS[one.name])


def _check_value(name: str, value: object, check: _Check) -> None:
    kind, in_range, meaning = check
    is_truth = isinstance(value, bool)
    if not isinstance(value, kind) or is_truth != (kind is bool) or not in_range(value):
        raise PastaError(f"{name} is {value!r}, not {meaning}", field=name)


def check_names(kind: type, given: Mapping[str, Any]) -> None:
    known = [one.name for one in fields(kind)]
    for name in given:
        check_name("option", name, known)


def check_name(what: str, name: str, known: Sequence[str]) -> str:
    """Return the name. Raises PastaError with the nearest known one if it is unknown."""
    if name not in known:
        near = get_close_matches(str(name), known, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise PastaError(f"no {what} {name!r}: {remedy}", field=what)
    return name


def _stops(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(stops, Sequence) or not all(isinstance(one, str) for one in stops):
        raise PastaError(f"stop is {stop!r}, not a string or several", field="stop")
    if "" in stops:
        raise PastaError("a stop string is empty", field="stop")
    return tuple(stops)


def _biases(biases: Any) -> dict[int, float]:
    try:
        found = {int(token): bias for token, bias in (biases or {}).items()}
    except (AttributeError, TypeError, ValueError):
        message = f"logit_bias is {biases!r}, not a number for each token id"
        raise PastaError(message, field="logit_bias") from None
    for bias in found.values():
        _check_value("logit_bias", bias, _BIAS)
    return found
