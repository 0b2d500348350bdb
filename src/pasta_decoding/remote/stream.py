"""One completion on the wire: the body of its request, and a reader of the reply. No I/O.

The dialect is OpenAI's `/v1/completions` with three extensions of vLLM: the prompt is a list of
token ids, `stop_token_ids` end the completion, and `return_token_ids` puts ids into the stream.
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
Only servers with Pasta's logits processor get `vllm_xargs`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pasta_decoding.answer.guided import XARG, GuidedParams, write_params
from pasta_decoding.answer.settings import SamplingParams
from pasta_decoding.errors import PastaError, excerpt

MAX_LINE_BYTES = 2**24
"""Limit on one event of a stream. The first event repeats the prompt."""
MAX_BIASES = 1024
"""Limit on the biased tokens of a request: vLLM's GPU sampler has room for this many."""
BAN = -100.0
"""The bias of a banned token. Its negative goes to tokens of which one must come."""

_DIALECT = "it must know `return_token_ids`, `stop_token_ids` and `include_usage`, as vLLM does"


class RemoteError(PastaError):
    """A server of completions failed.

    reason:        the cause, without the server's address.
    retryable:     whether the same request may succeed later.
    retry_after_s: the pause that the server asks for, if any.
    healthy:       whether the server works: it is only busy, or this request does not fit.
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
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.healthy = healthy


@dataclass(frozen=True, slots=True)
class Completion:
    """A request to continue `prompt` by at most `max_tokens`.

    stops:  ids that end the completion; the stream contains the one that did.
    end:    the id to return for an end that the server does not name.
    bias:   numbers added to the logits of some ids, before sampling.
    params: rules that only a guided server obeys: one with the logits processor.
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
        """Return the JSON body. It sets all of sampling, since servers have other defaults.

        guided: whether the server has the logits processor; it adds the tags' biases itself.
        """
        bias = dict(self.bias)
        sampling = self.sampling
        extensions = {}
        if self.params is not None and guided:
            extensions["vllm_xargs"] = {XARG: write_params(self.params)}
        elif self.params is not None:
            control = self.params.control
            tag_biases = {
                control.promise_open: self.params.eagerness,
                control.sync: self.params.sync_bias,
            }
            for token, tag_bias in tag_biases.items():
                if tag_bias:
                    bias[token] = bias.get(token, 0.0) + tag_bias
        return extensions | {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "seed": self.seed,
            "logit_bias": {str(token): value for token, value in bias.items()} or None,
            "stop_token_ids": list(self.stops),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(slots=True)
class CompletionReader:
    """Reads the stream of one completion: bytes in, token ids out.

    Raises RemoteError for a stream of another form, or one that loses or repeats tokens. A stop
    token is returned only when the stream has ended well: nothing follows from a broken stream.

    received:      number of ids that came, a stop token included.
    cached_tokens: prompt tokens that the server had computed before; None if it does not say.
    _stop_ids:     the stop token, until the stream has ended.
    _unsent_ends:  1 if the server ended without sending a stop token, which it may count.
    _has_usage:    whether the server's count of tokens came, and was right.
    """

    completion: Completion
    vocabulary_size: int
    received: int = 0
    cached_tokens: int | None = None
    _line: bytes = b""
    _stop_ids: list[int] = field(default_factory=list)
    _ended: bool = False
    _unsent_ends: int = 0
    _has_usage: bool = False

    def feed(self, data: bytes) -> list[int]:
        """Read the next bytes, cut anywhere; return the ids of the events that they complete."""
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > MAX_LINE_BYTES:
            raise _garbage("a line without an end")
        return [token for line in lines for token in self._read(line.strip())]

    def end(self) -> list[int]:
        """Read the end of the stream; return the last ids, with the stop token."""
        ids = self.feed(b"\n")
        if not self._ended:
            raise RemoteError("it ended its reply early", retryable=True)
        if not self._has_usage:
            raise RemoteError(f"it did not say how many tokens it sent; {_DIALECT}")
        return ids + self._stop_ids

    def _read(self, line: bytes) -> list[int]:
        """Return the ids in a line of server-sent events."""
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
        if not isinstance(choices, list) or [type(choice) for choice in choices] not in (
            [],
            [dict],
        ):
            raise _garbage(f"choices {excerpt(choices)}")
        ids = self._read_choice(choices[0]) if choices else []
        usage = event.get("usage")
        if self._ended and usage:  # before the end some servers send the count up to now
            self._check_usage(usage if isinstance(usage, dict) else {})
        return ids

    def _read_choice(self, choice: dict[str, Any]) -> list[int]:
        echoed_prompt = choice.get("prompt_token_ids")
        if echoed_prompt is not None and echoed_prompt != list(self.completion.prompt):
            raise RemoteError("it changed the prompt")
        ids = self._checked_ids(choice.get("token_ids"), text=choice.get("text"))
        had_ended = self._ended or bool(self._stop_ids)
        if (ids and had_ended) or any(token in self.completion.stops for token in ids[:-1]):
            raise RemoteError(f"it went on behind a stop token; {_DIALECT}")
        self.received += len(ids)
        max_tokens = self.completion.max_tokens
        if self.received > max_tokens:
            raise RemoteError(f"it sent more than the {max_tokens} tokens that were asked for")
        if ids and ids[-1] in self.completion.stops:
            self._stop_ids = [ids.pop()]
        self._finish(choice.get("finish_reason"), choice.get("stop_reason"))
        return ids

    def _checked_ids(self, ids: object, *, text: object) -> list[int]:
        """Return `ids` if it is a list of token ids. It may be absent if there is no text."""
        if ids is None and not text:
            return []
        if not isinstance(ids, list):
            raise RemoteError(f"it streams no token ids; {_DIALECT}")
        for token in ids:
            if type(token) is not int or not 0 <= token < self.vocabulary_size:
                message = f"it sent {excerpt(repr(token))} for a token id"
                raise RemoteError(f"{message}: does it serve another model?")
        return list(ids)

    def _finish(self, reason: object, stop_reason: object) -> None:
        """Take note of the end of the completion, if `reason` names one."""
        if reason not in (None, "stop", "length"):
            raise RemoteError(f"it gave up: {excerpt(reason)}", retryable=True)
        if reason is None:
            return
        self._ended = True
        if reason == "stop" and not self._stop_ids:
            stop_id = self.completion.end
            if type(stop_reason) is int and stop_reason in self.completion.stops:
                stop_id = stop_reason
            self._stop_ids = [stop_id]
            self._unsent_ends = 1

    def _check_usage(self, usage: dict[str, Any]) -> None:
        """Compare the server's counts of tokens with what came and what was sent."""
        counted = usage.get("completion_tokens")
        if counted not in (self.received, self.received + self._unsent_ends):
            message = f"it streamed {self.received} token ids and counts {excerpt(counted)}"
            raise RemoteError(f"{message}: some were lost or came twice")
        counted_prompt = usage.get("prompt_tokens")
        sent_prompt = len(self.completion.prompt)
        if counted_prompt not in (None, sent_prompt):
            message = f"it read a prompt of {excerpt(counted_prompt)} tokens"
            raise RemoteError(f"{message} where {sent_prompt} were sent")
        self._has_usage = True
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.cached_tokens = cached if type(cached) is int else None


def checked_key(key: str | None) -> str | None:
    """Return `key`. Raises PastaError, without showing it, if no HTTP header can hold it."""
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise PastaError("the API key is empty or has characters that no header can hold")
    return key


def _garbage(description: str) -> RemoteError:
    return RemoteError(f"it sent no completion: {description}")
