"""Options made from a settings class: what is shown, and what the command gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from pasta_decoding.cli.options import Without, with_options


@dataclass(frozen=True, slots=True)
class Settings:
    """What an oven is told; `brand` is nobody's option."""

    brand: str = "old"
    heat: Annotated[int, typer.Option("--degrees", min=0, help="How hot it is.")] = 180
    turn: Annotated[bool, typer.Option("--turn", help="Let the plate turn.")] = False
    foods: Annotated[tuple[str, ...], typer.Option("--food", help="What is in it.")] = ()


NEW = Settings(brand="new", heat=200, foods=("bread",))


def told(command: Callable[..., None], *arguments: str) -> str:
    """Return what a command prints, also of a wrong use."""
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments).output


@with_options
def bake(oven: Settings) -> None:
    typer.echo(oven)


@with_options
def bake_new(
    minutes: Annotated[int, typer.Argument()],
    *,
    oven: Annotated[Settings, Without({"turn"})] = NEW,
) -> None:
    typer.echo(f"{minutes} {oven}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), Settings()),
        (("--degrees", "90", "--turn"), Settings(heat=90, turn=True)),
        (("--food", "bread", "--food", "pie"), Settings(foods=("bread", "pie"))),
    ],
)
def test_a_command_gets_its_settings_with_what_was_given(
    arguments: tuple[str, ...], expected: Settings
) -> None:
    assert told(bake, *arguments) == f"{expected}\n"


def test_the_defaults_of_the_parameter_go_before_those_of_the_class() -> None:
    assert told(bake_new, "5") == f"5 {NEW}\n"
    shown = told(bake_new, "--help")
    assert "200" in shown
    assert "180" not in shown


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(bake, ["--brand", "x"]), (bake_new, ["5", "--turn"]), (bake, ["--degrees", "-1"])],
    ids=["no option", "left out", "out of range"],
)
def test_what_is_no_option_of_a_command_is_refused(command: Any, arguments: list[str]) -> None:
    assert "Usage: " in told(command, *arguments)


def test_a_function_may_be_called_without_what_has_a_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bake(heat=1)
    assert capsys.readouterr().out == f"{Settings(heat=1)}\n"
