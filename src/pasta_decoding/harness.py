"""Pasta as a model of lm-evaluation-harness, which knows no entry points: a command brings it.

    pasta-lm-eval --model pasta --model_args name=balanced,parallel=False --tasks ifeval

The command is the harness's own `lm-eval` with one model more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from pasta_decoding.answer.request import GREEDY_BELOW
from pasta_decoding.errors import PastaError, require

if TYPE_CHECKING:
    from pasta_decoding.api.config import GenerationConfig
    from pasta_decoding.api.streams import Result

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What task files call an answer's limit; the first one counts."""


def run() -> None:
    """The console script: `lm-eval`, with the model `pasta`; a user's mistake is one line."""
    try:
        require("lm_eval", extra="harness", doing="pasta-lm-eval")
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.model import LM
        from lm_eval.api.registry import model_registry

        # The harness may not be installed, so its class is no base before it is asked for.
        kind = type("PastaLM", (PastaModel, LM), {"__module__": __name__})
        model_registry.register("pasta", target=kind)
        cli_evaluate()
    except PastaError as error:
        sys.exit(f"pasta-lm-eval: {error}\n{error.hint}".rstrip())


class PastaModel:
    """What the harness asks of a model.

    name:       what `pasta.load` takes, and so are the other arguments of loading.
    parallel:   False bans promises: sequential decoding with the same weights.
    batch_size: answers that are written side by side.
    """

    cache_hook: Any
    tokenizer_name = "pasta"
    """The harness tells cached requests apart by it; a conversation is the same for every model."""

    def __init__(
        self, name: str = "balanced", *, parallel: bool = True, batch_size: int | str = 1,
        max_batch_size: int | None = None, max_tokens: int = 512, device: str | None = None,
        **loading: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        from pasta_decoding.api.config import GenerationConfig
        from pasta_decoding.api.opening import load

        if not str(batch_size).isdigit() or int(batch_size) < 1 or max_batch_size is not None:
            raise PastaError(f"batch_size is {batch_size}, not a number of answers, such as 16")
        self.together = int(batch_size)
        self.always = GenerationConfig(parallel=parallel, max_tokens=max_tokens)
        # The harness says cuda:0 when its user said nothing.
        self.model = load(name, device=None if device == "cuda:0" else device, **loading)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts: list[str] = []
        with tqdm(total=len(requests), desc="Answers", disable=disable_tqdm) as bar:
            for settings, some in groupby(requests, key=lambda one: one.args[1]):
                texts += self._answered(list(some), settings, bar)
        return texts

    def _answered(
        self, requests: Sequence[Any], settings: Mapping[str, Any], bar: Any
    ) -> list[str]:
        def keep(number: int, result: Result) -> None:
            self.cache_hook.add_partial("generate_until", requests[number].args, result.text)
            bar.update()

        config = config_of_task(self.always, settings)
        asked = [conversation_in(one.args[0]) for one in requests]
        results = self.model.batch(asked, config, max_concurrency=self.together, on_result=keep)
        return [one.text for one in results]

    def loglikelihood(self, _requests: Sequence[Any]) -> NoReturn:
        raise PastaError(
            "the model pasta scores no given text: take tasks of the type generate_until, or "
            "evaluate what `pasta export --to hf` wrote with --model hf, sequentially"
        )

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as one string, which is read again when it is asked."""
        if not add_generation_prompt:
            raise PastaError("the task begins the model's answer: leave its gen_prefix out")
        return json.dumps(chat_history)


def config_of_task(always: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """Return a task's `generation_kwargs` as a config; what they leave out is `always`'s.

    Raises PastaError for unknown ones.
    """
    given = {name: one for name, one in settings.items() if one is not None}
    limits = [given.pop(name) for name in _LENGTHS if name in given]
    if limits:
        given["max_tokens"] = int(limits[0])
    until = given.pop("until", ())
    given["stop"] = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    temperature = given.get("temperature", always.temperature)
    if not given.pop("do_sample", temperature >= GREEDY_BELOW):
        given["temperature"] = 0.0
    return always.updated(**{"temperature": 1.0} | given)  # transformers' own


def conversation_in(text: str) -> str | list[dict[str, str]]:
    if text.startswith('[{"role": '):
        with suppress(ValueError):
            return list(json.loads(text))
    return text
