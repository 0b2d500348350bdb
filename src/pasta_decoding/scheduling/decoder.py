"""A checkpoint's language on an engine or on servers: from a question to a request for it."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.request import Priority, Request, Rules, SamplingParams
from pasta_decoding.answer.sampler import Sampler
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

    topic:    whether its promises carry one.
    eagerness: added to the promise's logit, of requests that name none.
    parallel: whether the checkpoint knows the language; else all decoding is sequential.
    warnings: what a user should know of this checkpoint on this engine.
    max_model_len: tokens that one request may have; None: what the model and the cache hold.
    """

    encoder: PromptEncoder
    vocabulary: Vocabulary
    topic: bool
    parallel: bool = True
    joining: Joining = Joining.kv
    eagerness: float = 0.0
    warnings: tuple[str, ...] = ()
    max_model_len: int | None = None

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many tokens of one request the model and its cache can hold."""

    @property
    def context_tokens(self) -> int:
        return self.capacity if self.max_model_len is None else self.max_model_len

    def limited_to(self, max_model_len: int | None) -> Self:
        """Return the same for requests of at most this many tokens."""
        if max_model_len is not None and max_model_len > self.capacity:
            message = f"max_model_len is {max_model_len}, and model and cache hold {self.capacity}"
            raise PastaError(message, field="max_model_len")
        return replace(self, max_model_len=max_model_len)

    @property
    @abstractmethod
    def name(self) -> str:
        """What computes the answers."""

    @abstractmethod
    def scheduler(self, **options: Any) -> Any:
        """Return what answers requests together: it has what `EngineLoop` uses of `Scheduler`."""

    def prompt_ids(
        self, prompt: str | Sequence[Message], answer_tokens: int, *, plain: bool = False
    ) -> tuple[int, ...]:
        """Encode a question or a conversation. `plain`: a text to go on from, without a template.

        Raises PastaError if it leaves no room for an answer of `answer_tokens`.
        """
        if (room := self.context_tokens - answer_tokens) < 1:
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
        """Return the request that answers a question, or token ids, as the checkpoint can.

        choice: tells answers apart that have one seed.
        """
        if isinstance(prompt, str):
            prompt = self.prompt_ids(prompt, rules.max_tokens)
        ids = tuple(prompt)
        if self.max_model_len is not None and len(ids) + rules.max_tokens > self.max_model_len:
            message = f"{len(ids)} tokens of prompt and {rules.max_tokens} of answer are more"
            message += f" than the context length of {self.max_model_len}"
            raise PastaError(message, code=TOO_LONG, field="max_tokens")
        own = replace(
            rules,
            topic=self.topic,
            parallel=rules.parallel and self.parallel,
            eagerness=self.eagerness if rules.eagerness is None else rules.eagerness,
        )
        return Request(ids, self.sampler(sampling, choice), own, priority)

    def sampler(self, sampling: SamplingParams, choice: int = 0) -> Sampler:
        """Return what chooses an answer's tokens. Raises PastaError for a bias of unknown ids."""
        known = len(self.vocabulary.texts)
        if unknown := [token for token in sampling.logit_bias if not 0 <= token < known]:
            message = f"logit_bias names the id {unknown[0]}, and the model has those below {known}"
            raise PastaError(message, field="logit_bias")
        return Sampler(sampling, choice)

    def plain_tokens(self, text: str) -> int:
        return len(self.encoder.encode_text(text)) if text else 0


def decoder_fields(
    loaded: LoadedModel, vocabulary_size: int, wanted: Joining | None, able: Sequence[Joining]
) -> dict[str, Any]:
    """Return the fields of a `Decoder`: with the join `wanted`, else the first that both sides can.

    Raises PastaError if there is none (behind a sync, main would see what it was not trained on),
    or if no token ends the checkpoint's answers.
    """
    checkpoint, tokenizer = loaded.checkpoint, loaded.tokenizer
    known = [joining for joining in able if joining in checkpoint.joins]
    if wanted is None and checkpoint.joins and not known:
        raise PastaError(
            f"the checkpoint was trained for the joins {', '.join(checkpoint.joins)}, not "
            + " or ".join(repr(joining.value) for joining in able),
            hint=f"Use another adapter, or --join {able[-1]} to decode with this one all the same.",
        )
    joining = wanted or (known or able)[0]
    warnings = [] if loaded.warning is None else [loaded.warning]
    if checkpoint.joins and joining not in checkpoint.joins:
        warnings.append(f"the checkpoint was not trained for the join {joining}: expect worse text")
    ends = (loaded.eos_ids, loaded.end)
    return {
        "encoder": PromptEncoder(tokenizer, forbidden_ids=checkpoint.control.ids),
        "vocabulary": vocabulary_of(tokenizer, checkpoint.control, vocabulary_size, *ends),
        "topic": checkpoint.topic == "required",
        "eagerness": checkpoint.eagerness,
        "parallel": bool(checkpoint.joins),
        "joining": joining,
        "warnings": tuple(warnings),
    }


@dataclass(frozen=True, slots=True)
class LocalDecoder(Decoder):
    """A checkpoint on an engine in this process."""

    engine: Engine
    scheme: Scheme

    @property
    def capacity(self) -> int:
        slots, positions = self.engine.max_slots, self.engine.max_positions
        return positions if slots is None else min(slots, positions)

    @property
    def name(self) -> str:
        return self.engine.name

    def scheduler(self, *, on_sent: object = None, **options: Any) -> Scheduler:  # noqa: ARG002
        """Return a new scheduler over the engine; `close` frees the prompts that it keeps."""
        options.setdefault("prefix_caching", True)
        return Scheduler(self.engine, self.vocabulary, self.scheme, joining=self.joining, **options)

    def answer(self, request: Request) -> Answer:
        return answer_of(self.scheduler(prefix_caching=False), request)


def answer_of(scheduler: Scheduler, request: Request) -> Answer:
    """Decode one request and wait for its answer; an exception on the way cancels it."""
    [[answer]] = run_all(scheduler, [ask(scheduler, [request])])
    return answer


def decoder_over(
    engine: Engine, loaded: LoadedModel, joining: Joining | None = None
) -> LocalDecoder:
    """Return a decoder for a loaded checkpoint on an engine.

    Raises PastaError if the engine cannot decode as the checkpoint was trained.
    """
    fields = decoder_fields(loaded, engine.vocabulary_size, joining, (Joining.kv, Joining.text))
    # Under the `text` join a row is a plain sequence, whatever the scheme.
    text = fields["joining"] is Joining.text
    scheme = SHARED_MAX if text else scheme_named(loaded.checkpoint.scheme)
    if not (scheme.consecutive or engine.free_positions):
        message = f"the engine {engine.name!r} cannot take the positions of the scheme"
        hint = "Use --engine torch, or another adapter."
        raise PastaError(f"{message} {scheme.name!r}", hint=hint)
    return LocalDecoder(**fields, engine=engine, scheme=scheme)
