"""Commands that answer: `run` and `compare`."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.cli.engine import EngineName, Loading, with_loading
from pasta_decoding.cli.files import say
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.runtime.answer import Answer
    from pasta_decoding.runtime.decoder import Decoder
    from pasta_decoding.runtime.events import Event
    from pasta_decoding.runtime.scheduler import Request


Prompt = Annotated[str, typer.Argument(help="The question; `-` reads it from standard input.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of the answer, tags included.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that make up this mass.")]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same answer.")]


@with_loading
def run(
    prompt: Prompt,
    show: Annotated[
        bool, typer.Option("--show", help="Draw the threads while they write.")
    ] = False,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Same weights, one thread: no promises.")
    ] = False,
    max_tokens: MaxTokens = 512,
    max_threads: Annotated[int, typer.Option(min=1, help="Live threads at most.")] = 32,
    max_seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop there, what is written stays.")
    ] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Keep this many likeliest tokens.")] = None,
    min_p: Annotated[
        float, typer.Option(help="Keep tokens with this share of the likeliest's probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: what was said, or asked, comes again less easily.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0: what was said comes again less easily.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Above 0: the more often it was said, the less easily.")
    ] = 0.0,
    seed: Seed = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Write Chrome trace events here; opens in Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
    *,
    loading: Loading,
) -> None:
    """Answer a question; independent parts of the answer are written side by side."""
    from pasta_decoding.runtime.rules import Rules
    from pasta_decoding.runtime.sampling import Sampling

    rules = Rules(max_tokens=max_tokens, max_threads=max_threads, parallel=not sequential)
    sampling = Sampling(
        temperature,
        top_p,
        top_k,
        seed,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
    )
    question = read_prompt(prompt)
    if trace is not None and loading.engine is EngineName.remote:
        raise PastaError("servers do not say when they computed what", hint="Leave out --trace.")
    decoder = loading.decoder()
    request = decoder.request(question, rules, sampling, max_seconds=max_seconds)
    if as_json:
        answer = decoder.answer(request)
        typer.echo(json.dumps(figures(decoder, answer), ensure_ascii=False))
    else:
        answer = draw(decoder, request) if show else stream(decoder, request)
        say(summary(decoder, answer))
    if trace is not None:
        write_trace(trace, decoder, answer)


@with_loading
def compare(
    prompt: Prompt,
    max_tokens: MaxTokens = 400,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
    *,
    loading: Loading,
) -> None:
    """Answer a question sequentially and in parallel, with the same weights, side by side."""
    from pasta_decoding.runtime.rules import Rules
    from pasta_decoding.runtime.sampling import Sampling

    sampling = Sampling(temperature, seed=seed)
    question = read_prompt(prompt)
    decoder = loading.decoder()
    warm = decoder.request(question, Rules(max_tokens=8), Sampling())
    decoder.answer(warm)
    answers = {
        name: decoder.answer(
            decoder.request(question, Rules(max_tokens=max_tokens, parallel=parallel), sampling)
        )
        for name, parallel in (("sequential", False), ("parallel", True))
    }
    results = {name: figures(decoder, answer) for name, answer in answers.items()}
    if as_json:
        typer.echo(json.dumps(results, ensure_ascii=False))
    else:
        show_side_by_side(results)


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


def write_trace(path: Path, decoder: Decoder, answer: Answer) -> None:
    """Write what each thread did when, whole or not at all."""
    from pasta_decoding.runtime.chrome import chrome_trace

    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(chrome_trace(answer, decoder.vocabulary)), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        message = f"cannot write {path}: {error.strerror}"
        raise PastaError(message, hint="Choose a place that you may write.") from error


def stream(decoder: Decoder, request: Request) -> Answer:
    """Print the answer in reading order as it comes."""
    from pasta_decoding.runtime.events import Ordered

    fold = Ordered()
    events = Pull(decoder.decode(request))
    for event in events:
        sys.stdout.write(fold.feed(event))
        sys.stdout.flush()
    sys.stdout.write("\n")
    return events.answer


def draw(decoder: Decoder, request: Request) -> Answer:
    """Draw the threads as live lanes, then print the answer."""
    from rich.console import Console
    from rich.live import Live

    from pasta_decoding.cli.lanes import Lanes

    lanes = Lanes()
    events = Pull(decoder.decode(request))
    console = Console(stderr=True)
    with Live(lanes, console=console, refresh_per_second=12, transient=False):
        for event in events:
            lanes.feed(event)
    if not console.is_terminal:
        console.line()  # on a terminal, rich ends the last line itself
    typer.echo(events.answer.text)
    return events.answer


@dataclass
class Pull:
    """Iterates over the events of a decode and keeps the answer that it returns."""

    source: Generator[Event, None, Answer]

    def __iter__(self) -> Generator[Event]:
        """Yield the events."""
        self.answer = yield from self.source


def figures(decoder: Decoder, answer: Answer) -> dict[str, Any]:
    """Return what `--json` prints of one answer."""
    from pasta_decoding.lang.measures import own_speedup

    plain_tokens = decoder.plain_tokens(answer.text)
    return {
        "text": answer.text,
        "annotated": answer.annotated,
        "plain_tokens": plain_tokens,
        "critical_path": answer.critical_path,
        "own_speedup": round(own_speedup(plain_tokens, answer.critical_path), 3),
        "threads": 1 + answer.chunks,
        "interventions": answer.interventions,
        "truncated": answer.truncated,
        "wall_s": round(answer.seconds, 3),
        **({} if answer.trace.sent is None else {"sent": asdict(answer.trace.sent)}),
    }


def summary(decoder: Decoder, answer: Answer) -> str:
    """Return one line of figures for a person."""
    found = figures(decoder, answer)
    cut = ", cut off at a limit" if found["truncated"] else ""
    return (
        f"{found['plain_tokens']} tokens in {found['critical_path']} steps "
        f"({found['own_speedup']:.2f}x), {found['threads']} threads, {found['wall_s']:.1f} s{cut}"
    )


def show_side_by_side(results: dict[str, dict[str, Any]]) -> None:
    """Print both answers next to each other, and what the parallel one bought."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True, show_lines=True)
    table.add_column("")
    for name in results:
        table.add_column(name, ratio=1)
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
    Console().print(table)
    sequential, parallel = (
        result["wall_s"] / max(1, result["plain_tokens"]) for result in results.values()
    )
    Console().print(f"parallel: {sequential / parallel:.2f}x as many tokens a second")
