"""Options from configs: each annotated field is an option, in a panel of the help.

So its type, default and help stand once, in the class that it fills.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
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

HiddenFields = frozenset[str]
"""The fields of a config that a command does not offer: `Annotated[Config, HiddenFields(...)]`."""
_NO_OPTIONS = HiddenFields(
    {
        *("parallel", "stop", "max_threads", "max_seconds", "min_p", "top_k"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    }
)
"""Fields of `GenerationConfig` that commands leave to Python and to the server's requests."""
_CONFIG_PANELS = {"EngineConfig": "Engine", "GenerationConfig": "Answer"}
_PANELS = {
    **dict.fromkeys(("system", "sequential"), "Answer"),
    **dict.fromkeys(("show", "trace", "as_json"), "Output"),
}
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def command(
    *examples: str, notes: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of the configs that it takes, its notes and examples.

    The command gets each config with what was given, the rest as the class has it.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        shown: list[Parameter] = []
        configs: dict[str, tuple[Callable[..., Any], list[str]]] = {}
        for name, one in inspect.signature(function, eval_str=True).parameters.items():
            kind, *marks = get_args(one.annotation) or [one.annotation]
            if isinstance(kind, type) and is_dataclass(kind):
                options = list(_options(kind, _NO_OPTIONS.union(*marks)))
                configs[name] = kind, [option.name for option in options]
                shown += options
            else:
                hint = one.annotation
                if name in _PANELS:
                    mark = copy(marks[0])  # commands share it
                    mark.rich_help_panel = _PANELS[name]
                    hint = Annotated[kind, mark]
                shown.append(one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))

        @wraps(function)
        def call(**values: Any) -> None:
            for name, (kind, known) in configs.items():
                given = {field: values.pop(field) for field in known}
                lists = {k: tuple(one) for k, one in given.items() if isinstance(one, list)}
                values[name] = kind(**given | lists)
            function(**values)

        call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        told = [notes, *(("Examples:", *examples) if examples else ())]
        call.epilog = "\n\n".join(filter(None, told)) or None  # type: ignore[attr-defined]
        return call

    return decorate


def _options(config: Any, without: frozenset[str]) -> Iterator[Parameter]:
    """Yield an option for each annotated field; typer knows lists where configs have tuples."""
    hints = get_type_hints(config, include_extras=True)
    for one in fields(config):
        if one.name in without or get_origin(hints[one.name]) is not Annotated:
            continue
        kind, mark, *_ = get_args(hints[one.name])
        mark = typer.Option(help=mark) if isinstance(mark, str) else copy(mark)
        mark.rich_help_panel = mark.rich_help_panel or _CONFIG_PANELS.get(config.__name__)
        mark.metavar = mark.metavar or _METAVARS.get((get_args(kind) or (kind,))[0])
        default: Any = one.default
        if not isinstance(default, bool):  # shorter than typer's own
            mark.show_default = False
            preset = ", ".join(default) if isinstance(default, tuple) else str(default)
            if default not in (None, (), ""):
                mark.help += f" ({preset.removesuffix('.0')})"
        if get_origin(kind) is tuple:
            kind, default = GenericAlias(list, get_args(kind)[:1]), list(default)
        hint: Any = Annotated[kind, mark]
        yield Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
