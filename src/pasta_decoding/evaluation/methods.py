"""The methods of `eval generate`: how they are named, and how each answers a question.

A method answers by a generator, which returns the record of the question. It knows no clock: the
same lines run alone, for timing, and beside other questions, for throughput.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request, SamplingParams
from pasta_decoding.api.config import GenerationConfig
from pasta_decoding.data.rows import Question
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.records import Record, record_of
from pasta_decoding.lang.tree import Span, text_form
from pasta_decoding.models.bases import BASES, DEFAULT_MODEL, BaseModel
from pasta_decoding.models.catalog import NO_ADAPTER, known_model
from pasta_decoding.scheduling.asking import DecodingTask
from pasta_decoding.scheduling.decoder import Decoder, LocalDecoder

LOOKUP_TOKENS = 10
"""The most that prompt lookup drafts at once, as transformers' own candidate generator has it."""

Ask = Callable[[Sequence[Request]], DecodingTask[list[Answer]]]
"""Decodes requests side by side; what their prompts begin with alike is computed once."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way of answering with a model. `ask` raises PastaError if it cannot ask a question."""

    decoder: Decoder
    ask: Callable[[Question, Ask], DecodingTask[Record]]


NAMES = ("sequential", "pasta", "sot", "apar", "hf", "lookup")
TRAINED = ("pasta", "apar")
OF_HF = ("hf", "lookup")
"""Those that transformers' own `generate` computes."""


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """One --method: its name and adapter, and the label of its run folder."""

    name: str
    adapter: str
    label: str


def choose_methods(
    texts: Sequence[str], model: Path | None = None, *, remote: bool = False
) -> list[MethodChoice]:
    """Read every --method. Raises PastaError for those that do not go together, or on servers."""
    base = known_model(model) or BASES[DEFAULT_MODEL]
    chosen = [_chosen(text, base) for text in texts]
    labels = [one.label for one in chosen]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise PastaError(f"--method is given twice for the folder {twice[0]!r}")
    if remote and (local := [one.name for one in chosen if one.name in (*OF_HF, "sot")]):
        raise PastaError(f"--method {local[0]} works in this process, not on servers")
    adapters = sorted({one.adapter for one in chosen})
    if remote and len(adapters) > 1:
        raise PastaError(
            f"the servers have one checkpoint, and methods differ in theirs: {', '.join(adapters)}"
        )
    return chosen


def _chosen(text: str, base: BaseModel) -> MethodChoice:
    name, given, adapter = text.partition("=")
    if name not in NAMES or (given and not adapter):
        raise PastaError(f"--method {text!r} is none of {', '.join(NAMES)}, or NAME=ADAPTER")
    if not given:
        if name == "apar":
            raise PastaError("no adapter of apar ships: name yours, --method apar=FOLDER")
        return MethodChoice(name, base.adapter if name == "pasta" else base.baseline, name)
    if adapter == NO_ADAPTER and name in TRAINED:
        raise PastaError(f"{name} needs an adapter")
    return MethodChoice(name, adapter, f"{name}-{Path(adapter).name}")


def make_method(name: str, decoder: Decoder, config: GenerationConfig) -> Method:
    from pasta_decoding.evaluation.skeleton import ask_skeleton

    if name in TRAINED or name == "sequential":
        own = replace(config, parallel=name in TRAINED)
        return Method(decoder, partial(ask_pasta, decoder, own))
    assert isinstance(decoder, LocalDecoder), "refused before"
    if name == "sot":
        return Method(decoder, partial(ask_skeleton, decoder, config))
    model, lookup_tokens = unpatched(decoder), LOOKUP_TOKENS if name == "lookup" else None
    return Method(decoder, partial(ask_hf, decoder, model, lookup_tokens, config))


def of_question(config: GenerationConfig, question: Question, part: int = 0) -> SamplingParams:
    """Return one request's sampling. Its seed follows from names: no order changes an answer."""
    named = f"{config.seed} {question.id} {part}".encode()
    return replace(config.sampling(), seed=int.from_bytes(sha256(named).digest()[:4], "big"))


def ask_pasta(
    decoder: Decoder, config: GenerationConfig, question: Question, ask: Ask
) -> DecodingTask[Record]:
    """Answer by one request: in parallel, or as the sequential baseline (`config.parallel`)."""
    sampling = of_question(config, question)
    [answer] = yield from ask([decoder.request(question.instruction, config.rules, sampling)])
    return record_of(decoder, question, answer)


def ask_hf(
    decoder: Decoder,
    model: Any,
    lookup_tokens: int | None,
    config: GenerationConfig,
    question: Question,
    _ask: Ask,
) -> DecodingTask[Record]:
    """Answer by `generate` of the package transformers, one answer at a time: it blocks.

    Alone it is a sequential baseline. With prompt lookup (Saxena 2023) it drafts what followed the
    last two tokens when they stood in the text before, and one pass verifies it.

    model:         unpatched, in the place where it computes.
    lookup_tokens: the most that are drafted at once; None: nothing is.
    """
    import torch
    from transformers import GenerationConfig as HfConfig

    yield from ()
    sampling = of_question(config, question)
    prompt = decoder.prompt_ids(question.instruction, config.max_tokens)
    chosen: dict[str, Any] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:  # transformers has 50 for `top_k` by default; 0 is none
        chosen |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    settings = HfConfig(
        **chosen,
        max_new_tokens=config.max_tokens,
        eos_token_id=sorted(decoder.vocabulary.eos_ids),
        pad_token_id=decoder.vocabulary.end,
        prompt_lookup_num_tokens=lookup_tokens,
    )
    passes: list[None] = []
    counting = model.register_forward_pre_hook(lambda *_: passes.append(None))
    input_ids = torch.tensor([prompt], device=model.device)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(sampling.seed)
            found = model.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings
            )
    finally:
        counting.remove()
    ids = found[0, len(prompt) :].tolist()
    text = decoder.vocabulary.decode(ids)
    return Record(
        **asdict(question),
        text=text,
        annotated=text_form((Span(text),)) if text else "",
        plain_tokens=decoder.plain_tokens(text),
        critical_path=len(passes) - 1,  # the first one is the prefill
        fed_tokens=len(ids),
        hit_limit=ids[-1] not in decoder.vocabulary.eos_ids,
    )


def unpatched(decoder: LocalDecoder) -> Any:
    """Return the model of a torch engine as transformers made it; the weights are shared."""
    assert isinstance(decoder.engine, TorchEngine), "made for this engine"
    model = decoder.engine.model
    weights = {id(one): one for one in chain(model.parameters(), model.buffers())}
    twin = deepcopy(model, weights)
    twin.set_attn_implementation("sdpa")
    return twin
