"""The commands `run`, `compare` and `chat`."""

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from pasta_decoding.answer.record import Answer
from pasta_decoding.answer.vocabulary import Vocabulary
from pasta_decoding.api.config import EngineConfig, GenerationConfig
from pasta_decoding.api.defaults import default_adapter
from pasta_decoding.api.model import Model
from pasta_decoding.api.model import Prompt as Conversation
from pasta_decoding.api.opening import open_decoder
from pasta_decoding.api.streams import Result, Stream
from pasta_decoding.cli.console import Lanes, cache_folder, say
from pasta_decoding.cli.options import AsJson, HiddenFields, System, command
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import to_json, write_text
from pasta_decoding.lang.layout import MAIN
from pasta_decoding.lang.tree import Chunk
from pasta_decoding.models.catalog import (
    adapter_name,
    baseline_of,
    known_base_of,
    short_name,
    whole_model,
)
from pasta_decoding.scheduling.decoder import Decoder

Prompt = Annotated[str, typer.Argument(help="The question; `-` reads it from standard input.")]
FEW_OF_ANSWER = HiddenFields({"top_p", "eagerness", "seed"})
FEW_OF_ENGINE = HiddenFields({"join", "max_model_len", "cache_tokens", "threads", "device"})

CHAT_HELP = """/new    forget what was said
/show   draw the threads while they write, or stop drawing them
/quit   leave, as Ctrl-D does
Ctrl-C stops an answer; that turn is forgotten."""


@command(
    'pasta run --show "What are three good ways to learn a new language?"',
    "pasta run --temperature 0.8 --seed 7 --json - < question.txt",
)
def run(
    prompt: Prompt,
    system: System = None,
    show: Annotated[bool, typer.Option("--show", help="Draw the threads as they write.")] = False,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Ban promises: the same weights write one thread.")
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
    generation, engine = replace(generation, parallel=not sequential), with_default(engine)
    question = asked(prompt, system)
    if show and as_json:
        raise PastaError("--show draws for a person, --json prints for a program: leave one out")
    if trace is not None and engine.is_remote:
        raise PastaError("--trace needs an engine of this process: servers report no times")
    if trace is not None and not trace.parent.is_dir():
        raise PastaError(f"there is no folder {trace.parent} to write the trace into")
    with Model(opened_decoder(engine)) as model:
        if as_json:
            stream = model.stream(question, generation)
            list(stream)
            typer.echo(json.dumps(answer_json(stream.result, model, engine), ensure_ascii=False))
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
        typer.Option(help="Adapter or merged model; else a shipped baseline, or the base model."),
    ] = None,
    system: System = None,
    as_json: AsJson = False,
    *,
    generation: Annotated[GenerationConfig, FEW_OF_ANSWER, HiddenFields({"temperature"})],
    engine: Annotated[EngineConfig, FEW_OF_ENGINE, HiddenFields({"base_url", "dtype"})],
) -> None:
    """Answer a question in parallel, then by a sequential baseline; compare their figures.

    The baseline of the shipped adapters was trained on many of the same responses, without tags.
    """
    question, engine = asked(prompt, system), with_default(engine)
    words = baseline_of(engine.adapter, engine.model, baseline, is_remote=engine.is_remote)
    rival = replace(engine, adapter=words.adapter, model=words.model)
    alone = replace(generation, parallel=False)
    results: dict[str, dict[str, Any]] = {}
    for name, one, how in (("parallel", engine, generation), ("sequential", rival, alone)):
        checkpoint = short_name(one.adapter, one.model)
        with Model(opened_decoder(one)) as model:
            model.answer(question, max_tokens=8)  # the clock starts when it is warm
            if as_json:
                result = model.answer(question, how)
            else:
                say(f"\n{name}: {checkpoint}")
                result = answer_shown(model, question, how, show=False).result
            results[name] = {"checkpoint": checkpoint} | answer_json(result, model, one)
        del model  # one at a time is in memory
    if as_json:
        typer.echo(json.dumps(results, ensure_ascii=False))
        return
    own_s, rival_s = (one["wall_s"] / max(1, one["plain_tokens"]) for one in results.values())
    say(f"\n{short_name(words.adapter, words.model)} is {words.description}.")
    say(f"The parallel answer has {rival_s / own_s:.2f}x its tokens a second.")
    if any(one["truncated"] for one in results.values()):
        say("An answer that was cut off says little by its tokens and seconds.")


