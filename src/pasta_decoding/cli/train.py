"""Commands that train: `train sft`, `train average`, `train offsets`, `train head`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pasta_decoding.cli.bars import drawn
from pasta_decoding.cli.files import base_folder, is_main, say
from pasta_decoding.cli.options import Base, with_options
from pasta_decoding.cli.training_bar import ReportTo, drawn_progress, goes_on, trackers
from pasta_decoding.errors import PastaError, require
from pasta_decoding.lang.layout import Joining
from pasta_decoding.training.config import SftConfig, joins_named

if TYPE_CHECKING:
    from pasta_decoding.data.dataset import Row
    from pasta_decoding.training.offsets import Offsets, Share


_SFT = SftConfig(data=(), base_name="")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run goes on from; what is left out is as `start` has it, else as new runs have it."""

    start: Annotated[
        str | None,
        typer.Option(help="Adapter to go on from, or the run folder that holds it."),
    ] = None
    scheme: Annotated[
        Literal["shared-max", "shared-sum", "reserve"] | None,
        typer.Option(help="Positions; else those of --start, else shared-max."),
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
        from pasta_decoding.models.loading import find_adapter

        folder = find_adapter(self.start) if self.start else None
        begun = load(folder) if folder else config
        return replace(
            config,
            start=str(folder) if folder else None,
            scheme=self.scheme or begun.scheme,
            topic=self.topic or begun.topic,
            joins=joins_named(self.join or begun.joins),
        )


@with_options
def sft(
    out: Annotated[Path, typer.Option(help="Run folder; the same command resumes it.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Annotated JSONL (.gz); may be repeated.")
    ] = None,
    tags_data: Annotated[
        list[Path] | None,
        typer.Option(
            help="The same, but learn only when to write tags, which, and when to end; text stays "
            "as --text-from writes it."
        ),
    ] = None,
    text_from: Annotated[
        str | None, typer.Option(help="Adapter whose text that is; --start if left out.")
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
    from pasta_decoding.models.loading import find_adapter

    require_training()
    config = replace(
        origin.begin(config),
        data=tuple(map(str, data or [])),
        tags_data=tuple(map(str, tags_data or [])),
        text_from=str(find_adapter(text_from)) if text_from else None,
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
    from pasta_decoding.models.download import HUB_REPOSITORY

    if model is None:
        return HUB_REPOSITORY
    return model.name if model.exists() else model.as_posix()


def train(config: SftConfig, model: Path | None, out: Path, report_to: list[str]) -> Path:
    """Read the rows, find the base model, and train."""
    from pasta_decoding.training.sft import train_sft

    with goes_on(), drawn_progress("training") as show:
        rows, tags_rows, held_out = rows_of(config)
        return train_sft(
            config,
            rows,
            base=base_folder(model),
            out=out,
            say=say,
            tags_rows=tags_rows,
            held_out=held_out,
            show=show,
            report_to=report_to,
        )


def rows_of(config: SftConfig) -> tuple[list[Row], list[Row], list[Row]]:
    """Return the rows to learn, those to learn for their tags alone, and those that are held out.

    Says how many of the last are of prompts that are trained on, too.
    """
    from pasta_decoding.data.dataset import hold_out, read_rows

    if config.eval_data and config.eval_share:
        raise PastaError("--eval-data and --eval-share are two ways", hint="Give one of them.")
    if config.eval_share and not config.data:
        raise PastaError(
            "--eval-share holds out rows of --data, and there are none",
            hint="Give --data, or --eval-data in its place.",
        )
    rows, tags_rows, held_out = (
        [row for path in paths for row in read_rows(Path(path))]
        for paths in (config.data, config.tags_data, config.eval_data)
    )
    if config.eval_share:
        rows, held_out = hold_out(rows, config.eval_share)
    known = {row.asked for row in (*rows, *tags_rows)}
    if both := sum(row.asked in known for row in held_out):
        say(f"{both} of {len(held_out)} held-out prompts are trained on, too")
    return rows, tags_rows, held_out


def average(
    adapters: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER=WEIGHT...", help="Adapters that come from one start; weights add to 1."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The adapter's folder to write.")],
) -> None:
    """Average adapters: a point between a fast one and a good one, without training."""
    require_training()
    from pasta_decoding.models.loading import find_adapter
    from pasta_decoding.training.average import average as write_average

    weighted = [
        (find_adapter(name), weight) for name, weight in (weighted_name(one) for one in adapters)
    ]
    typer.echo(write_average(weighted, out))


def offsets(
    adapter: Annotated[str, typer.Argument(help="Adapter, by its folder, its run's, or by name.")],
    data: Annotated[
        list[Path],
        typer.Option(help="Annotated answers, best its own: JSONL (.gz); may be repeated."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The adapter's folder to write.")],
    length: Annotated[
        list[str] | None,
        typer.Option(metavar="LENGTH=NATS", help="Added to a length's logit; may be repeated."),
    ] = None,
    promise: Annotated[
        float,
        typer.Option(metavar="NATS", help="Added to the promise's logit: above 0 is faster."),
    ] = 0.0,
    sync: Annotated[
        float,
        typer.Option(
            metavar="NATS",
            help="Added to the sync's logit where the answers have one; hardly elsewhere.",
        ),
    ] = 0.0,
    model: Base = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
) -> None:
    """Let an adapter promise or wait more or less often, or other lengths, without training.

    Greedy decoding promises the likeliest length, and that is often one of two. The answers are
    read once by the model; then rows of its output layer are moved by the offsets.
    """
    require_training()
    from pasta_decoding.data.dataset import read_rows
    from pasta_decoding.models.loading import find_adapter
    from pasta_decoding.training.offsets import offset_logits

    wanted = _lengths(length or ())
    if not (wanted or promise or sync):
        raise PastaError("nothing to change", hint="Give --length, --promise or --sync.")
    for name, offset in (("promise", promise), ("sync", sync)):
        if not math.isfinite(offset):
            raise PastaError(f"--{name} {offset} is not a number of nats")
    rows = [row for path in data for row in read_rows(path)]
    found = offset_logits(
        find_adapter(adapter),
        base_folder(model),
        drawn(rows, "reading"),
        out,
        lengths=wanted,
        promise=promise,
        sync=sync,
        say=say,
    )
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    _tell(found)
    typer.echo(out)


def _tell(found: Offsets) -> None:
    say(f"{found.promises} promises were read, {found.syncs} syncs. In % of the places:")
    say(_share("promise, in the main thread", found.promise))
    say(_share("sync, where the answers have none", found.no_sync))
    if found.sync:
        say(_share("sync, where they have one", found.sync))
    say("Lengths, in % of the promises:")
    for bucket, share in found.lengths.items():
        if max(share.before, share.after, share.probable) >= 0.001:
            say(_share(f"{bucket:4} tokens", share))


def _share(name: str, share: Share) -> str:
    before, after, mean = (
        f"{100 * one:5.1f}" for one in (share.before, share.after, share.probable)
    )
    return f"{name}: {before} before, {after} now, mean probability {mean}"


def _lengths(texts: Iterable[str]) -> dict[int, float]:
    wanted: dict[int, float] = {}
    for bucket, nats in map(_offset, texts):
        if bucket in wanted:
            raise PastaError(f"--length {bucket} is given twice")
        wanted[bucket] = nats
    return wanted


def _offset(text: str) -> tuple[int, float]:
    form, example = "LENGTH=NATS", "--length 60=0.9"
    length, nats = _named_number(text, form, example)
    if not length.isdecimal():
        raise PastaError(f"{text!r} is not {form}", hint=f"For example: {example}")
    return int(length), nats


def weighted_name(text: str) -> tuple[str, float]:
    """Split ADAPTER=WEIGHT. Raises PastaError."""
    return _named_number(text, "ADAPTER=WEIGHT", "fast=0.7 quality=0.3")


def _named_number(text: str, form: str, example: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value):
        raise PastaError(f"{text!r} is not {form}", hint=f"For example: {example}")
    return name, value


def head(
    data: Annotated[list[Path], typer.Option(help="Annotated JSONL (.gz); may be repeated.")],
    out: Annotated[Path, typer.Option(help="The file of the head to write (.safetensors).")],
    layers: Annotated[
        list[int], typer.Option(min=0, help="Whose outputs it reads; may be repeated.")
    ],
    model: Base = None,
    keep_held_out: Annotated[
        bool,
        typer.Option(
            "--keep-held-out", help="Train on the quarter, too, that is for judging annotators."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
) -> None:
    """Train a reading head for `annotate --with likelihood`: what hidden states say of a sentence.

    Each response is read once by the base model; then two small convex problems are solved.
    """
    from pasta_decoding.data.annotate.head import save_head
    from pasta_decoding.data.dataset import is_held_out, read_rows
    from pasta_decoding.training.head import read_examples, train_head
    from pasta_decoding.training.reader import base_reader

    rows = [row for path in data for row in read_rows(path)]
    rows = [row for row in rows if keep_held_out or not is_held_out(row.id)]
    if not out.parent.is_dir():
        raise PastaError(f"cannot write {out}: No such file or directory")
    reader, base = base_reader(base_folder(model), layers=layers)
    examples = list(read_examples(drawn(rows, "reading"), reader))
    if len(examples) < 2:
        raise PastaError(
            f"{len(examples)} of {len(rows)} responses have parts to choose from",
            hint="Give more annotated --data.",
        )
    say(f"{len(examples)} of {len(rows)} responses have parts to choose from; fitting")
    save_head(train_head(examples, base=base, layers=layers), out)
    figures = {"rows": len(rows), "examples": len(examples), "head": str(out)}
    typer.echo(json.dumps(figures) if as_json else out)
