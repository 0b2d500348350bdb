"""The commands `run`, `compare` and `chat`."""

import json
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.api.model import Model, Prompt
from pasta_decoding.api.streams import Result, Stream
from pasta_decoding.cli.console import Lanes, say
from pasta_decoding.cli.opening import decoder_for, with_default
from pasta_decoding.cli.options import AsJson, HiddenFields, System, command
from pasta_decoding.engines.support import machine_load
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import to_json, write_text
from pasta_decoding.models.catalog import (
    NO_ADAPTER,
    adapter_name,
    baseline_of,
    known_base_of,
    recorded_baseline,
    short_name,
    whole_model,
)

Question = Annotated[str, typer.Argument(help="The question; `-` reads it from standard input.")]
RARE_ANSWER_FIELDS = HiddenFields({"top_p", "eagerness", "seed"})
RARE_ENGINE_FIELDS = HiddenFields({"join", "max_model_len", "cache_tokens", "device"})

CHAT_HELP = """/new    forget what was said
/show   draw the threads while they write, or stop drawing them
/quit   leave, as Ctrl-D does
Ctrl-C stops an answer; that turn is forgotten."""


@command(
    'pasta run --show "What are three good ways to learn a new language?"',
    "pasta run --temperature 0.8 --seed 7 --json - < question.txt",
)
def run(
    prompt: Question,
    system: System = None,
    show: Annotated[bool, typer.Option("--show", help="Draw the threads as they write.")] = False,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Let the adapter's baseline write one thread.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline of the threads for Perfetto.")
    ] = None,
    as_json: AsJson = False,
    *,
    generation: GenerationConfig,
    engine: Annotated[EngineConfig, HiddenFields({"max_model_len", "cache_tokens"})],
) -> None:
    """Answer a question; threads write independent parts of the answer at the same time."""
    generation = replace(generation, parallel=not sequential)
    engine = with_default(engine)
    baseline = None
    if sequential:
        baseline = recorded_baseline(engine.adapter, engine.model, is_remote=engine.is_remote)
        engine = replace(engine, adapter=baseline or engine.adapter)
    conversation = conversation_of(prompt, system)
    if show and as_json:
        raise PastaError("--show draws for a person, --json prints for a program: leave one out")
    if trace is not None and engine.is_remote:
        raise PastaError("--trace needs an engine of this process: servers report no times")
    if trace is not None and not trace.parent.is_dir():
        raise PastaError(f"there is no folder {trace.parent} to write the trace into")
    decoder = decoder_for(engine)
    if baseline is not None:
        decoder = replace(decoder, parallel=False)
    with Model(decoder) as model:
        if as_json:
            stream = model.stream(conversation, generation)
            list(stream)  # run it to its end
            typer.echo(json.dumps(answer_json(stream.result, model, engine), ensure_ascii=False))
        else:
            stream = print_answer(model, conversation, generation, show=show)
        if trace is not None:
            from pasta_decoding.cli.trace import chrome_trace

            write_text(trace, to_json(chrome_trace(stream.answer, model.decoder.vocabulary)))


@command(
    'pasta compare "What are three good ways to learn a new language?"',
    'pasta compare --adapter runs/mine/adapter --baseline none "Why?"',
)
def compare(
    prompt: Question,
    baseline: Annotated[
        str | None,
        typer.Option(help="Adapter or merged model; else a shipped baseline, or the base model."),
    ] = None,
    system: System = None,
    as_json: AsJson = False,
    *,
    generation: Annotated[GenerationConfig, RARE_ANSWER_FIELDS, HiddenFields({"temperature"})],
    engine: Annotated[EngineConfig, RARE_ENGINE_FIELDS, HiddenFields({"base_url", "dtype"})],
) -> None:
    """Answer a question in parallel, then by a sequential baseline; compare their figures.

    The baseline of the shipped adapters was trained on many of the same responses, without tags.
    """
    conversation = conversation_of(prompt, system)
    engine = with_default(engine)
    baseline_model = baseline_of(engine.adapter, engine.model, baseline, is_remote=engine.is_remote)
    rival = replace(engine, adapter=baseline_model.adapter, model=baseline_model.model)
    load_average, cores = machine_load()
    parallel = _compared("parallel", engine, generation, conversation, as_json=as_json)
    sequential = _compared("sequential", rival, generation, conversation, as_json=as_json)
    if as_json:
        results = {"parallel": parallel, "sequential": sequential}
        typer.echo(json.dumps(results, ensure_ascii=False))
        return
    parallel_token_s = parallel["wall_s"] / max(1, parallel["plain_tokens"])
    sequential_token_s = sequential["wall_s"] / max(1, sequential["plain_tokens"])
    speedup = sequential_token_s / parallel_token_s
    say(f"\n{short_name(rival.adapter, rival.model)} is {baseline_model.description}.")
    say(f"The parallel answer has {speedup:.2f}x its tokens a second.")
    say(f"That was measured once, with a load of {load_average:.1f} on {cores} cores.")
    if parallel["truncated"] or sequential["truncated"]:
        say("An answer that was cut off says little by its tokens and seconds.")


