"""How an answer is written, and on what: `GenerationConfig` and `EngineConfig`.

Python, the command line, the server, the harness, the llm plugin and transformers all convert their
settings into these two classes. Both check their values when they are made, and look at no files.
The annotation of a field holds its help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, cast

from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.engines import DEFAULT_CACHE_TOKENS
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining

DTYPES = (
    *("auto", "float32", "bfloat16", "float16"),
    *("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0"),
)
"""Number formats of weights; those with a Q are llama.cpp's."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The values that a field takes: their type, a condition, and both in words for errors."""

    kind: type
    contains: Callable[[Any], bool]
    description: str


_COUNT = ValueRange(Integral, lambda value: value >= 1, "a whole number of at least 1")
_PENALTY = ValueRange(Real, lambda value: -2 <= value <= 2, "a number from -2 to 2")
_BIAS = ValueRange(Real, lambda value: -100 <= value <= 100, "a number from -100 to 100")
_RANGES: Mapping[str, ValueRange] = {
    "max_tokens": _COUNT,
    "max_threads": _COUNT,
    "top_k": _COUNT,
    "max_model_len": _COUNT,
    "cache_tokens": _COUNT,
    "threads": _COUNT,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "eagerness": _BIAS,
    "seed": ValueRange(Integral, lambda value: value >= 0, "a whole number of at least 0"),
    "temperature": ValueRange(Real, lambda value: 0 <= value <= 100, "a number from 0 to 100"),
    "top_p": ValueRange(Real, lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "min_p": ValueRange(Real, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": ValueRange(
        Real, lambda value: 0.01 <= value <= 2, "a number from 0.01 to 2"
    ),
    "max_seconds": ValueRange(Real, lambda value: value >= 0, "a number of at least 0"),
    "parallel": ValueRange(bool, lambda _value: True, "true or false"),
}
"""The ranges of the fields of both classes, by name. A field whose default is None may be None."""


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
    parallel: Annotated[bool, "False: the adapter's baseline writes one thread."] = True
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
        """How far an answer may go."""
        return Rules(
            max_tokens=self.max_tokens,
            max_threads=self.max_threads,
            parallel=self.parallel,
            eagerness=self.eagerness,
            stop=tuple(self.stop),
            max_seconds=self.max_seconds,
        )

    def sampling(self, *, logprobs: int | None = None) -> SamplingParams:
        """Return how tokens are chosen; `logprobs` is how many alternatives are reported.

        A temperature between 0 and 0.01 counts as 0.01, as in vLLM: below, float32 overflows.
        """
        return SamplingParams(
            temperature=max(self.temperature, 0.01) if self.temperature else 0.0,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=cast("Mapping[int, float]", self.logit_bias),  # by `__post_init__`
            logprobs=logprobs,
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which checkpoint, on which engine. Raises PastaError for invalid values.

    adapter, model: as `models.catalog.resolve` reads them.
    engine:   "auto" asks the servers of `base_url` if there are any. It takes torch on a GPU. On a
              CPU it takes fast for a GGUF file, else the first of llama, fast and torch that can
              run the model.
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
    for option in fields(config):
        value = getattr(config, option.name)
        may_be_none = option.default is None
        if option.name in _RANGES and not (value is None and may_be_none):
            _check_value(option.name, value, _RANGES[option.name])


def _check_value(name: str, value: object, value_range: ValueRange) -> None:
    is_truth = isinstance(value, bool)
    wants_truth = value_range.kind is bool
    has_kind = isinstance(value, value_range.kind) and is_truth == wants_truth
    if not has_kind or not value_range.contains(value):
        raise PastaError(f"{name} is {value!r}, not {value_range.description}", field=name)


def check_names(config_class: type, options: Mapping[str, Any]) -> None:
    """Raise PastaError for an option that is no field of the class."""
    names = [option.name for option in fields(config_class)]
    for name in options:
        check_name("option", name, names)


def check_name(what: str, name: str, names: Sequence[str]) -> str:
    """Return `name`. Raises PastaError with the nearest one of `names` if it is none of them."""
    if name not in names:
        near = get_close_matches(str(name), names, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
        raise PastaError(f"no {what} {name!r}: {remedy}", field=what)
    return name


def _stops(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        stops: object = (stop,)
    else:
        stops = () if stop is None else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise PastaError(f"stop is {stop!r}, not a string or several", field="stop")
    if "" in stops:
        raise PastaError("a stop string is empty", field="stop")
    return tuple(stops)


def _biases(biases: Any) -> dict[int, float]:
    """Return the biases by token id, which may be given as text."""
    try:
        bias_by_token = {int(token): bias for token, bias in (biases or {}).items()}
    except (AttributeError, TypeError, ValueError):
        message = f"logit_bias is {biases!r}, not a number for each token id"
        raise PastaError(message, field="logit_bias") from None
    for bias in bias_by_token.values():
        _check_value("logit_bias", bias, _BIAS)
    return bias_by_token
