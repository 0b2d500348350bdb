"""Pasta as a model of lm-evaluation-harness, which knows no entry points: a command brings it.

    pasta-lm-eval --model pasta --model_args name=balanced,parallel=False --tasks ifeval

The command is the harness's own `lm-eval` with one model more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pasta_decoding.errors import PastaError, require

if TYPE_CHECKING:
    from pasta_decoding.api.options import Options

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
        from pasta_decoding.api.load import load

        if not str(batch_size).isdigit() or max_batch_size is not None:
            raise PastaError(
                f"batch_size is {batch_size}", hint="It is a number of answers, such as 16."
            )
        self.together = int(batch_size)
        self.always = {"parallel": parallel, "max_tokens": max_tokens}
        self.model = load(name, device=None if device == _ANY_DEVICE else device, **loading)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer each request; those with the same settings together. The harness's method."""
        groups: dict[str, list[int]] = {}
        for number, one in enumerate(requests):
            groups.setdefault(json.dumps(one.args[1], sort_keys=True), []).append(number)
        answers: dict[int, str] = {}
        for numbers in groups.values():
            answers |= zip(numbers, self._answered([requests[one] for one in numbers]), strict=True)
        return [answers[number] for number in range(len(requests))]

    def _answered(self, requests: Sequence[Any]) -> list[str]:
        options = options_of_task(requests[0].args[1], **self.always)
        asked = [conversation_in(one.args[0]) for one in requests]
        results = self.model.batch(asked, max_concurrency=self.together, **options)
        for one, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("generate_until", one.args, result.text)
        return [result.text for result in results]

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


def options_of_task(settings: Mapping[str, Any], **always: Any) -> Options:
    """Return a task's `generation_kwargs` as options; unknown ones are refused where it answers.

    always: what was said for the whole run; the task's own settings go before it.
    """
    given = {**always, **settings}
    limits = [given.pop(name) for name in _LENGTHS if name in given]
    until = given.pop("until", ())
    stops = [until] if isinstance(until, str) else list(until or ())
    if not given.pop("do_sample", given.get("temperature", 0) > 0):
        given["temperature"] = 0.0
    options: Any = given | {"stop": [stop for stop in stops if stop]}
    return options | ({"max_tokens": int(limits[0])} if limits else {})


def conversation_in(text: str) -> str | list[dict[str, str]]:
    """Return what the harness asks: a question, or a conversation that is JSON."""
    if not text.startswith('[{"role": '):
        return text
    try:
        return list(json.loads(text))
    except ValueError:
        return text
