"""The command `annotate`: plain responses in, annotated ones out.

A new rule is one file, `data/annotate/NAME.py`, and one line of `RULES`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pasta_decoding.cli.bars import progress
from pasta_decoding.cli.console import say, token_counter
from pasta_decoding.cli.options import Without, command
from pasta_decoding.data.annotate.llm import DEFAULT_RETRIES
from pasta_decoding.data.endpoint import KEY_VARIABLES, Endpoint
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.data.annotate import base
    from pasta_decoding.data.dataset import Row

    CountTokens = Callable[[str], int]


UNNAMED = Endpoint("", "")
"""How an endpoint is asked; `--base-url` and `--model` name it."""

RULES = {
    "structure": "pasta_decoding.data.annotate.structure:find_parts",
    "apar": "pasta_decoding.data.annotate.apar:find_parts",
}
"""Annotators that are a function from a response to its parts (`data/annotate/base.py`)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows are annotated, and what of them."""

    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None
    strip: Annotated[
        bool, typer.Option("--strip", help="The responses are annotated: take the tags out first.")
    ] = False
    keep: Annotated[
        bool, typer.Option("--keep", help="Rows that are annotated already stay as they are.")
    ] = False
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Longer responses stay plain and are counted.")
    ] = 4096
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Name broken lines and keep the rest.")
    ] = False


@dataclass(frozen=True, slots=True)
class Options:
    """What annotators may be told on the command line; each takes what is for it."""

    model: Annotated[
        str | None,
        typer.Option(
            help="The model that will be trained, a folder or a name on the hub: its tokens are "
            "counted. llm: what the endpoint calls its model."
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Whose tokens are counted, where that is not --model, as with llm."),
    ] = None
    base_url: Annotated[
        str | None,
        typer.Option(help="llm: where the OpenAI-compatible endpoint is, as http://host/v1."),
    ] = None
    retries: Annotated[
        int,
        typer.Option(
            min=0, help="llm: how often to ask again where an answer is not the response with tags."
        ),
    ] = DEFAULT_RETRIES
    endpoint: Endpoint = UNNAMED


@command()
def annotate(
    source: Annotated[Path, typer.Argument(help="JSONL (.gz) with plain responses.")],
    out: Annotated[Path, typer.Argument(help="JSONL (.gz) to write.")],
    with_: Annotated[
        str,
        typer.Option(
            "--with", help="structure, apar or llm; or a rule of your own, as module:function."
        ),
    ] = "structure",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
    *,
    selection: Selection,
    options: Options,
    endpoint: Annotated[Endpoint, Without({"max_retries"})] = UNNAMED,
) -> None:
    """Annotate plain responses: independent parts become promised chunks.

    Finished rows are kept in OUT.partial, and the same command goes on behind them. The key of an
    endpoint is taken from PASTA_ENDPOINT_KEY, else from OPENAI_API_KEY.
    """
    from pasta_decoding.data.annotate.job import Screened, report

    rows, skipped = read_plain(source, selection)
    kept = already_annotated(rows, selection)
    options = replace(options, endpoint=endpoint)
    counted_by = options.tokenizer or (None if with_ == "llm" else options.model)
    count_tokens = token_counter(Path(counted_by) if counted_by else None)
    annotator, settings = annotator_of(with_, options, count_tokens)
    settings |= {"with": with_, "input": digest(source), "tokens_of": counted_by}
    settings |= {name: getattr(selection, name) for name in ("strip", "keep", "max_tokens")}
    screened = Screened(annotator, count_tokens, selection.max_tokens, keep=selection.keep)
    done = run(rows, screened, out, settings)
    figures = report(done, count_tokens) | {"skipped": skipped, "kept": kept}
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        show(figures, out)
    raise typer.Exit(1 if skipped else 0)


def _llm(options: Options, count_tokens: CountTokens) -> tuple[base.Annotator, dict[str, Any]]:
    from pasta_decoding.data.annotate.llm import LlmAnnotator, introduction

    if options.base_url is None or options.model is None:
        message = "an endpoint is asked by --base-url and --model"
        raise PastaError(message, hint="For example: --base-url http://localhost:8000/v1 --model m")
    key = next(filter(None, map(os.environ.get, KEY_VARIABLES)), "")
    endpoint = replace(
        options.endpoint, base_url=options.base_url, model=options.model, api_key=key
    )
    settings = {
        "base_url": options.base_url,
        "model": options.model,
        "retries": options.retries,
        "introduction": short_hash(json.dumps(introduction()).encode()),
    }
    return LlmAnnotator(endpoint, count_tokens, retries=options.retries), settings


def _rule(name: str) -> Callable[[str], Any]:
    """Return a rule by its name, or by `module:function`."""
    module, _, function = RULES.get(name, name).partition(":")
    try:
        found: Callable[[str], Any] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join([*RULES, "llm"])
        message = f"--with {name} is neither {known} nor a function, `module:function`: {error}"
        raise PastaError(message) from error
    return found


def annotator_of(
    name: str, options: Options, count_tokens: CountTokens
) -> tuple[base.Annotator, dict[str, Any]]:
    """Return an annotator, and those of its settings that its outcome depends on."""
    from pasta_decoding.data.annotate.base import RuleAnnotator

    if name == "llm":
        return _llm(options, count_tokens)
    return RuleAnnotator(_rule(name), count_tokens), {}


def read_plain(source: Path, selection: Selection) -> tuple[list[Row], int]:
    """Return the rows to annotate, and how many lines were skipped because they are broken."""
    from pasta_decoding.data.dataset import read_rows
    from pasta_decoding.lang import tree

    skipped: list[PastaError] = []

    def on_problem(error: PastaError) -> None:
        skipped.append(error)
        say(f"skipped {error}")

    read = read_rows(source, on_problem=on_problem if selection.keep_going else None)
    rows = list(read)[: selection.limit]
    if selection.strip:
        rows = [replace(row, response=tree.strip(tree.read(row.response))) for row in rows]
    return rows, len(skipped)


def already_annotated(rows: list[Row], selection: Selection) -> int:
    """Return how many rows are annotated already; refuse them unless it is said what to do.

    Annotated again, all their tags would be text, and training would learn to write them so.
    """
    from pasta_decoding.lang.tree import in_text_form

    if selection.keep and selection.strip:
        raise PastaError("--keep and --strip contradict each other", hint="Give one of them.")
    annotated = [row.id for row in rows if in_text_form(row.response) and not selection.strip]
    if annotated and not selection.keep:
        raise PastaError(
            f"{len(annotated)} of {len(rows)} responses are annotated already, "
            f"the first is that of {annotated[0]!r}",
            hint="--strip takes their tags out first; --keep leaves these rows as they are.",
        )
    return len(annotated)


def run(
    rows: list[Row], annotator: base.Annotator, out: Path, settings: dict[str, Any]
) -> list[base.Annotated]:
    """Run the job with a progress bar; say where finished rows are if it is interrupted."""
    from pasta_decoding.data.annotate.job import journal_path, run_job

    try:
        with progress("annotating", len(rows)) as tick:
            return run_job(rows, annotator, out, settings, tick=lambda _done: tick())
    except KeyboardInterrupt:
        say(f"finished rows are in {journal_path(out)}; the same command goes on behind them")
        raise


def show(figures: dict[str, Any], out: Path) -> None:
    """Say what was done, what was not taken and why, and what it cost."""
    rows, promised, skipped = (figures[name] for name in ("rows", "promised", "skipped"))
    say(f"{rows} rows in {out}, {promised} with a promise, {skipped} skipped")
    if figures["kept"]:
        say(f"{figures['kept']} were annotated already and stay as they were")
    for reason, count in figures["rejected"].items():
        say(f"{count} rejected: {reason}")
    for name, amount in figures["cost"].items():
        say(f"{amount:g} {name}")
    if figures["ideal_speedup"] is not None:
        say(f"ideal speedup {figures['ideal_speedup']:.2f}")


def digest(path: Path) -> str:
    """Return what tells the contents of a file from others."""
    return short_hash(path.read_bytes())


def short_hash(contents: bytes) -> str:
    """Return the first characters of a SHA-256 sum."""
    return hashlib.sha256(contents).hexdigest()[:16]
