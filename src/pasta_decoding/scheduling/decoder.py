"""Decoders: a checkpoint on an engine or on servers, ready to turn questions into requests."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Request
from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.answer.settings import Priority, Rules, SamplingParams
from pasta_decoding.answer.vocabulary import Vocabulary, vocabulary_of
from pasta_decoding.engines.base import Engine
from pasta_decoding.errors import TOO_LONG, PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import SHARED_MAX, Scheme, scheme_named
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.models.template import Message
from pasta_decoding.scheduling.asking import ask, run_all
from pasta_decoding.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Everything that an answer needs except the engine.

    topic:    whether the checkpoint's promises carry a topic.
    eagerness: added to the promise's logit, if the request's rules do not set it.
    promise_bias, sync_bias: always added to the logits of these tags.
    parallel: whether the checkpoint knows the language; else all decoding is sequential.
    warnings: to be shown to the user, about this checkpoint on this engine.
    max_model_len: limit on the tokens of one request; None: `capacity` is the limit.
    """

    encoder: PromptEncoder
    vocabulary: Vocabulary
    topic: bool
    parallel: bool = True
    joining: Joining = Joining.kv
    eagerness: float = 0.0
    promise_bias: float = 0.0
    sync_bias: float = 0.0
    warnings: tuple[str, ...] = ()
    max_model_len: int | None = None

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens of one request that the model and its cache can hold."""

    @property
    def context_tokens(self) -> int:
        return self.capacity if self.max_model_len is None else self.max_model_len

    def limited_to(self, max_model_len: int | None) -> Self:
        """Return this decoder with another `max_model_len`; PastaError if it exceeds `capacity`."""
        if max_model_len is not None and max_model_len > self.capacity:
            message = f"max_model_len is {max_model_len}, and model and cache hold {self.capacity}"
            raise PastaError(message, field="max_model_len")
        return replace(self, max_model_len=max_model_len)

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the engine, as results quote it."""

    @abstractmethod
    def scheduler(self, **options: Any) -> Any:
        """Return a new scheduler: a `Scheduler`, or one with the methods that `EngineLoop` uses."""

    def prompt_ids(
        self, prompt: str | Sequence[Message], answer_tokens: int, *, plain: bool = False
    ) -> tuple[int, ...]:
        """Encode a question or a conversation, or a text to be continued if `plain` is true.

        Raises PastaError if the prompt leaves no room for an answer of `answer_tokens`.
        """
        room = self.context_tokens - answer_tokens
        if room < 1:
            message = f"an answer of up to {answer_tokens} tokens leaves no room for a prompt"
            message += f": the model holds {self.context_tokens} of both"
            raise PastaError(message, code=TOO_LONG, field="max_tokens")
        if isinstance(prompt, str) and plain:
            return tuple(self.encoder.encode_plain(prompt, max_tokens=room))
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        return tuple(self.encoder.encode(messages, max_tokens=room))

    def request(
        self,
        prompt: str | Sequence[int],
        rules: Rules,
        sampling: SamplingParams,
        choice: int = 0,
        priority: Priority = Priority.normal,
    ) -> Request:
        """Return a request for an answer, with the rules that the checkpoint can follow.

        prompt: a question, or the ids of an encoded prompt.
        choice: answers with one seed and different choices differ.
        """
        if isinstance(prompt, str):
            ids = self.prompt_ids(prompt, rules.max_tokens)
        else:
            ids = tuple(prompt)
        if self.max_model_len is not None and len(ids) + rules.max_tokens > self.max_model_len:
            message = f"{len(ids)} tokens of prompt and {rules.max_tokens} of answer are more"
            message += f" than the context length of {self.max_model_len}"
            raise PastaError(message, code=TOO_LONG, field="max_tokens")
        eagerness = self.eagerness if rules.eagerness is None else rules.eagerness
        parallel = rules.parallel and self.parallel
        rules = replace(
            rules,
            topic=self.topic,
            parallel=parallel,
            eagerness=eagerness + self.promise_bias,
            sync_bias=self.sync_bias,
        )
        return Request(ids, self.sampler(sampling, choice), rules, priority)

    def sampler(self, sampling: SamplingParams, choice: int = 0) -> Sampler:
        """Return the sampler of an answer. Raises PastaError if `logit_bias` has unknown ids."""
        size = len(self.vocabulary.texts)
        for token in sampling.logit_bias:
            if not 0 <= token < size:
                message = f"logit_bias names the id {token}, and the model has those below {size}"
                raise PastaError(message, field="logit_bias")
        return Sampler(sampling, choice)

    def plain_tokens(self, text: str) -> int:
        """Count the tokens of `text`, encoded without a template."""
        return len(self.encoder.encode_text(text)) if text else 0


