"""The command `annotate`: plain responses in, annotated ones out.

A new rule is one file, `data/annotate/NAME.py`, and one line of `RULES`.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from pasta_decoding.cli.console import bar, say, token_counter
from pasta_decoding.cli.options import AsJson, command
from pasta_decoding.data.annotate.base import Annotate, by_rule, run_job
from pasta_decoding.data.annotate.llm import by_endpoint, introduction
from pasta_decoding.data.build import measure_rows
from pasta_decoding.data.endpoint import Endpoint, endpoint_key
from pasta_decoding.data.rows import Row, read_rows
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import sha256
from pasta_decoding.lang.tree import in_text_form

CountTokens = Callable[[str], int]

RULES = {
    "structure": "pasta_decoding.data.annotate.structure:find_parts",
    "apar": "pasta_decoding.data.annotate.apar:find_parts",
}
"""Annotators that are functions from a response to its parts (`data/annotate/base.py`)."""


@command(
    "pasta annotate --with structure responses.jsonl annotated.jsonl",
    "pasta annotate --with llm --base-url http://localhost:8000/v1 --model m in.jsonl out.jsonl",
)
def annotate(
    source: Annotated[Path, typer.Argument(help="JSONL (.gz) with plain responses.")],
    out: Annotated[Path, typer.Argument(help="JSONL (.gz) to write.")],
    with_: Annotated[
        str, typer.Option("--with", help="structure, apar, llm, or your own rule: module:function.")
    ] = "structure",
    model: Annotated[
        str | None, typer.Option(help="Its tokenizer counts lengths. llm: the endpoint's model.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="llm: the OpenAI-compatible endpoint, as http://host/v1.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="llm: requests at the same time.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Annotate plain responses: independent parts become promised chunks.

    Finished rows are kept in OUT.partial, and the same command resumes there. The endpoint's key is
    PASTA_ENDPOINT_KEY, else OPENAI_API_KEY.
    """
    counted_by = None if with_ == "llm" or model is None else Path(model)
    count_tokens = token_counter(counted_by)
    settings: dict[str, Any] = {}
    if with_ == "llm":
        annotator, settings = endpoint_annotator(base_url, model, concurrency, count_tokens)
    else:
        annotator = rule_annotator(with_, count_tokens)
    rows = read_plain(source, limit)
    settings |= {
        "with": with_,
        "input": sha256(source)[:16],
        "tokens_of": counted_by and str(counted_by),
    }
    with bar(desc="annotating", total=len(rows)) as progress:
        annotated = run_job(rows, annotator, count_tokens, out, settings, progress.update)
    rejected: Counter[str] = Counter()
    cost: Counter[str] = Counter()
    for annotation in annotated:
        if annotation.rejected:
            rejected[annotation.rejected] += 1
        cost.update(annotation.cost)
    figures = measure_rows([annotation.row for annotation in annotated], count_tokens)
    figures |= {"rejected": dict(rejected.most_common()), "cost": dict(cost)}
    if as_json:
        typer.echo(json.dumps(figures))
        return
    say(f"{figures['rows']} rows in {out}, {figures['with_chunk']} with a promise")
    for reason, count in figures["rejected"].items():
        say(f"{count} rejected: {reason}")
    for name, amount in cost.items():
        say(f"{amount:g} {name}")


def endpoint_annotator(
    base_url: str | None, model: str | None, concurrency: int, count_tokens: CountTokens
) -> tuple[Annotate, dict[str, Any]]:
    """Return the annotator `llm`, and the settings that its results depend on."""
    if base_url is None or model is None:
        raise PastaError("an endpoint is asked by --base-url http://host/v1 and --model m")
    endpoint = Endpoint(base_url, model, endpoint_key(os.environ), concurrency)
    introduction_sha256 = hashlib.sha256(json.dumps(introduction()).encode()).hexdigest()
    settings = {
        "base_url": base_url,
        "model": model,
        "introduction": introduction_sha256[:16],
    }
    return partial(by_endpoint, endpoint, count_tokens), settings


def rule_annotator(name: str, count_tokens: CountTokens) -> Annotate:
    """Return the annotator of a rule, by its name in `RULES` or as `module:function`."""
    module, _, function = RULES.get(name, name).partition(":")
    names = ", ".join([*RULES, "llm"])
    message = f"--with {name} is neither {names} nor a function, `module:function`"
    with errors_as(message, ImportError, AttributeError, ValueError):
        find_parts = getattr(import_module(module), function)
    return partial(by_rule, find_parts, count_tokens)


def read_plain(source: Path, limit: int | None) -> list[Row]:
    """Return the rows to annotate. Raises PastaError if some are annotated already.

    A second annotation would turn their tags into text, and training on it would teach the model to
    write tags as text.
    """
    rows = list(read_rows(source))[:limit]
    annotated_ids = [row.id for row in rows if in_text_form(row.response)]
    if annotated_ids:
        raise PastaError(
            f"{len(annotated_ids)} of {len(rows)} responses are annotated already, "
            f"the first is that of {annotated_ids[0]!r}"
        )
    return rows
