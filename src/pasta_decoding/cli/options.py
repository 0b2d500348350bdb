"""Options from configs: each annotated field is an option, in a panel of the help.

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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
System = Annotated[
    str | None, typer.Option(help="System prompt; the chat template's own if left out.")
]

_NO_OPTIONS = frozenset(
    {
        *("parallel", "stop", "max_threads", "max_seconds", "min_p", "top_k"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "api_key"),
    }
)
"""Fields of the two configs that a command leaves to Python and to the server's requests."""
_PANELS = {
    "EngineConfig": "Engine",
    **dict.fromkeys(("GenerationConfig", "system", "sequential"), "Answer"),
    **dict.fromkeys(("show", "trace", "as_json"), "Output"),
}
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class Without(frozenset[str]):
    """Says which fields of its config a command does not offer: `Annotated[Config, ...]`."""


def command(
    *examples: str, notes: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of the configs that it takes, its notes and examples.

    The options have the defaults of that parameter's own default, if it has one, else those of the
    class; the command gets a copy of it with what was given.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        shown: list[Parameter] = []
        configs: dict[str, tuple[Any, list[str]]] = {}
        for name, one in inspect.signature(function, eval_str=True).parameters.items():
            kind, *marks = get_args(one.annotation) or [one.annotation]
            if isinstance(kind, type) and is_dataclass(kind):
                default = kind() if one.default is Parameter.empty else one.default
                options = list(_options(default, Without().union(*marks)))
                configs[name] = default, [option.name for option in options]
                shown += options
            else:
                for mark in marks if name in _PANELS else ():
                    mark.rich_help_panel = _PANELS[name]
                shown.append(one.replace(kind=Parameter.KEYWORD_ONLY))

        @wraps(function)
        def call(**values: Any) -> None:
            for name, (default, known) in configs.items():
                given = {field: values.pop(field) for field in known}
                tuples = [field for field in known if isinstance(getattr(default, field), tuple)]
                given |= {field: tuple(given[field] or ()) for field in tuples}
                values[name] = replace(default, **given)
            function(**values)

        call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        told = [notes] * bool(notes) + ["Examples:"] * bool(examples) + list(examples)
        call.epilog = "\n\n".join(told) or None  # type: ignore[attr-defined]
        return call

    return decorate


def _options(config: Any, without: frozenset[str]) -> Iterator[Parameter]:
    """Yield an option for each annotated field; typer knows lists where configs have tuples."""
    hints = get_type_hints(type(config), include_extras=True)
    for name in (one.name for one in fields(config) if one.name not in without):
        default = getattr(config, name)
        if get_origin(hints[name]) is not Annotated:
            continue
        kind, mark, *_ = get_args(hints[name])
        if isinstance(mark, str) and name in _NO_OPTIONS:
            continue
        mark = typer.Option(help=mark) if isinstance(mark, str) else copy(mark)
        mark.metavar = mark.metavar or _METAVARS.get((get_args(kind) or (kind,))[0])
        mark.rich_help_panel = mark.rich_help_panel or _PANELS.get(type(config).__name__)
        if not isinstance(default, bool):  # shorter than typer's own
            mark.show_default = False
            preset = ", ".join(default) if isinstance(default, tuple) else str(default)
            preset = "" if default in (None, (), "") else f" ({preset.removesuffix('.0')})"
            mark.help = f"{mark.help.removesuffix('.')}{preset}."
        if get_origin(kind) is tuple:
            kind, default = GenericAlias(list, get_args(kind)[:1]) | None, list(default) or None
        hint: Any = Annotated[kind, mark]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
