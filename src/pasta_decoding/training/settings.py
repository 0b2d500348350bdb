"""The settings of stage 2, what they refuse, and what two runs may share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from pasta_decoding.data.asked import Asked, each_once
from pasta_decoding.data.lines import differing, read_lines, write_lines, write_text
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.load import holds_weights
from pasta_decoding.training.config import PairConfig, PreferenceConfig
from pasta_decoding.training.run import find_run

# Keys that neither samples nor what is measured of them depend on: how pairs are trained on.
_FREE_OF_SAMPLES = {
    "rounds",
    "weights",
    "true_lengths",
    *(one.name for one in fields(PairConfig)),
} - {"seed"}

_SHARED_STAGES = frozenset(
    {
        (0, "baseline"),
        (1, "sample"),
        (1, "parts"),
    }
)


def refuse_misfits(config: PreferenceConfig) -> None:
    """Refuse settings and adapters that do not go together, before hours are spent."""
    policy, baseline = Path(config.policy), Path(config.baseline)
    if holds_weights(policy):
        raise PastaError(
            f"{policy} holds a whole model, not an adapter to go on from",
            hint="Give --policy the folder that `pasta train sft` wrote.",
        )
    if Joining.kv not in checkpoints.load(policy).joins:
        raise PastaError(
            f"{policy} was not trained for the join kv, under which stage 2 samples and trains",
            hint="Train it with `pasta train sft --join kv --join text`.",
        )
    bases = [replace(checkpoints.load(adapter).base, name="") for adapter in (policy, baseline)]
    if bases[0] != bases[1]:
        raise PastaError(
            f"{policy} and {baseline} were trained on different base models",
            hint="Train the baseline with `pasta train sft --plain` on the policy's base.",
        )


def keep_prompts(out: Path, prompts: Sequence[Asked]) -> list[Asked]:
    """Return the prompts, each once; refuse others than those that the run folder knows."""
    prompts = each_once(prompts)
    if not prompts:
        raise PastaError("no prompt to answer", hint="Give other --prompts.")
    lines = json.loads(json.dumps([asdict(prompt) for prompt in prompts]))
    known = read_lines(out / "prompts.jsonl")
    if known and known != lines:
        raise PastaError(
            f"the prompts are not those that {out} was begun with",
            hint="Choose another --out, or restore the files of --prompts.",
        )
    write_lines(out / "prompts.jsonl", lines)
    return prompts


def share_samples(source: Path, out: Path, config: PreferenceConfig) -> None:
    """Copy what another run of the same policy sampled and measured, before a run begins.

    Raises PastaError if that run's samples were made with other settings, `out` is another run, or
    the adapters do not fit.
    """
    find_run(out, config)
    refuse_misfits(config)
    try:
        theirs = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PastaError(f"{source} holds no run: {error}", hint="Check --samples-from.") from error
    ours = json.loads(json.dumps(asdict(config)))
    if others := sorted(set(differing(theirs, ours)) - _FREE_OF_SAMPLES):
        raise PastaError(
            f"the samples of {source} were made with other {', '.join(others)}",
            hint="Repeat these settings of its config.json, or leave --samples-from out.",
        )
    for name in ("prompts", "baseline", "round-1/samples", "round-1/parts"):
        _copy_once(source / f"{name}.jsonl", out / f"{name}.jsonl")
    if not (out / "spent.jsonl").exists():
        spent = read_lines(source / "spent.jsonl")
        shared = [one for one in spent if (one["round"], one["stage"]) in _SHARED_STAGES]
        write_lines(out / "spent.jsonl", shared)


def _copy_once(source: Path, target: Path) -> None:
    """Copy all whole lines of a file: a run that was broken off may have left a torn one."""
    if source.exists() and not target.exists():
        whole = source.read_bytes()
        write_text(target, whole[: whole.rfind(b"\n") + 1].decode("utf-8"))
