"""The folder of a training run: its lock, settings and figures."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from pasta_decoding.data.lines import locked, read_json, read_lines, refuse_other_settings
from pasta_decoding.errors import PastaError
from pasta_decoding.files import write_json
from pasta_decoding.training.config import Config
from pasta_decoding.training.loop import processes

Item = TypeVar("Item")
_ANYWHERE = frozenset({"device", "base_url", "cache_tokens", "report_to", "try_prompts"})
_LOSSES = ("text_loss", "control_loss", "eval_text_loss", "eval_control_loss")


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Hold the run folder as long as the context is open, and name what a full disk raises.

    Raises PastaError if another process trains there. Of processes that were launched together
    the main one holds it.
    """
    from safetensors import SafetensorError

    try:
        with locked(out) if processes().is_main_process else nullcontext():
            yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # A full disk is any of these, by who noticed it; torch names its writer's source file.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise PastaError(
            f"cannot write the run in {out}: {error}",
            hint="Make room there; the same command goes on from the last checkpoint.",
        ) from error


def refuse_other_run(out: Path, config: Config, inputs: Mapping[str, Any] | None = None) -> None:
    """Raise PastaError if `out` holds a run with other settings, or other ones of these inputs."""
    hint = "Choose another --out, or repeat its settings to resume it."
    preset, given = identity(type(config)()), dict(inputs or {})
    for path, ours in (out / "config.json", identity(config)), (out / "inputs.json", given):
        if path.exists():
            # A setting that only one of two versions has is as by default, or of no interest.
            refuse_other_settings(out, preset | read_json(path, dict), ours, hint=hint)


def identity(config: Config) -> dict[str, Any]:
    """Return the settings that a run keeps: those that its result depends on."""
    return {name: value for name, value in asdict(config).items() if name not in _ANYWHERE}


def write_settings(out: Path, config: Config, inputs: Mapping[str, Any] | None = None) -> None:
    """Write the settings into the run folder. `inputs`: digests of what they only name, as rows."""
    if inputs is not None:
        write_json(out / "inputs.json", dict(inputs))
    write_json(out / "config.json", identity(config))


def figures_of(out: Path) -> str:
    """Return what a finished run came to: steps, tokens, seconds, last losses."""
    found: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0}
    for line in read_lines(out / "metrics.jsonl"):
        found |= line
    work = f"{found['step']} steps, {found['tokens']} tokens, {found['seconds']:.0f} s"
    return ", ".join([work, *(f"{name} {found[name]:.3f}" for name in _LOSSES if name in found)])


def tracked(items: Iterable[Item], doing: str, total: int) -> Iterable[Item]:
    """Return the items, and show how far they are: by a bar on a terminal, else once a minute."""
    interval = 0.1 if sys.stderr.isatty() else 60
    return tqdm(items, doing, total, mininterval=interval, disable=not processes().is_main_process)
