"""Options from settings: a field that is annotated with a `typer.Option` is an option.

So its name, type, default and help stand once, in the class that it fills.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
DefaultModel = Annotated[
    Path | None,
    typer.Option("--model", help="Folder of the base model; the default one if left out."),
]


MaxTokens = Annotated[
    int, typer.Option(min=1, help="End the answer after this many tokens, tags included.")
]
_EXTRAS: dict[str, dict[str, Any]] = {
    "api_key": {
        "names": ("--remote-key",),
        "envvar": "PASTA_REMOTE_KEY",
        "show_envvar": True,
    },
    "adapter": {"show_default": False},
}
"""Fields whose options need more than a name and a help text."""
_NO_OPTIONS = frozenset({"parallel", "stop"})
"""Fields of a config that a command asks for in another way, or not at all."""


class Without(frozenset[str]):
    """Says which fields of its settings a command does not offer: `Annotated[Settings, ...]`."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command options in the place of each settings object that it takes.

    They have the defaults of that parameter's own default, if it has one, else those of the class;
    the command gets a copy of it with what was given.
    """
    shown: list[Parameter] = []
    settings: dict[str, tuple[Any, dict[str, str]]] = {}
    for name, one in inspect.signature(command, eval_str=True).parameters.items():
        kind, *marks = get_args(one.annotation) or [one.annotation]
        if isinstance(kind, type) and is_dataclass(kind):
            default = kind() if one.default is Parameter.empty else one.default
            options = dict(_options(default, Without().union(*marks)))
            settings[name] = default, {field: one.name for field, one in options.items()}
            shown += options.values()
        else:
            shown.append(one.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def call(**values: Any) -> None:
        for name, (default, known) in settings.items():
            given = {
                field: values.pop(option) for field, option in known.items() if option in values
            }
            values[name] = _filled(default, given)
        command(**values)

    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return call


def _options(settings: Any, without: frozenset[str]) -> Iterator[tuple[str, Parameter]]:
    """Yield each annotated field and its option; typer knows lists where settings have tuples."""
    hints = get_type_hints(type(settings), include_extras=True)
    for name in (one.name for one in fields(settings) if one.name not in without):
        hint, default = hints[name], getattr(settings, name)
        if get_origin(hint) is not Annotated:
            continue
        kind, mark, *_ = get_args(hint)
        own = name
        if isinstance(mark, str):
            if name in _NO_OPTIONS:
                continue
            extras = dict(_EXTRAS.get(name, {}))
            mark = typer.Option(*extras.pop("names", ()), help=mark, **extras)
            own = f"remote_{name}" if name == "api_key" else name
        hint = Annotated[kind, mark]
        if get_origin(kind) is tuple:
            listed = GenericAlias(list, get_args(kind)[:1]) | None
            hint, default = Annotated[listed, mark], list(default) or None
        yield name, Parameter(own, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _filled(settings: Any, given: dict[str, Any]) -> Any:
    """Return a copy of the settings with what was given."""
    tuples = {
        name: tuple(value or ())
        for name, value in given.items()
        if isinstance(getattr(settings, name), tuple)
    }
    return replace(settings, **given | tuples)