def decoder_fields(
    loaded: LoadedModel,
    vocabulary_size: int,
    joining: Joining | None,
    possible_joins: Sequence[Joining],
) -> dict[str, Any]:
    """Return the fields of a `Decoder` for a loaded checkpoint.

    joining:        the join to decode with, even if the checkpoint was not trained for it; None:
                    the first of `possible_joins` that it was trained for.
    possible_joins: the joins that the engine or the servers can do, the best one first.

    Raises PastaError if `joining` is None and the checkpoint was trained for other joins only, or
    if no token ends its answers.
    """
    checkpoint = loaded.checkpoint
    tokenizer = loaded.tokenizer
    if joining is None:
        joining = _trained_join(checkpoint.joins, possible_joins)
    warnings = []
    if loaded.warning is not None:
        warnings.append(loaded.warning)
    if checkpoint.joins and joining not in checkpoint.joins:
        warnings.append(f"the checkpoint was not trained for the join {joining}: expect worse text")
    ends = (loaded.eos_ids, loaded.end)
    return {
        "encoder": PromptEncoder(tokenizer, forbidden_ids=checkpoint.control.ids),
        "vocabulary": vocabulary_of(tokenizer, checkpoint.control, vocabulary_size, *ends),
        "topic": checkpoint.topic == "required",
        "eagerness": checkpoint.eagerness,
        "promise_bias": checkpoint.promise_bias,
        "sync_bias": checkpoint.sync_bias,
        "parallel": bool(checkpoint.joins),
        "joining": joining,
        "warnings": tuple(warnings),
    }


def _trained_join(trained: Sequence[str], possible: Sequence[Joining]) -> Joining:
    """Return the first possible join that is trained; any one if the checkpoint is sequential."""
    if not trained:
        return possible[0]
    for joining in possible:
        if joining in trained:
            return joining
    # Behind a sync main would see tokens in a form that it was not trained on.
    raise PastaError(
        f"the checkpoint was trained for the joins {', '.join(trained)}, not "
        + " or ".join(repr(joining.value) for joining in possible),
        hint=f"Use another adapter, or --join {possible[-1]} to decode with this one all the same.",
    )


@dataclass(frozen=True, slots=True)
class LocalDecoder(Decoder):
    """A checkpoint on an engine in this process."""

    engine: Engine
    scheme: Scheme

    @property
    def capacity(self) -> int:
        if self.engine.max_slots is None:
            return self.engine.max_positions
        return min(self.engine.max_slots, self.engine.max_positions)

    @property
    def name(self) -> str:
        return self.engine.name

    def scheduler(self, *, on_sent: object = None, **options: Any) -> Scheduler:  # noqa: ARG002
        """Return a new scheduler over the engine. Close it, to free the prefixes that it caches."""
        options.setdefault("prefix_caching", True)
        return Scheduler(self.engine, self.vocabulary, self.scheme, joining=self.joining, **options)

    def answer(self, request: Request) -> Answer:
        """Decode one request with a scheduler of its own, and wait for the answer."""
        return answer_of(self.scheduler(prefix_caching=False), request)


def answer_of(scheduler: Scheduler, request: Request) -> Answer:
    """Decode one request and wait for its answer. An exception, such as Ctrl-C, cancels it."""
    [[answer]] = run_all(scheduler, [ask(scheduler, [request])])
    return answer


def decoder_over(
    engine: Engine, loaded: LoadedModel, joining: Joining | None = None
) -> LocalDecoder:
    """Return a decoder for a loaded checkpoint on an engine.

    Raises PastaError if the engine has not the join or the positions that the checkpoint needs.
    """
    fields = decoder_fields(loaded, engine.vocabulary_size, joining, (Joining.kv, Joining.text))
    if fields["joining"] is Joining.text:
        scheme = SHARED_MAX  # a thread's tokens are a plain sequence, in any scheme
    else:
        scheme = scheme_named(loaded.checkpoint.scheme)
    if not (scheme.consecutive or engine.free_positions):
        message = f"the engine {engine.name!r} cannot take the positions of the scheme"
        hint = "Use --engine torch, or another adapter."
        raise PastaError(f"{message} {scheme.name!r}", hint=hint)
    return LocalDecoder(**fields, engine=engine, scheme=scheme)
