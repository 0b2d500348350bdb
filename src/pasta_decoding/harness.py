"""Pasta as a model of lm-evaluation-harness, which knows no entry points: a command brings it.

    pasta-lm-eval --model pasta --model_args name=balanced,parallel=False --tasks ifeval

The command is the harness's own `lm-eval` with one model more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from pasta_decoding import __version__
from pasta_decoding.errors import PastaError, require

if TYPE_CHECKING:
    from pasta_decoding.api.config import GenerationConfig
    from pasta_decoding.api.streams import Result

NAME = "pasta"

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What task files call an answer's limit; the first one counts."""

_ANY_DEVICE = "cuda:0"
"""What the harness says when its user said nothing; the front door finds out what there is."""


def run() -> None:
    """The console script: `lm-eval`, with the model `pasta`; a user's mistake is one line."""
    try:
        require("lm_eval", extra="harness", doing="pasta-lm-eval")
        from lm_eval.__main__ import cli_evaluate

        register()
        cli_evaluate()
    except PastaError as error:
        sys.exit(f"pasta-lm-eval: {error}\n{error.hint}".rstrip())


def register() -> Any:
    """Make the model known to the harness of this process, as `pasta`, and return its class."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import model_registry

    # It may be installed or not, so its class cannot be a base before it is asked for.
    kind = type("PastaLM", (PastaModel, LM), {"__module__": __name__})
    if NAME not in model_registry:
        model_registry.register(NAME, target=kind)
    return kind


class PastaModel:
    """What the harness asks of a model; `register` makes it one of the harness's.

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
            hint = "It is the number of answers that are written side by side, such as 16."
            raise PastaError(f"batch_size is {batch_size}", hint=hint)
        self.together = int(batch_size)
        self.always = GenerationConfig(parallel=parallel, max_tokens=max_tokens)
        self.written: list[Result] = []
        self.model = load(name, device=None if device == _ANY_DEVICE else device, **loading)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer each request; those with the same settings together. The harness's method."""
        groups: dict[str, list[int]] = {}
        for number, one in enumerate(requests):
            groups.setdefault(json.dumps(one.args[1], sort_keys=True), []).append(number)
        answers: dict[int, str] = {}
        with tqdm(total=len(requests), desc="Answers", disable=disable_tqdm) as bar:
            for numbers in groups.values():
                texts = self._answered([requests[one] for one in numbers], bar)
                answers |= zip(numbers, texts, strict=True)
            if (speed := self._tokens_per_step()) is not None:
                bar.set_postfix_str(f"{speed:.2f} tokens a step")
        return [answers[number] for number in range(len(requests))]

    def _answered(self, requests: Sequence[Any], bar: Any) -> list[str]:
        def keep(number: int, result: Result) -> None:
            self.cache_hook.add_partial("generate_until", requests[number].args, result.text)
            self.written.append(result)
            bar.update()

        config = config_of_task(self.always, requests[0].args[1])
        asked = [conversation_in(one.args[0]) for one in requests]
        results = self.model.batch(asked, config, max_concurrency=self.together, on_result=keep)
        return [one.text for one in results]

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes into its results: how the answers came about."""
        return {
            "pasta_version": __version__,
            "parallel": self.always.parallel,
            "answers_written": len(self.written),
            "tokens_per_step": self._tokens_per_step(),
            "truncated": sum(one.truncated for one in self.written),
        }

    def _tokens_per_step(self) -> float | None:
        """Return plain tokens a step, the geometric mean over answers that have any."""
        speeds = [one.tokens_per_step for one in self.written if one.usage.plain_tokens]
        return geometric_mean(speeds) if speeds else None

    def loglikelihood(self, _requests: Sequence[Any]) -> NoReturn:
        """Refuse: a text is no answer with threads. The harness's method."""
        raise PastaError(
            "the model pasta writes answers, and scores no given text",
            hint="Take tasks that generate (output_type: generate_until), or evaluate the folder "
            "of `pasta export --to hf` with --model hf, which scores it sequentially.",
        )

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as one string, which is read again when it is asked."""
        if not add_generation_prompt:
            raise PastaError(
                "the task begins the model's answer (gen_prefix)",
                hint="Leave gen_prefix out: an answer begins with the model's own words.",
            )
        return json.dumps(chat_history)


def config_of_task(always: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """Return a task's `generation_kwargs` as a config; what they leave out is `always`'s.

    Raises PastaError for unknown ones.
    """
    from pasta_decoding.runtime.request import GREEDY_BELOW

    given = {name: one for name, one in settings.items() if one is not None}
    limits = [given.pop(name) for name in _LENGTHS if name in given]
    if limits:
        given["max_tokens"] = int(limits[0])
    until = given.pop("until", ())
    given["stop"] = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    temperature = given.get("temperature", always.temperature)
    if not given.pop("do_sample", temperature >= GREEDY_BELOW):
        given["temperature"] = 0.0
    elif "temperature" not in given:
        given["temperature"] = 1.0  # transformers' own
    return always.updated(**given)


def conversation_in(text: str) -> str | list[dict[str, str]]:
    """Return what the harness asks: a question, or a conversation that is JSON."""
    if not text.startswith('[{"role": '):
        return text
    try:
        return list(json.loads(text))
    except ValueError:
        return text