def _compared(
    name: str,
    engine: EngineConfig,
    generation: GenerationConfig,
    conversation: Prompt,
    *,
    as_json: bool,
) -> dict[str, Any]:
    """Answer with one of the two models and return its figures.

    The model is freed at the end, so that only one model is in memory.
    """
    checkpoint = short_name(engine.adapter, engine.model)
    decoder = decoder_for(engine)
    if name == "sequential":
        decoder = replace(decoder, parallel=False)  # with promises banned, whatever was named
    with Model(decoder) as model:
        model.answer(conversation, max_tokens=8)  # a first answer is slower
        if as_json:
            result = model.answer(conversation, generation)
        else:
            say(f"\n{name}: {checkpoint}")
            result = print_answer(model, conversation, generation, show=False).result
        return {"checkpoint": checkpoint} | answer_json(result, model, engine)


@command('pasta chat --system "Answer in two sentences."', "pasta chat --engine torch")
def chat(
    system: System = None,
    *,
    generation: Annotated[GenerationConfig, RARE_ANSWER_FIELDS],
    engine: Annotated[EngineConfig, RARE_ENGINE_FIELDS],
) -> None:
    """Chat with the model; each answer sees the conversation before it."""
    history = system_messages(system)
    show = False
    with Model(decoder_for(with_default(engine))) as model:
        say("Ctrl-C stops an answer, Ctrl-D leaves, /help names the commands.")
        while (line := read_line()) not in (None, "/quit"):
            if line == "/new":
                history = system_messages(system)
            elif line == "/show":
                show = not show
            elif line and line.startswith("/"):
                say(CHAT_HELP)
            elif line:
                conversation = [*history, {"role": "user", "content": line}]
                try:
                    text = print_answer(model, conversation, generation, show=show).result.text
                    history = [*conversation, {"role": "assistant", "content": text}]
                except KeyboardInterrupt:
                    say("\nstopped; that turn is forgotten")
                except PastaError as error:
                    say(f"pasta: {error}; /new begins anew")


def read_line() -> str | None:
    """Return the next line of standard input, stripped, or None at its end."""
    with suppress(ImportError):
        import readline  # noqa: F401 (it gives `input` editing and a history)
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt).strip()
        except EOFError:
            if prompt:
                typer.echo()
            return None
        except KeyboardInterrupt:
            typer.echo()
        except UnicodeDecodeError as error:
            say(f"pasta: that line is not UTF-8 (byte {error.start})")


def system_messages(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def conversation_of(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return system prompt and question; `-` reads the question from standard input.

    Raises PastaError if the question is empty or not UTF-8.
    """
    if prompt == "-":
        with errors_as("the prompt is not UTF-8", UnicodeDecodeError):
            prompt = sys.stdin.buffer.read().decode("utf-8")
    if not prompt.strip():
        raise PastaError("the prompt is empty")
    return [*system_messages(system), {"role": "user", "content": prompt}]


def print_answer(
    model: Model, conversation: Prompt, generation: GenerationConfig, *, show: bool
) -> Stream[Any]:
    """Print an answer while it is written, then a line of figures; return the finished stream.

    show: draw the threads as lanes on standard error, and print the text at the end.
    """
    stream: Stream[Any]
    if show:
        lanes = Lanes()
        console = Console(stderr=True)
        live = Live(lanes, console=console, refresh_per_second=12)
        with model.events(conversation, generation) as stream, live:
            for event in stream:
                lanes.feed(event)
        if not console.is_terminal:
            console.line()  # on a terminal, rich ends the last line itself
        typer.echo(stream.result.text)
    else:
        with model.stream(conversation, generation) as stream:
            for text in stream:
                print(text, end="", flush=True)
        print()
    result = stream.result
    threads = 1 + len(result.threads)
    say(
        f"{result.usage.plain_tokens} tokens in {result.critical_path} steps "
        f"({result.tokens_per_step:.2f}x), {threads} {'thread' if threads == 1 else 'threads'}, "
        f"{result.seconds:.1f} s{limit_notice(result, generation)}"
    )
    return stream


def limit_notice(result: Result, generation: GenerationConfig) -> str:
    """Return which limit cut the answer, as the end of a line; nothing if none did."""
    if not result.truncated:
        return ""
    if result.hit_limit:
        return f", cut off at --max-tokens {generation.max_tokens} (tags count)"
    if result.finish_reason == "length":
        return ", cut off by the time limit"
    return ", a thread was cut off far past the length that it had promised"


def answer_json(result: Result, model: Model, engine: EngineConfig) -> dict[str, Any]:
    """Return the figures of one answer for `--json`. Completion tokens include those of tags."""
    whole_path = whole_model(engine.adapter, engine.model)
    adapter = adapter_name(engine.adapter, engine.model)
    figures: dict[str, Any] = {
        "text": result.text,
        "annotated": result.annotated,
        "model": str(whole_path or engine.model or known_base_of(adapter)),
        "adapter": adapter if whole_path is None and adapter != NO_ADAPTER else None,
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
    }
    if result.sent is not None:
        figures["sent"] = asdict(result.sent)
    return figures
