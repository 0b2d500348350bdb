"""The command `train sft`: stage 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pasta_decoding.cli.console import base_folder, is_main, say
from pasta_decoding.cli.options import Base, command
from pasta_decoding.cli.training_bar import ReportTo, drawn_progress, goes_on, trackers
from pasta_decoding.errors import PastaError, require
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import SCHEMES
from pasta_decoding.training.config import SftConfig, joins_named

if TYPE_CHECKING:
    from pasta_decoding.data.dataset import Row


_SFT = SftConfig(data=(), base_name="")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run goes on from; what is left out is as `start` has it, else as new runs have it."""

    start: Annotated[
        str | None,
        typer.Option(help="Adapter to go on from, or the run folder that holds it."),
    ] = None
    scheme: Annotated[
        str | None,
        typer.Option(
            help=f"Positions: {', '.join(SCHEMES)}. Else those of --start, else shared-max."
        ),
    ] = None
    topic: Annotated[
        Literal["required", "none"] | None,
        typer.Option(help="none: leave topics out; else as --start has it, else required."),
    ] = None
    join: Annotated[
        tuple[Joining, ...],
        typer.Option(
            help="How the main thread comes to see chunks; text is for remote engines. May be "
            "repeated: one adapter for both. Else as --start has it, else kv."
        ),
    ] = ()

    def begin(self, config: SftConfig) -> SftConfig:
        """Return the settings with what stands here. Raises PastaError for no such adapter."""
        from pasta_decoding.models.checkpoint import load
        from pasta_decoding.models.load import find_adapter

        folder = find_adapter(self.start) if self.start else None
        begun = load(folder) if folder else config
        return replace(
            config,
            start=str(folder) if folder else None,
            scheme=self.scheme or begun.scheme,
            topic=self.topic or begun.topic,
            joins=joins_named(self.join or begun.joins),
        )


@command()
def sft(
    out: Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Annotated JSONL (.gz); may be repeated.")
    ] = None,
    model: Base = None,
    base_name: Annotated[str | None, typer.Option(help="What the adapter calls its base.")] = None,
    eval_data: Annotated[
        list[Path] | None,
        typer.Option(help="Held-out JSONL (.gz), whose loss is measured at every checkpoint."),
    ] = None,
    report_to: ReportTo = None,
    *,
    origin: Origin,
    config: SftConfig = _SFT,
) -> None:
    """Stage 1: finetune on annotated responses (LoRA and the control-token rows, or everything)."""
    require_training()
    config = replace(
        origin.begin(config),
        data=tuple(map(str, data or [])),
        base_name=base_name or called(model),
        eval_data=tuple(map(str, eval_data or [])),
    )
    adapter = train(config, model, out, trackers(report_to))
    if is_main():
        typer.echo(adapter)


def require_training() -> None:
    """Refuse to train without what the extra `train` brings, and say how to get it."""
    for package in ("accelerate", "peft", "matplotlib"):
        require(package, extra="train", doing="training")


def called(model: Path | None) -> str:
    """Return what an adapter calls its base where it is not told: its name on the hub, if any."""
    from pasta_decoding.models.bases import BASES, DEFAULT_MODEL

    if model is None or str(model) in BASES:
        return BASES[str(model or DEFAULT_MODEL)].hub
    return model.name if model.exists() else model.as_posix()


def train(config: SftConfig, model: Path | None, out: Path, report_to: list[str]) -> Path:
    """Read the rows, find the base model, and train."""
    from pasta_decoding.training.sft import train_sft

    with goes_on(), drawn_progress("training") as show:
        rows, held_out = rows_of(config)
        return train_sft(
            config,
            rows,
            base=base_folder(model),
            out=out,
            say=say,
            held_out=held_out,
            show=show,
            report_to=report_to,
        )


def rows_of(config: SftConfig) -> tuple[list[Row], list[Row]]:
    """Return the rows to learn, and those that are held out.

    Says how many of the last are of prompts that are trained on, too.
    """
    from pasta_decoding.data.dataset import hold_out, read_rows

    if config.eval_data and config.eval_share:
        raise PastaError("--eval-data and --eval-share are two ways", hint="Give one of them.")
    rows, held_out = (
        [row for path in paths for row in read_rows(Path(path))]
        for paths in (config.data, config.eval_data)
    )
    if config.eval_share:
        rows, held_out = hold_out(rows, config.eval_share)
    known = {row.asked for row in rows}
    if both := sum(row.asked in known for row in held_out):
        say(f"{both} of {len(held_out)} held-out prompts are trained on, too")
    return rows, held_out
