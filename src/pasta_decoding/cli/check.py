"""The command `eval check`: do answers what their prompts ask, as far as a program can tell?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pasta_decoding.cli.files import say
from pasta_decoding.errors import PastaError

if TYPE_CHECKING:
    from pasta_decoding.evaluation.bootstrap import Interval
    from pasta_decoding.evaluation.checking import Checked, Share

COLUMNS = f"{'run':<16} {'figure':<18} {'prompts':>7}  {'share, %':<20} less the baseline's"


def check(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of `eval generate`, or the folder around them.")
    ],
    prompts: Annotated[
        Path,
        typer.Option(help="JSONL (.gz) with what to check, such as data/checked_prompts.jsonl."),
    ],
    baseline: Annotated[
        Path | None, typer.Option(help="The run to compare with; the sequential one if left out.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Write sound answers here, as rows for `train sft`: they ended, pass "
            "all checks, have no empty list item and hardly a repetition."
        ),
    ] = None,
    per_prompt: Annotated[
        int | None,
        typer.Option(
            min=1, help="Keep so many of a prompt's answers: those with most tokens a step."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify answers by program: checks that they pass, promises and syncs where they belong.

    Shares in percent with 95 % intervals, those of differences paired by prompt. No model is
    asked.
    """
    from pasta_decoding.data.asked import read_asked
    from pasta_decoding.data.dataset import write_rows
    from pasta_decoding.evaluation.checking import check_runs, sound_rows
    from pasta_decoding.evaluation.runs import beside_baseline

    if per_prompt and not keep:
        raise PastaError("--per-prompt is about what --keep writes", hint="Give --keep FILE, too.")
    asked = read_asked(prompts, anything=keep is not None)
    reference, found = beside_baseline(runs, baseline)
    checked = check_runs(found, reference, asked)
    if as_json:
        typer.echo(json.dumps(asdict(checked), ensure_ascii=False))
    else:
        show(checked)
    for one in checked.not_checked:
        say(f"{one.run}: the prompt {one.prompt} {one.reason}")
    if keep:
        rows = sound_rows(found, asked, per_prompt)
        if not rows:
            raise PastaError(
                f"no answer is sound; {keep} was not written",
                hint="Sound answers end by themselves and do all that is asked of them.",
            )
        write_rows(keep, rows)
        say(f"{keep}: kept {len(rows)} of {len(found) * len(asked)} answers")


def show(checked: Checked) -> None:
    """Print a table: first every run's figures, then its pass rates by kind of check."""
    typer.echo(COLUMNS)
    for shares in (checked.shares, checked.kinds):
        for label, found in shares.items():
            show_run(label, found)


def show_run(label: str, found: Mapping[str, Share]) -> None:
    """Print a line a figure."""
    for name, share in found.items():
        difference = percent(share.difference) if share.difference else ""
        value = percent(share.share)
        typer.echo(f"{label:<16} {name:<18} {share.prompts:>7}  {value:<20} {difference}".rstrip())


def percent(interval: Interval) -> str:
    """Return a share and its interval in percent."""
    if interval.value is None or interval.low is None or interval.high is None:
        return "-"
    return f"{100 * interval.value:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
