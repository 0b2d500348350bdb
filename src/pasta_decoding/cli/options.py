"""Options from settings classes: each annotated field is an option, in a panel of the help.

The type, the default and the help of an option stand once, in the class that it fills.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from pasta_decoding.setting import Setting

ModelOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the base model, or its name on the hub; else the default one."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
System = Annotated[
    str | None, typer.Option(help="System prompt; the chat template's own if left out.")
]

HiddenFields = frozenset[str]
"""Fields that a command does not offer: `config: Annotated[Config, HiddenFields({"seed"})]`."""
_NO_OPTIONS = HiddenFields(
    {
        "parallel",
        "stop",
        "max_threads",
        "max_seconds",
        "min_p",
        "top_k",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    }
)
"""Fields of `GenerationConfig` that commands leave to Python and to the server's requests."""
_CONFIG_PANELS = {"EngineConfig": "Engine", "GenerationConfig": "Answer"}
_PANELS = {
    "system": "Answer",
    "sequential": "Answer",
    "show": "Output",
    "trace": "Output",
    "as_json": "Output",
}
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def command(
    *examples: str, notes: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of the settings classes that it takes.

    typer calls the command with one value per option. The command itself gets an instance of each
    class. Its help ends with `notes` and `examples`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[Parameter] = []
        configs: dict[str, tuple[Callable[..., Any], list[str]]] = {}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            kind, *annotations = get_args(parameter.annotation) or [parameter.annotation]
            if isinstance(kind, type) and is_dataclass(kind):
                options = list(_options(kind, _NO_OPTIONS.union(*annotations)))
                configs[name] = (kind, [option.name for option in options])
                parameters += options
            else:
                hint = parameter.annotation
                if name in _PANELS:
                    option_info = copy(annotations[0])  # commands share it
                    option_info.rich_help_panel = _PANELS[name]
                    hint = Annotated[kind, option_info]
                parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))

        @wraps(function)
        def call(**values: Any) -> None:
            for name, (config_class, field_names) in configs.items():
                settings = {field_name: values.pop(field_name) for field_name in field_names}
                values[name] = config_class(**_lists_as_tuples(settings))
            function(**values)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.epilog = _epilog(notes, examples)  # type: ignore[attr-defined]
        return call

    return decorate


def _lists_as_tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as the classes have them; typer gives repeated options as lists."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def _epilog(notes: str, examples: tuple[str, ...]) -> str | None:
    """Return the end of a command's help, one paragraph for each note and example."""
    paragraphs = [notes] if notes else []
    if examples:
        paragraphs += ["Examples:", *examples]
    return "\n\n".join(paragraphs) or None


def _options(config_class: Any, hidden_fields: frozenset[str]) -> Iterator[Parameter]:
    """Yield an option for each field that is annotated with a `Setting`, or with its help alone."""
    hints = get_type_hints(config_class, include_extras=True)
    for field in fields(config_class):
        hint = hints[field.name]
        if field.name in hidden_fields or get_origin(hint) is not Annotated:
            continue
        kind, annotation, *_ = get_args(hint)
        setting = Setting(annotation) if isinstance(annotation, str) else annotation
        if not setting.hidden:
            yield _option(field, kind, setting, panel=_CONFIG_PANELS.get(config_class.__name__))


def _option(field: Field[Any], kind: Any, setting: Setting, *, panel: str | None) -> Parameter:
    """Translate a field into a typer option; `kind` is its type without the annotation."""
    default: Any = field.default
    help_text = setting.help
    if not isinstance(default, bool) and default not in (None, (), ""):
        # This is shorter than the default as typer shows it.
        default_text = ", ".join(default) if isinstance(default, tuple) else str(default)
        help_text += f" ({default_text.removesuffix('.0')})"
    value_type = (get_args(kind) or (kind,))[0]
    flags = [] if setting.flag is None else [setting.flag]
    option_info = typer.Option(
        *flags,
        help=help_text,
        min=setting.min,
        max=setting.max,
        metavar=setting.metavar or _METAVARS.get(value_type),
        envvar=setting.envvar,
        show_default=isinstance(default, bool),
        rich_help_panel=panel,
    )
    if get_origin(kind) is tuple:  # typer knows lists only
        kind = GenericAlias(list, (value_type,))
        default = list(default)
    option_hint: Any = Annotated[kind, option_info]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=option_hint)
