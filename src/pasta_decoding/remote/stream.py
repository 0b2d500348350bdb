"""One completion on the wire: the body that asks for it, and the stream that answers. No I/O.

The dialect is OpenAI's `/v1/completions` with three extensions as vLLM has them: the prompt is a
list of token ids, `stop_token_ids` end it, and `return_token_ids` puts ids into the stream.
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html `vllm_xargs` go only to a
server that has Pasta's logits processor.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pasta_decoding.answer.guided import XARG, GuidedParams, write_params
from pasta_decoding.answer.request import SamplingParams
from pasta_decoding.errors import PastaError, excerpt

MAX_LINE_BYTES = 2**24
"""Of one event; the first of a stream repeats the prompt."""
MAX_BIASES = 1024
"""How many tokens a request may bias. vLLM refuses more (its GPU sampler has room for these)."""
BAN = -100.0
"""The bias of a banned token, and minus that of tokens of which one must come."""

_DIALECT = "it must know `return_token_ids`, `stop_token_ids` and `include_usage`, as vLLM does"


class RemoteError(PastaError):
    """A server of completions failed.

    reason:        what went wrong, without saying where.
    retryable:     whether the same request may do better in a while,
    retry_after_s: and when, if the server says so.
    healthy:       whether the server is well all the same: busy, or this request does not fit.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        reason: str | None = None,
        retryable: bool = False,
        retry_after_s: float | None = None,
        healthy: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.reason = message if reason is None else reason
        self.retryable, self.retry_after_s, self.healthy = retryable, retry_after_s, healthy


@dataclass(frozen=True, slots=True)
class Completion:
    """Go on from `prompt` for at most `max_tokens`.

    stops:  ids that end it; the stream contains them.
    end:    stands for an end that the server does not name.
    bias:   what is added to the logits of these ids before anything is chosen.
    params: the rules that it obeys, where the server is `guided`: it has the processor.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stops: tuple[int, ...]
    end: int
    bias: Mapping[int, float] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    params: GuidedParams | None = None

    def body(self, model: str, *, guided: bool) -> dict[str, Any]:
        """Return the request's body. It names all of sampling: some servers have other defaults."""
        bias, sampling, xargs = dict(self.bias), self.sampling, {}
        if self.params is not None and guided:
            xargs = {"vllm_xargs": {XARG: write_params(self.params)}}
        elif self.params is not None and self.params.eagerness:
            token = self.params.control.promise_open
            bias[token] = bias.get(token, 0.0) + self.params.eagerness
        return xargs | {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "seed": self.seed,
            "logit_bias": {str(token): by for token, by in bias.items()} or None,
            "stop_token_ids": list(self.stops),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(slots=True)
class CompletionReader:
    """Reads the stream that answers a completion: bytes in, token ids out.

    A stream of another form, or one that loses or repeats tokens, raises RemoteError. A stop token
    comes out when the stream has ended well, so that nobody acts on a broken one.

    received:      ids that came, those that are held back among them.
    cached_tokens: how much of the prompt the server had computed before; None if it does not say.
    """

    asked: Completion
    vocabulary_size: int
    received: int = 0
    cached_tokens: int | None = None
    _line: bytes = b""
    _held: list[int] = field(default_factory=list)
    _ended: bool = False
    _unsent: int = 0
    _counted: bool = False

    def feed(self, data: bytes) -> list[int]:
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > MAX_LINE_BYTES:
            raise _garbage("a line without an end")
        return [token for line in lines for token in self._read(line.strip())]

    def end(self) -> list[int]:
        """Return the ids that the end of the stream makes certain."""
        ids = self.feed(b"\n")
        if not self._ended:
            raise RemoteError("it ended its reply early", retryable=True)
        if not self._counted:
            raise RemoteError(f"it did not say how many tokens it sent; {_DIALECT}")
        return [*ids, *self._held]

    def _read(self, line: bytes) -> list[int]:
        if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
            return []
        content = line.removeprefix(b"data:").strip()
        if content == b"[DONE]":
            return []
        try:
            event = json.loads(content) if line.startswith(b"data:") else None
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise _garbage(excerpt(repr(content)))
        if event.get("error"):
            raise RemoteError(f"it failed: {excerpt(event['error'])}", retryable=True)
        choices = event.get("choices")
        if not isinstance(choices, list) or [type(one) for one in choices] not in ([], [dict]):
            raise _garbage(f"choices {excerpt(choices)}")
        ids = [token for choice in choices for token in self._choice(choice)]
        if self._ended and (usage := event.get("usage")):  # some servers count as they go
            self._check_usage(usage if isinstance(usage, dict) else {})
        return ids

    def _choice(self, choice: dict[str, Any]) -> list[int]:
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and echoed != list(self.asked.prompt):
            raise RemoteError("it changed the prompt")
        ids = self._checked(choice.get("token_ids"), text=choice.get("text"))
        stops = [place for place, token in enumerate(ids) if token in self.asked.stops]
        if (ids and (self._ended or self._held)) or (stops and stops[0] < len(ids) - 1):
            raise RemoteError(f"it went on behind a stop token; {_DIALECT}")
        self.received += len(ids)
        if self.received > (most := self.asked.max_tokens):
            raise RemoteError(f"it sent more than the {most} tokens that were asked for")
        if stops:
            self._held = [ids.pop()]
        self._finish(choice.get("finish_reason"), choice.get("stop_reason"))
        return ids

    def _checked(self, ids: object, *, text: object) -> list[int]:
        if ids is None and not text:
            return []
        if not isinstance(ids, list):
            raise RemoteError(f"it streams no token ids; {_DIALECT}")
        for one in ids:
            if type(one) is not int or not 0 <= one < self.vocabulary_size:
                about = f"it sent {excerpt(repr(one))} for a token id"
                raise RemoteError(f"{about}: does it serve another model?")
        return list(ids)

    def _finish(self, reason: object, stop: object) -> None:
        if reason not in (None, "stop", "length"):
            raise RemoteError(f"it gave up: {excerpt(reason)}", retryable=True)
        self._ended = self._ended or reason is not None
        if reason == "stop" and not self._held:
            last = stop if type(stop) is int and stop in self.asked.stops else self.asked.end
            self._held, self._unsent = [last], 1

    def _check_usage(self, usage: dict[str, Any]) -> None:
        counted, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if counted not in (self.received, self.received + self._unsent):
            about = f"it streamed {self.received} token ids and counts {excerpt(counted)}"
            raise RemoteError(f"{about}: some were lost or came twice")
        sent = len(self.asked.prompt)
        if prompt not in (None, sent):
            message = f"it read a prompt of {excerpt(prompt)} tokens where {sent} were sent"
            raise RemoteError(message)
        self._counted = True
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.cached_tokens = cached if type(cached) is int else None


def checked_key(key: str | None) -> str | None:
    """Return an API key; PastaError, which does not show it, if no client could send it."""
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise PastaError("the API key is empty or has characters that no header can hold")
    return key


def _garbage(what: str) -> RemoteError:
    return RemoteError(f"it sent no completion: {what}")