@command('pasta chat --system "Answer in two sentences."', "pasta chat --engine torch")
def chat(
    system: System = None,
    *,
    generation: Annotated[GenerationConfig, FEW_OF_ANSWER],
    engine: Annotated[EngineConfig, FEW_OF_ENGINE],
) -> None:
    """Chat with the model; each answer sees the conversation before it."""
    history, show = opening(system), False
    with Model(opened_decoder(with_default(engine))) as model:
        say("Ctrl-C stops an answer, Ctrl-D leaves, /help names the commands.")
        while (line := read_line()) not in (None, "/quit"):
            if line == "/new":
                history = opening(system)
            elif line == "/show":
                show = not show
            elif line and line.startswith("/"):
                say(CHAT_HELP)
            elif line:
                turn = [*history, {"role": "user", "content": line}]
                try:
                    text = answer_shown(model, turn, generation, show=show).result.text
                    history = [*turn, {"role": "assistant", "content": text}]
                except KeyboardInterrupt:
                    say("\nstopped; that turn is forgotten")
                except PastaError as error:
                    say(f"pasta: {error}; /new begins anew")


def read_line() -> str | None:
    """Return the next line, stripped; None at the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401 (`input` takes its editing and history from it)
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


def with_default(engine: EngineConfig) -> EngineConfig:
    """Return the config with this machine's default adapter, where no model is named."""
    if (engine.adapter or engine.model) is not None:
        return engine
    return replace(engine, adapter=default_adapter(cache_folder(), os.environ, engine))


def opened_decoder(engine: EngineConfig) -> Decoder:
    """Open a checkpoint with the user's cache, and with $PASTA_REMOTE_KEY as the servers' key."""
    key = os.environ.get("PASTA_REMOTE_KEY")
    return open_decoder(replace(engine, api_key=key), cache_folder())


def opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def asked(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return the question, from standard input for `-`. Refuses what is empty or not UTF-8."""
    if prompt == "-":
        with errors_as("the prompt is not UTF-8", UnicodeDecodeError):
            prompt = sys.stdin.buffer.read().decode("utf-8")
    if not prompt.strip():
        raise PastaError("the prompt is empty")
    return [*opening(system), {"role": "user", "content": prompt}]


def answer_shown(
    model: Model, prompt: Conversation, generation: GenerationConfig, *, show: bool
) -> Stream[Any]:
    """Print an answer while it is written, as lanes or in reading order, and a line of figures."""
    stream: Stream[Any]
    if show:
        lanes, console = Lanes(), Console(stderr=True)
        live = Live(lanes, console=console, refresh_per_second=12)
        with model.events(prompt, generation) as stream, live:
            for event in stream:
                lanes.feed(event)
        if not console.is_terminal:
            console.line()  # on a terminal, rich ends the last line itself
        typer.echo(stream.result.text)
    else:
        with model.stream(prompt, generation) as stream:
            for text in stream:
                print(text, end="", flush=True)
        print()
    result, threads = stream.result, 1 + len(stream.result.threads)
    say(
        f"{result.usage.plain_tokens} tokens in {result.critical_path} steps "
        f"({result.tokens_per_step:.2f}x), {threads} {'thread' if threads == 1 else 'threads'}, "
        f"{result.seconds:.1f} s{', cut off at a limit' if result.truncated else ''}"
    )
    return stream


def chrome_trace(answer: Answer, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return Chrome trace events: in Perfetto, one lane a thread, one box a token.

    This is the JSON object form of the Trace Event Format; times are microseconds.
    """
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

    boxes = [("prefill", MAIN, 0.0, trace.prefill_s, {"tokens": trace.prompt_tokens})]
    starts_s = list(accumulate(trace.step_s, initial=trace.prefill_s))
    for fed in trace.fed:
        if fed.step <= len(trace.step_s):  # others were decided, but never fed
            name = tags.get(fed.token) or vocabulary.texts[fed.token] or f"<{fed.token}>"
            times_s = starts_s[fed.step - 1], trace.step_s[fed.step - 1]
            boxes.append((name, fed.thread, *times_s, {"step": fed.step, "position": fed.position}))
    for name, thread, start_s, seconds, about in boxes:
        times = {"ts": round(start_s * 1e6, 1), "dur": round(seconds * 1e6, 1)}
        events.append({"ph": "X", "name": name, "pid": 0, "tid": thread, **times, "args": about})
    return {"traceEvents": events}


def answer_json(result: Result, model: Model, engine: EngineConfig) -> dict[str, Any]:
    """Return what `--json` prints of one answer. Completion tokens count tags as well."""
    whole = whole_model(engine.adapter, engine.model)
    adapter = adapter_name(engine.adapter, engine.model)
    return {
        "text": result.text,
        "annotated": result.annotated,
        "model": str(whole or engine.model or known_base_of(adapter)),
        "adapter": adapter if whole is None and model.decoder.parallel else None,
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
