"""Options from configs: each field with a help text is an option, in a panel of the help.

So its type, default and help stand once, in the class that it fills.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

Base = Annotated[
    Path | None,
    typer.Option(help="Folder of the base model, or its name on the hub; else the default one."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel="Output")
]
DefaultModel = Annotated[
    Path | None,
    typer.Option("--model", help="Folder of the base model; the default one if left out."),
]
MaxTokens = Annotated[
    int, typer.Option(min=1, help="End the answer after this many tokens, tags included.")
]

_ANSWER = ("max_tokens", "max_seconds", "eagerness")
_RARE = frozenset(
    {
        *("max_seconds", "top_k", "repetition_penalty"),
        *("join", "max_model_len", "threads", "device", "remote_key"),
        *("log_level", "drain_seconds", "max_body_bytes", "origins", "max_queue"),
        *("target_ms_per_token", "max_prefill_share"),
        *("lora_alpha", "lora_targets", "schedule", "gradient_checkpointing", "attention"),
        *("save_every_steps", "max_prompt_chars"),
    }
)
"""Fields whose options only `--help-all` shows."""
_NO_OPTIONS = frozenset(
    {"parallel", "stop", "max_threads", "min_p", "presence_penalty", "frequency_penalty"}
)
"""Fields that a command asks for in another way, or leaves to Python and the server."""
_PANELS = {"EngineConfig": "Engine", "GenerationConfig": "Sampling"}
"""Of the options of a config; those of `_ANSWER` have their own, others are the server's."""


class Without(frozenset[str]):
    """Says which fields of its config a command does not offer: `Annotated[Config, ...]`."""


def command(*examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of the configs that it takes, and its examples.

    The options have the defaults of that parameter's own default, if it has one, else those of the
    class; the command gets a copy of it with what was given.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        shown: list[Parameter] = []
        configs: dict[str, tuple[Any, dict[str, str]]] = {}
        for name, one in inspect.signature(function, eval_str=True).parameters.items():
            kind, *marks = get_args(one.annotation) or [one.annotation]
            if isinstance(kind, type) and is_dataclass(kind):
                default = kind() if one.default is Parameter.empty else one.default
                options = dict(_options(default, Without().union(*marks)))
                configs[name] = default, {field: each.name for field, each in options.items()}
                shown += options.values()
            else:
                shown.append(one.replace(kind=Parameter.KEYWORD_ONLY))
        if any(mark.hidden for one in shown for mark in _marks(one)):
            shown.append(_HELP_ALL)

        @wraps(function)
        def call(**values: Any) -> None:
            values.pop(_HELP_ALL.name, None)
            for name, (default, known) in configs.items():
                given = {
                    field: values.pop(option) for field, option in known.items() if option in values
                }
                values[name] = _filled(default, given)
            function(**values)

        call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        call.epilog = "Examples:\n\n" + "\n\n".join(examples) if examples else None  # type: ignore[attr-defined]
        return call

    return decorate


def _marks(option: Parameter) -> list[Any]:
    return [mark for mark in get_args(option.annotation)[1:] if hasattr(mark, "hidden")]


def _show_all(context: typer.Context, asked: bool) -> None:
    if asked:
        for one in context.command.params:
            one.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL = Parameter(
    "help_all",
    Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all", is_eager=True, callback=_show_all, help="Show rare options as well."
        ),
    ],
)


def _options(config: Any, without: frozenset[str]) -> Iterator[tuple[str, Parameter]]:
    """Yield each annotated field and its option; typer knows lists where configs have tuples."""
    hints = get_type_hints(type(config), include_extras=True)
    for name in (one.name for one in fields(config) if one.name not in without):
        hint, default = hints[name], getattr(config, name)
        if get_origin(hint) is not Annotated:
            continue
        kind, mark, *_ = get_args(hint)
        panel = "Answer" if name in _ANSWER else _PANELS.get(type(config).__name__)
        own = name
        if isinstance(mark, str):
            if name in _NO_OPTIONS:
                continue
            own = "remote_key" if name == "api_key" else name
            preset = "" if default in (None, ()) else f" ({str(default).removesuffix('.0')})"
            shown = f"{mark.removesuffix('.')}{preset}."
            mark = typer.Option(help=shown, show_default=False)
            if own == "remote_key":
                mark.envvar = "PASTA_REMOTE_KEY"
        mark = copy(mark)
        mark.hidden |= own in _RARE
        mark.rich_help_panel = mark.rich_help_panel or panel
        hint = Annotated[kind, mark]
        if get_origin(kind) is tuple:
            listed = GenericAlias(list, get_args(kind)[:1]) | None
            hint, default = Annotated[listed, mark], list(default) or None
        yield name, Parameter(own, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _filled(config: Any, given: dict[str, Any]) -> Any:
    """Return a copy of the config with what was given."""
    tuples = {
        name: tuple(value or ())
        for name, value in given.items()
        if isinstance(getattr(config, name), tuple)
    }
    return replace(config, **given | tuples)
