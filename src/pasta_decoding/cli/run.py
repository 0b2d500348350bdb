"""The commands `run` and `compare`, and what `chat` shares with them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.cli.console import Lanes, opened_decoder, say, with_default
from pasta_decoding.cli.options import AsJson, System, Without, command
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.api.model import Model
    from pasta_decoding.api.model import Prompt as Conversation
    from pasta_decoding.api.streams import Result, Stream
    from pasta_decoding.runtime.answer import Answer
    from pasta_decoding.runtime.vocabulary import Vocabulary

Prompt = Annotated[str, typer.Argument(help="The question; `-` reads it from standard input.")]
FEW_OF_ANSWER = Without({"top_p", "eagerness", "seed"})
FEW_OF_ENGINE = Without({"join", "max_model_len", "cache_tokens", "threads", "device"})

_ROWS = {
    "tokens": "plain_tokens",
    "steps": "critical_path",
    "tokens a step": "tokens_per_step",
    "threads": "threads",
    "seconds": "wall_s",
}


@command(
    'pasta run --show "What are three good ways to learn a new language?"',
    "pasta run --temperature 0.8 --seed 7 --json - < question.txt",
)
def run(
    prompt: Prompt,
    system: System = None,
    show: Annotated[
        bool, typer.Option("--show", help="Draw the threads while they write.")
    ] = False,
    sequential: Annotated[
        bool,
        typer.Option("--sequential", help="Ban promises: the same weights write one thread."),
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline of the threads for Perfetto.")
    ] = None,
    as_json: AsJson = False,
    *,
    generation: GenerationConfig,
    engine: Annotated[EngineConfig, Without({"max_model_len", "cache_tokens"})],
) -> None:
    """Answer a question; independent parts of the answer are written side by side."""
    from pasta_decoding.files import to_json, write_text

    generation, engine = replace(generation, parallel=not sequential), with_default(engine)
    question = asked(prompt, system)
    if show and as_json:
        raise PastaError("--show draws for a person, --json prints for a program: leave one out")
    if trace is not None and engine.is_remote:
        raise PastaError("--trace needs an engine of this process: servers report no times")
    if trace is not None and not trace.parent.is_dir():
        raise PastaError(f"there is no folder {trace.parent} to write the trace into")
    with opened(engine) as model:
        if as_json:
            stream = model.stream(question, generation)
            list(stream)
            typer.echo(json.dumps(figures(stream.result, model, engine), ensure_ascii=False))
        else:
            stream = answer_shown(model, question, generation, show=show)
        if trace is not None:
            write_text(trace, to_json(chrome_trace(stream.answer, model.decoder.vocabulary)))


@command(
    'pasta compare "What are three good ways to learn a new language?"',
    'pasta compare --adapter runs/mine/adapter --baseline none "Why?"',
)
def compare(
    prompt: Prompt,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Adapter or merged model to compare with. Default: the trained baseline of the "
            "shipped adapters, the base model for others."
        ),
    ] = None,
    system: System = None,
    as_json: AsJson = False,
    *,
    generation: Annotated[GenerationConfig, FEW_OF_ANSWER, Without({"temperature"})],
    engine: Annotated[EngineConfig, FEW_OF_ENGINE, Without({"base_url", "dtype"})],
) -> None:
    """Answer a question in parallel, then by a sequential baseline; compare their figures.

    The baseline of the shipped adapters was trained on many of the same responses, without tags.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pasta_decoding.api.checkpoints import baseline_of

    question = asked(prompt, system)
    engine = with_default(engine)
    rival, about = baseline_of(engine, baseline)
    alone = replace(generation, parallel=False)
    results = {
        "parallel": _answered(engine, question, generation, shown=not as_json),
        "sequential": _answered(rival, question, alone, shown=not as_json),
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
    for line in (f"{rival.short_name} is {about}.", *_verdict(**results)):
        console.print(line, markup=False, highlight=False)


def _answered(
    engine: EngineConfig,
    question: list[dict[str, str]],
    generation: GenerationConfig,
    *,
    shown: bool,
) -> dict[str, Any]:
    """Load a model, answer with it once it is warm, and return the figures."""
    with opened(engine) as model:
        model.answer(question, max_tokens=8)
        if shown:
            say(f"\n{engine.short_name}, {'parallel' if generation.parallel else 'sequential'}:")
            result = answer_shown(model, question, generation, show=False).result
        else:
            result = model.answer(question, generation)
        found = figures(result, model, engine)
    return {"checkpoint": engine.short_name} | found


def _verdict(sequential: dict[str, Any], parallel: dict[str, Any]) -> Iterator[str]:
    """Yield what parallel decoding bought, and what spoils the comparison."""
    pace = [result["wall_s"] / max(1, result["plain_tokens"]) for result in (sequential, parallel)]
    yield (
        f"parallel: {parallel['tokens_per_step']:.2f} tokens a step, "
        f"{pace[0] / pace[1]:.2f}x the baseline's tokens a second"
    )
    for name, result in {"sequential": sequential, "parallel": parallel}.items():
        if result["truncated"]:
            yield f"The {name} answer was cut off at a limit: its tokens and seconds say little."


def opened(engine: EngineConfig) -> Model:
    """Load the checkpoint onto the engine, or find the servers that have it."""
    from pasta_decoding.api.model import Model

    return Model(opened_decoder(engine))


def opening(system: str | None) -> list[dict[str, str]]:
    """Return how a conversation begins: with a system prompt, if there is one."""
    return [] if system is None else [{"role": "system", "content": system}]


def asked(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return the question, from standard input for `-`. Refuses what is empty or not UTF-8."""
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise PastaError(f"the prompt is not UTF-8 (byte {error.start})") from error
    if not prompt.strip():
        raise PastaError("the prompt is empty")
    return [*opening(system), {"role": "user", "content": prompt}]


def answer_shown(
    model: Model, prompt: Conversation, generation: GenerationConfig, *, show: bool
) -> Stream[Any]:
    """Print an answer while it is written, as lanes or in reading order, and a line of figures."""
    if show:
        stream = _draw(model, prompt, generation)
    else:
        with model.stream(prompt, generation) as stream:
            for text in stream:
                print(text, end="", flush=True)
        print()
    result, threads = stream.result, 1 + len(stream.result.threads)
    say(
        f"{result.usage.plain_tokens} tokens in {result.critical_path} steps "
        f"({result.tokens_per_step:.2f}x), {threads} thread{'s' * (threads > 1)}, "
        f"{result.seconds:.1f} s{', cut off at a limit' * result.truncated}"
    )
    return stream


def _draw(model: Model, prompt: Conversation, generation: GenerationConfig) -> Stream[Any]:
    from rich.console import Console
    from rich.live import Live

    lanes, console = Lanes(), Console(stderr=True)
    live = Live(lanes, console=console, refresh_per_second=12)
    with model.events(prompt, generation) as stream, live:
        for event in stream:
            lanes.feed(event)
    if not console.is_terminal:
        console.line()  # on a terminal, rich ends the last line itself
    typer.echo(stream.result.text)
    return stream


def chrome_trace(answer: Answer, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return Chrome trace events: in Perfetto, one lane a thread, one box a token.

    This is the JSON object form of the Trace Event Format; times are microseconds.
    """
    from pasta_decoding.lang.layout import MAIN
    from pasta_decoding.lang.tree import Chunk

    trace, control = answer.trace, vocabulary.control
    chunks = [node for node in answer.tree if isinstance(node, Chunk)]
    topics = {MAIN: "main"} | {k: chunk.topic or "" for k, chunk in enumerate(chunks, start=1)}
    events = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": k, "args": {"name": f"{k} {topic}"}}
        for k, topic in topics.items()
    ]
    tags = {token: f"promise {tokens}" for tokens, token in control.promise_close.items()}
    tags |= {control.promise_open: "promise", control.async_open: "async"}
    tags |= {control.async_close: "/async", control.sync: "sync"}

    def box(name: str, thread: int, start_s: float, seconds: float, about: dict[str, Any]) -> None:
        ts, dur = round(start_s * 1e6, 1), round(seconds * 1e6, 1)
        about = {"pid": 0, "tid": thread, "ts": ts, "dur": dur, "args": about}
        events.append({"ph": "X", "name": name} | about)

    box("prefill", MAIN, 0.0, trace.prefill_s, {"tokens": trace.prompt_tokens})
    starts_s = list(accumulate(trace.step_s, initial=trace.prefill_s))
    for fed in trace.fed:
        if fed.step <= len(trace.step_s):  # others were decided, but never fed
            step_s = trace.step_s[fed.step - 1]
            where = {"step": fed.step, "position": fed.position}
            name = tags.get(fed.token) or vocabulary.texts[fed.token] or f"<{fed.token}>"
            box(name, fed.thread, starts_s[fed.step - 1], step_s, where)
    return {"traceEvents": events}


def figures(result: Result, model: Model, engine: EngineConfig) -> dict[str, Any]:
    """Return what `--json` prints of one answer. Completion tokens count tags as well."""
    from pasta_decoding.models.load import known_base

    name = engine.adapter_name
    return {
        "text": result.text,
        "annotated": result.annotated,
        "model": str(engine.whole or engine.model or known_base(engine.adapter_name)),
        "adapter": name if engine.whole is None and model.decoder.parallel else None,
        "engine": model.decoder.name,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.fed_tokens,
        "plain_tokens": result.usage.plain_tokens,
        "critical_path": result.critical_path,
        "tokens_per_step": round(result.tokens_per_step, 3),
        "threads": 1 + len(result.threads),
        "interventions": result.interventions,
        "truncated": result.truncated,
        "wall_s": round(result.seconds, 3),
        **({} if result.sent is None else {"sent": asdict(result.sent)}),
    }
