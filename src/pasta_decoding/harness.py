"""Pasta as a model of lm-evaluation-harness. The harness has no plugins; a command adds the model.

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

from pasta_decoding.answer.settings import GREEDY_BELOW
from pasta_decoding.errors import PastaError, require

if TYPE_CHECKING:
    from pasta_decoding.api.config import GenerationConfig
    from pasta_decoding.api.streams import Result

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the token limit in task files; the first one that is set counts."""


def run() -> None:
    """The console script: `lm-eval`, with the model `pasta`; a user's mistake is one line."""
    try:
        require("lm_eval", extra="harness", doing="pasta-lm-eval")
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.model import LM
        from lm_eval.api.registry import model_registry

        # `LM` is a base here and not below: without the harness, this module can be imported.
        model_class = type("PastaLM", (PastaModel, LM), {"__module__": __name__})
        model_registry.register("pasta", target=model_class)
        cli_evaluate()
    except PastaError as error:
        sys.exit(f"pasta-lm-eval: {error}\n{error.hint}".rstrip())


class PastaModel:
    """The methods that the harness calls.

    name:       an argument of `pasta.load`, as are `device` and `loading`.
    parallel:   False answers sequentially, by the baseline of a shipped adapter.
    batch_size: how many answers are written side by side.
    """

    cache_hook: Any
    tokenizer_name = "pasta"
    """Part of the harness's cache keys. Our prompts are the same for every tokenizer."""

    def __init__(
        self,
        name: str = "balanced",
        *,
        parallel: bool = True,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_tokens: int = 512,
        device: str | None = None,
        **loading: Any,
    ) -> None:
        super().__init__()
        from pasta_decoding.api.config import GenerationConfig
        from pasta_decoding.api.opening import load

        if not str(batch_size).isdigit() or int(batch_size) < 1 or max_batch_size is not None:
            raise PastaError(f"batch_size is {batch_size}, not a number of answers, such as 16")
        self.max_concurrency = int(batch_size)
        self.default_config = GenerationConfig(parallel=parallel, max_tokens=max_tokens)
        # The harness passes cuda:0 if its user names no device.
        self.model = load(name, device=None if device == "cuda:0" else device, **loading)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer requests, whose `args` are a context and a task's settings, in order."""
        texts: list[str] = []
        with tqdm(total=len(requests), desc="Answers", disable=disable_tqdm) as bar:
            for settings, group in groupby(requests, key=lambda request: request.args[1]):
                texts += self._answer_group(list(group), settings, bar)
        return texts

    def _answer_group(
        self, requests: Sequence[Any], settings: Mapping[str, Any], bar: Any
    ) -> list[str]:
        """Answer requests that share their settings."""

        def on_result(index: int, result: Result) -> None:
            self.cache_hook.add_partial("generate_until", requests[index].args, result.text)
            bar.update()

        results = self.model.batch(
            [conversation_in(request.args[0]) for request in requests],
            config_of_task(self.default_config, settings),
            max_concurrency=self.max_concurrency,
            on_result=on_result,
        )
        return [result.text for result in results]

    def loglikelihood(self, _requests: Sequence[Any]) -> NoReturn:
        raise PastaError(
            "the model pasta scores no given text: take tasks of the type generate_until, or "
            "evaluate what `pasta export --to hf` wrote with --model hf, sequentially"
        )

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as JSON. `conversation_in` reads it when it is answered."""
        if not add_generation_prompt:
            raise PastaError("the task begins the model's answer: leave its gen_prefix out")
        return json.dumps(chat_history)


def config_of_task(default: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """Return a task's `generation_kwargs` as a config; `default` has the fields they leave out.

    Raises PastaError for unknown settings.
    """
    fields = {name: value for name, value in settings.items() if value is not None}
    limits = [fields.pop(name) for name in _LENGTHS if name in fields]
    if limits:
        fields["max_tokens"] = int(limits[0])
    until = fields.pop("until", ())
    stops = [until] if isinstance(until, str) else until
    fields["stop"] = [stop for stop in stops if stop]
    temperature = fields.get("temperature", default.temperature)
    if not fields.pop("do_sample", temperature >= GREEDY_BELOW):
        fields["temperature"] = 0.0
    fields.setdefault("temperature", 1.0)  # the default of transformers, if `do_sample` is true
    return default.updated(**fields)


def conversation_in(text: str) -> str | list[dict[str, str]]:
    """Return the conversation that `apply_chat_template` wrote, or a text as it is."""
    if text.startswith('[{"role": '):
        with suppress(ValueError):
            return list(json.loads(text))
    return text
