"""All commands of `pasta`, and what they are called."""

from __future__ import annotations

from typing import Annotated

import typer

from pasta_decoding import __version__
from pasta_decoding.cli import (
    annotate,
    cache,
    chat,
    compile,
    data,
    decode,
    eval,
    export,
    files,
    judge,
    preference,
    pull,
    rate,
    report,
    serve,
    train,
)

app = typer.Typer(
    help="Learned asynchronous decoding: one answer, written by several threads at once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(help="Teach a model the language.", no_args_is_help=True)
data_app = typer.Typer(help="Make a training set, and look into one.", no_args_is_help=True)
eval_app = typer.Typer(help="Compare methods by speed and quality.", no_args_is_help=True)
judge_app = typer.Typer(help="Say which of two answers is better.", no_args_is_help=True)
cache_app = typer.Typer(help="See what the cache holds, and make room.", no_args_is_help=True)


def print_version(asked: bool) -> None:
    """Print name and version, and end there."""
    if asked:
        typer.echo(f"pasta {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Options of `pasta` itself."""


app.command()(decode.run)
app.command()(chat.chat)
app.command()(decode.compare)
app.command()(serve.serve)
app.command()(files.lint)
app.command()(pull.pull)
app.command("compile")(compile.compile_)
app.command()(annotate.annotate)
app.command()(export.export)
data_app.command("build")(data.build)
data_app.command("report")(data.report)
data_app.command("best")(data.best)
data_app.command("hindsight")(data.hindsight)
data_app.command("lengths")(data.lengths)
train_app.command("sft")(train.sft)
train_app.command("preference")(preference.preference)
eval_app.command("generate")(eval.generate)
eval_app.command("rate")(rate.rate)
eval_app.command("report")(report.report)
app.add_typer(data_app, name="data")
cache_app.command("list")(cache.show)
cache_app.command("clean")(cache.clean)
judge_app.command("eval")(judge.evaluate)
judge_app.command("pairs")(judge.pairs)
app.add_typer(train_app, name="train")
app.add_typer(eval_app, name="eval")
app.add_typer(judge_app, name="judge")
app.add_typer(cache_app, name="cache")
