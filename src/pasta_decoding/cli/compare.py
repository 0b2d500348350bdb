"""The command `compare`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import typer

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.cli.chat import FEW_OF_ANSWER, FEW_OF_ENGINE
from pasta_decoding.cli.options import AsJson, System, Without, command
from pasta_decoding.cli.run import Prompt, figures, opened, opening, read_prompt

_ROWS = {
    "text": "text",
    "tokens": "plain_tokens",
    "steps": "critical_path",
    "tokens a step": "tokens_per_step",
    "threads": "threads",
    "seconds": "wall_s",
}


@command(
    'pasta compare "What are three good ways to learn a new language?"',
    'pasta compare --adapter runs/mine/adapter --baseline none "Why?"',
)
def compare(
    prompt: Prompt,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Adapter or merged model to compare with. Default: `sequential` for the shipped "
            "adapters, the base model for others."
        ),
    ] = None,
    system: System = None,
    as_json: AsJson = False,
    *,
    generation: Annotated[GenerationConfig, FEW_OF_ANSWER, Without({"temperature"})],
    engine: Annotated[EngineConfig, FEW_OF_ENGINE, Without({"base_url", "dtype"})],
) -> None:
    """Answer a question in parallel and by a sequential baseline, side by side.

    The baseline of the shipped adapters was trained on most of the same responses, without tags.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pasta_decoding.api.checkpoints import baseline_of

    question = [*opening(system), {"role": "user", "content": read_prompt(prompt)}]
    rival, about = baseline_of(engine, baseline)
    alone = replace(generation, parallel=False)
    results = {
        "sequential": answered(rival, question, alone),
        "parallel": answered(engine, question, generation),
    }
    if as_json:
        typer.echo(json.dumps(results, ensure_ascii=False))
        return
    table = Table(expand=True, show_lines=True)
    table.add_column("")
    for name, result in results.items():
        table.add_column(f"{name}: {result['checkpoint']}", ratio=1)
    for label, key in _ROWS.items():
        table.add_row(label, *(Text(str(result[key])) for result in results.values()))
    console = Console()
    console.print(table)
    for line in (f"{rival.short_name} is {about}.", *verdict(**results)):
        console.print(line, markup=False, highlight=False)


def answered(
    engine: EngineConfig, question: list[dict[str, str]], generation: GenerationConfig
) -> dict[str, Any]:
    """Load a model, answer with it once it is warm, and return the figures."""
    with opened(engine) as model:
        model.answer(question, max_tokens=8)
        found = figures(model.answer(question, generation), model, engine)
    return {"checkpoint": engine.short_name} | found


def verdict(sequential: dict[str, Any], parallel: dict[str, Any]) -> Iterator[str]:
    """Yield what parallel decoding bought, and what spoils the comparison."""
    pace = [result["wall_s"] / max(1, result["plain_tokens"]) for result in (sequential, parallel)]
    yield (
        f"parallel: {parallel['tokens_per_step']:.2f} tokens a step, "
        f"{pace[0] / pace[1]:.2f}x the baseline's tokens a second"
    )
    for name, result in {"sequential": sequential, "parallel": parallel}.items():
        if result["truncated"]:
            yield f"The {name} answer was cut off at a limit: its tokens and seconds say little."
