"""The methods of `eval generate`: how the command names them, and how each is made.

A method answers a question by a generator, which returns the record of the question. It reads no
clock. The same lines run alone, for timing, and together with other questions, for throughput.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.ask import Ask, question_sampling
from pasta_decoding.evaluation.hf import LOOKUP_TOKENS, ask_transformers, unpatched_model
from pasta_decoding.evaluation.records import Record, record_of
from pasta_decoding.evaluation.skeleton import ask_skeleton
from pasta_decoding.models.bases import BASES, DEFAULT_MODEL, BaseModel
from pasta_decoding.models.catalog import NO_ADAPTER, known_model
from pasta_decoding.scheduling.asking import DecodingTask
from pasta_decoding.scheduling.decoder import Decoder, LocalDecoder

METHOD_NAMES = ("sequential", "pasta", "sot", "apar", "hf", "lookup")
PARALLEL_METHODS = ("pasta", "apar")
"""Methods that need an adapter which was trained to write promises."""
TRANSFORMERS_METHODS = ("hf", "lookup")
"""Methods that transformers' own `generate` computes."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to answer with a model. `ask` raises PastaError for a question it cannot ask."""

    decoder: Decoder
    ask: Callable[[Question, Ask], DecodingTask[Record]]


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """One --method: its name and adapter, and the label of its run folder."""

    name: str
    adapter: str
    label: str


def choose_methods(
    texts: Sequence[str], model: Path | None = None, *, remote: bool = False
) -> list[MethodChoice]:
    """Read every --method. Raises PastaError for methods that do not go together.

    remote: the methods are for servers, which cannot run some of them.
    """
    base = known_model(model) or BASES[DEFAULT_MODEL]
    choices = [_method_choice(text, base) for text in texts]
    labels = [choice.label for choice in choices]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise PastaError(f"--method is given twice for the folder {twice[0]!r}")
    if remote:
        _refuse_for_servers(choices)
    return choices


def _method_choice(text: str, base: BaseModel) -> MethodChoice:
    name, equals_sign, adapter = text.partition("=")
    if name not in METHOD_NAMES or (equals_sign and not adapter):
        raise PastaError(f"--method {text!r} is none of {', '.join(METHOD_NAMES)}, or NAME=ADAPTER")
    if not adapter:
        if name == "apar":
            raise PastaError("no adapter of apar ships: name yours, --method apar=FOLDER")
        shipped_adapter = base.adapter if name == "pasta" else base.baseline
        return MethodChoice(name, shipped_adapter, label=name)
    if adapter == NO_ADAPTER and name in PARALLEL_METHODS:
        raise PastaError(f"{name} needs an adapter")
    return MethodChoice(name, adapter, label=f"{name}-{Path(adapter).name}")


def _refuse_for_servers(choices: Sequence[MethodChoice]) -> None:
    for choice in choices:
        if choice.name == "sot" or choice.name in TRANSFORMERS_METHODS:
            raise PastaError(f"--method {choice.name} works in this process, not on servers")
    adapters = sorted({choice.adapter for choice in choices})
    if len(adapters) > 1:
        raise PastaError(
            f"the servers have one checkpoint, and methods differ in theirs: {', '.join(adapters)}"
        )


def make_method(name: str, decoder: Decoder, config: GenerationConfig) -> Method:
    """Return a method. Those of `TRANSFORMERS_METHODS` need a decoder with a `TorchEngine`."""
    if name == "sequential" or name in PARALLEL_METHODS:
        method_config = replace(config, parallel=name in PARALLEL_METHODS)
        return Method(decoder, partial(ask_pasta, decoder, method_config))
    assert isinstance(decoder, LocalDecoder), "refused before"
    if name == "sot":
        return Method(decoder, partial(ask_skeleton, decoder, config))
    model = unpatched_model(decoder)
    lookup_tokens = LOOKUP_TOKENS if name == "lookup" else None
    return Method(decoder, partial(ask_transformers, decoder, model, lookup_tokens, config))


def ask_pasta(
    decoder: Decoder, config: GenerationConfig, question: Question, ask: Ask
) -> DecodingTask[Record]:
    """Answer by one request: in parallel, or as the sequential baseline (`config.parallel`)."""
    sampling = question_sampling(config, question)
    [answer] = yield from ask([decoder.request(question.instruction, config.rules, sampling)])
    return record_of(decoder, question, answer)
