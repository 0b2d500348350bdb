"""Commands that answer: `run` and `compare`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.cli.files import cache_folder, say
from pasta_decoding.cli.options import AsJson, Without, with_options
from pasta_decoding.errors import PastaError
from pasta_decoding.files import written_whole

if TYPE_CHECKING:
    from pasta_decoding.api.model import Model
    from pasta_decoding.api.model import Prompt as Conversation
    from pasta_decoding.api.result import Result
    from pasta_decoding.api.streams import Stream
    from pasta_decoding.models.prompt import Message
    from pasta_decoding.runtime.answer import Answer
    from pasta_decoding.runtime.vocabulary import Vocabulary


Prompt = Annotated[str, typer.Argument(help="The question; `-` reads it from standard input.")]
System = Annotated[
    str | None,
    typer.Option(help="What the model is told before; else what its chat template says by itself."),
]


BaselineName = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        help="Adapter or whole model to compare with; else `sequential` for adapters that ship, "
        "and the base model for others.",
    ),
]


RARE = frozenset(
    {
        "max_threads",
        "max_seconds",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    }
)


@with_options
def run(
    prompt: Prompt,
    system: System = None,
    show: Annotated[
        bool, typer.Option("--show", help="Draw the threads while they write.")
    ] = False,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Ban promises: the same weights, one thread.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline of the threads here; Perfetto opens it.")
    ] = None,
    as_json: AsJson = False,
    *,
    answer: GenerationConfig,
    loading: EngineConfig,
) -> None:
    """Answer a question; independent parts of the answer are written side by side."""
    config = replace(answer, parallel=not sequential)
    question = conversation(system, read_prompt(prompt))
    if show and as_json:
        raise PastaError(
            "--show draws for a person, --json prints for a program", hint="Leave one of them out."
        )
    if trace is not None and loading.is_remote:
        raise PastaError("servers do not say when they computed what", hint="Leave out --trace.")
    with opened(loading) as model:
        if as_json:
            stream = model.stream(question, config)
            typer.echo(json.dumps(figures(read_on(stream)), ensure_ascii=False))
            written = stream.answer
        else:
            _, written = answer_shown(model, question, config, show=show)
        if trace is not None:
            write_trace(trace, written, model.decoder.vocabulary)


@with_options
def compare(
    prompt: Prompt,
    baseline: BaselineName = None,
    system: System = None,
    as_json: AsJson = False,
    *,
    answer: Annotated[GenerationConfig, Without(RARE | {"top_p"})],
    loading: EngineConfig,
) -> None:
    """Answer a question in parallel and by a sequential baseline, side by side.

    The baseline of the shipped adapters was trained on the same responses with the tags taken out.
    """
    from pasta_decoding.api.baseline import baseline_of, checkpoint_name

    question = conversation(system, read_prompt(prompt))
    rival = baseline_of(loading, baseline)
    alone = replace(answer, parallel=False)
    results = {
        "sequential": {"checkpoint": rival.name} | answered(rival.settings, question, alone),
        "parallel": {"checkpoint": checkpoint_name(loading)} | answered(loading, question, answer),
    }
    if as_json:
        typer.echo(json.dumps(results, ensure_ascii=False))
    else:
        show_side_by_side(results, about=f"{rival.name} is {rival.about}.")


def answered(
    settings: EngineConfig, question: Conversation, config: GenerationConfig
) -> dict[str, Any]:
    """Load a model, answer with it once it is warm, and return the figures."""
    with opened(settings) as model:
        model.answer(question, max_tokens=8)
        return figures(model.answer(question, config))


def opened(settings: EngineConfig) -> Model:
    """Load the checkpoint onto the engine, or find the servers that have it."""
    from pasta_decoding.api.model import Model
    from pasta_decoding.api.opening import open_decoder

    return Model(open_decoder(settings, cache_folder()))


def conversation(system: str | None, question: str) -> list[Message]:
    """Return a question as a conversation, after what the model is told before it."""
    from pasta_decoding.models.prompt import Message

    opening = [] if system is None else [Message("system", system)]
    return [*opening, Message("user", question)]


def answer_shown(
    model: Model, prompt: Conversation, config: GenerationConfig, *, show: bool
) -> tuple[Result, Answer]:
    """Print an answer while it is written, as lanes or in reading order, and a line of figures."""
    result, answer = (draw if show else show_text)(model, prompt, config)
    say(summary(result))
    return result, answer


def read_prompt(prompt: str) -> str:
    """Return the question, from standard input for `-`. Refuses what is empty or not UTF-8."""
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"the prompt is not UTF-8 (byte {error.start})"
            raise PastaError(message, hint="Save it as UTF-8.") from error
    if not prompt.strip():
        raise PastaError("the prompt is empty", hint='Ask something: pasta run "Why ...?"')
    return prompt


def write_trace(path: Path, answer: Answer, vocabulary: Vocabulary) -> None:
    """Write what each thread did when, whole or not at all."""
    from pasta_decoding.runtime.chrome import chrome_trace

    try:
        with written_whole(path) as partial:
            partial.write_text(json.dumps(chrome_trace(answer, vocabulary)), encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise PastaError(message, hint="Choose a place that you may write.") from error


def read_on(stream: Stream[str]) -> Result:
    """Read a stream to its end, and return what came of it."""
    with stream:
        for _ in stream:
            pass
    return stream.result


def show_text(
    model: Model, prompt: Conversation, config: GenerationConfig
) -> tuple[Result, Answer]:
    """Print the answer in reading order as it comes."""
    with model.stream(prompt, config) as stream:
        for text in stream:
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return stream.result, stream.answer


def draw(model: Model, prompt: Conversation, config: GenerationConfig) -> tuple[Result, Answer]:
    """Draw the threads as live lanes, then print the answer."""
    from rich.console import Console
    from rich.live import Live

    from pasta_decoding.cli.lanes import Lanes

    lanes = Lanes()
    console = Console(stderr=True)
    with (
        model.events(prompt, config) as stream,
        Live(lanes, console=console, refresh_per_second=12, transient=False),
    ):
        for event in stream:
            lanes.feed(event)
    if not console.is_terminal:
        console.line()  # on a terminal, rich ends the last line itself
    typer.echo(stream.result.text)
    return stream.result, stream.answer


def figures(result: Result) -> dict[str, Any]:
    """Return what `--json` prints of one answer."""
    return {
        "text": result.text,
        "annotated": result.annotated,
        "plain_tokens": result.usage.plain_tokens,
        "critical_path": result.critical_path,
        "own_speedup": round(result.own_speedup, 3),
        "threads": 1 + len(result.threads),
        "interventions": result.interventions,
        "truncated": result.truncated,
        "wall_s": round(result.seconds, 3),
        **({} if result.sent is None else {"sent": asdict(result.sent)}),
    }


def summary(result: Result) -> str:
    """Return one line of figures for a person."""
    cut = ", cut off at a limit" if result.truncated else ""
    return (
        f"{result.usage.plain_tokens} tokens in {result.critical_path} steps "
        f"({result.own_speedup:.2f}x), {1 + len(result.threads)} threads, "
        f"{result.seconds:.1f} s{cut}"
    )


def show_side_by_side(results: dict[str, dict[str, Any]], *, about: str) -> None:
    """Print both answers next to each other, and what parallel decoding bought.

    about: what the sequential side is.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, show_lines=True)
    table.add_column("")
    for name, result in results.items():
        table.add_column(f"{name}: {result['checkpoint']}", ratio=1)
    rows = {
        "text": "text",
        "tokens": "plain_tokens",
        "steps": "critical_path",
        "tokens a step": "own_speedup",
        "threads": "threads",
        "seconds": "wall_s",
    }
    for label, key in rows.items():
        table.add_row(label, *(Text(str(result[key])) for result in results.values()))
    console = Console()
    console.print(table)
    for line in (about, *verdict(results["sequential"], results["parallel"])):
        console.print(line, markup=False, highlight=False)


def verdict(sequential: dict[str, Any], parallel: dict[str, Any]) -> Iterator[str]:
    """Yield what parallel decoding bought, and what spoils the comparison."""
    pace = [result["wall_s"] / max(1, result["plain_tokens"]) for result in (sequential, parallel)]
    yield (
        f"parallel: {parallel['own_speedup']:.2f} tokens a step, "
        f"{pace[0] / pace[1]:.2f}x the baseline's tokens a second"
    )
    for name, result in (("sequential", sequential), ("parallel", parallel)):
        if result["truncated"]:
            yield f"The {name} answer was cut off at a limit: its tokens and seconds say little."
