"""The folder of a training run: its lock, settings and figures."""

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from pasta_decoding.data.lines import locked, read_json, read_lines, refuse_other_settings
from pasta_decoding.errors import PastaError
from pasta_decoding.files import write_json
from pasta_decoding.models.load import native_dtype
from pasta_decoding.training.config import Config, PreferenceConfig, SftConfig
from pasta_decoding.training.loop import processes

Item = TypeVar("Item")
AnyConfig = TypeVar("AnyConfig", SftConfig, PreferenceConfig)
log = logging.getLogger(__name__)
_FREE_SETTINGS = frozenset(
    {"device", "base_url", "judge_base_url", "cache_tokens", "report_to", "try_prompts"}
)
"""Settings that may differ when a run is resumed: its result does not depend on them."""
_LOSSES = ("text_loss", "control_loss", "eval_text_loss", "eval_control_loss")


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Lock the run folder while the context is open.

    Raises PastaError if another process trains there, or if the disk gets full. Of processes that
    were launched together, the main one holds the lock.
    """
    from safetensors import SafetensorError

    try:
        with locked(out) if processes().is_main_process else nullcontext():
            yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # A full disk raises OSError in Python, SafetensorError in safetensors and RuntimeError in
        # torch, whose message names the source file of its writer.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise PastaError(
            f"cannot write the run in {out}: {error}",
            hint="Make room there; the same command goes on from the last checkpoint.",
        ) from error


def refuse_other_run(out: Path, config: Config, inputs: Mapping[str, Any] | None = None) -> None:
    """Raise PastaError if `out` holds a run with other settings or other inputs.

    inputs: digests, as `write_settings` has them. An input that is left out is not compared.
    """
    hint = "Choose another --out, or repeat its settings to resume it."
    defaults = identity(type(config)())
    current_by_file = {"config.json": identity(config), "inputs.json": dict(inputs or {})}
    for name, current in current_by_file.items():
        path = out / name
        if path.exists():
            # A file of an older version lacks newer settings: that run had their defaults.
            refuse_other_settings(out, defaults | read_json(path, dict), current, hint=hint)


def with_precision(config: AnyConfig, out: Path, device: str) -> AnyConfig:
    """Return the config with `bf16` decided: as set, as the run in `out` has it, or by the device.

    A log line says what was decided.
    """
    if config.bf16 is not None:
        return config
    path = out / "config.json"
    settings = read_json(path, dict) if path.exists() else {}
    bf16 = settings.get("bf16")
    if bf16 is None:
        bf16 = native_dtype(device) == "bfloat16"
        reason = "the device computes in it" if bf16 else "this processor has no bfloat16"
        log.info("training in %s: %s", "bfloat16" if bf16 else "float32", reason)
    return replace(config, bf16=bf16)


def identity(config: Config) -> dict[str, Any]:
    """Return the settings that the result of a run depends on."""
    return {name: value for name, value in asdict(config).items() if name not in _FREE_SETTINGS}


def write_settings(out: Path, config: Config, inputs: Mapping[str, Any] | None = None) -> None:
    """Write the settings into the run folder.

    inputs: digests of what the settings only name, such as rows.
    """
    if inputs is not None:
        write_json(out / "inputs.json", dict(inputs))
    write_json(out / "config.json", identity(config))


def figures_of(out: Path) -> str:
    """Return a line on a finished run: steps, tokens, seconds, last losses."""
    last_figures: dict[str, Any] = {"step": 0, "tokens": 0, "seconds": 0.0}
    for line in read_lines(out / "metrics.jsonl"):
        last_figures |= line
    parts = [
        f"{last_figures['step']} steps",
        f"{last_figures['tokens']} tokens",
        f"{last_figures['seconds']:.0f} s",
    ]
    losses = [f"{name} {last_figures[name]:.3f}" for name in _LOSSES if name in last_figures]
    return ", ".join(parts + losses)


def tracked(items: Iterable[Item], activity: str, total: int) -> Iterable[Item]:
    """Return the items, and show progress: a bar on a terminal, else a line once a minute."""
    interval = 0.1 if sys.stderr.isatty() else 60
    return tqdm(
        items, activity, total, mininterval=interval, disable=not processes().is_main_process
    )
