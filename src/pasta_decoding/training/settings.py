"""The settings of stage 2, what they refuse, and what two runs may share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pasta_decoding.data.lines import read_lines, write_lines, write_text
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.loading import holds_weights
from pasta_decoding.runtime.rules import Rules
from pasta_decoding.training.pairs import PairConfig
from pasta_decoding.training.sample import Prompt, prompt_of
from pasta_decoding.training.scoring import Weights


@dataclass(frozen=True, slots=True)
class PreferenceConfig:
    """One run; its resolved form is `config.json` in the run folder.

    policy:           adapter that the first round samples from and trains on.
    baseline:         adapter of the sequential baseline.
    check:            prompts whose greedy answers show each round's effect; None for no check.
    limit:            prompts, chosen by the seed among those of at most `max_prompt_chars`.
    engine:           what decodes, in words; answers of two engines differ in near-ties.
    samples:          annotated answers a prompt, at temperature 1.
    baseline_samples: sequential answers of the baseline a prompt.
    weights:          how scores are made; `lambda_` None is infinity.
    max_tokens:       tokens of one answer, tags included.
    """

    prompts: tuple[str, ...]
    policy: str
    baseline: str
    check: str | None = None
    check_limit: int = 50
    limit: int | None = None
    max_prompt_chars: int = 1000
    engine: str = ""
    rounds: int = 1
    samples: int = 8
    baseline_samples: int = 4
    max_tokens: int = 400
    max_threads: int = 12
    max_chunks: int = 16
    quality: str = "nats"
    weights: Weights = field(default_factory=Weights)
    alpha: float = 0.005
    epochs: int = 1
    learning_rate: float = 1e-4
    warmup_steps: int = 5
    pairs_per_step: int = 4
    save_every_steps: int = 10
    seed: int = 0
    bf16: bool = True

    @property
    def rules(self) -> Rules:
        """How far an annotated answer may go."""
        return Rules(
            max_tokens=self.max_tokens, max_threads=self.max_threads, max_chunks=self.max_chunks
        )

    @property
    def pair_config(self) -> PairConfig:
        """How a round is trained."""
        return PairConfig(
            alpha=self.alpha,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            pairs_per_step=self.pairs_per_step,
            save_every_steps=self.save_every_steps,
            seed=self.seed,
            bf16=self.bf16,
        )


# Keys that neither samples nor what is measured of them depend on.
_FREE_OF_SAMPLES = frozenset(
    {
        "rounds",
        "weights",
        "alpha",
        "epochs",
        "learning_rate",
        "warmup_steps",
        "pairs_per_step",
        "save_every_steps",
        "bf16",
    }
)

_SHARED_STAGES = frozenset(
    {
        (0, "baseline"),
        (0, "check_answers"),
        (0, "check_parts"),
        (0, "check_baseline_answers"),
        (0, "check_baseline_parts"),
        (1, "sample"),
        (1, "parts"),
    }
)


def refuse_misfits(config: PreferenceConfig) -> None:
    """Refuse adapters that cannot be trained on or compared, before hours are spent."""
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


def keep_prompts(out: Path, instructions: Sequence[str]) -> list[Prompt]:
    """Return the prompts, each once; refuse others than those that the run folder knows."""
    prompts = [prompt_of(text) for text in dict.fromkeys(instructions)]
    if not prompts:
        raise PastaError("no prompt to answer", hint="Give other --prompts.")
    lines = [asdict(prompt) for prompt in prompts]
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

    Raises PastaError if that run's samples were made with other settings.
    """
    try:
        theirs = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PastaError(f"{source} holds no run: {error}", hint="Check --samples-from.") from error
    ours = json.loads(json.dumps(asdict(config)))
    differing = [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in _FREE_OF_SAMPLES and ours.get(name) != theirs.get(name)
    ]
    if differing:
        raise PastaError(
            f"the samples of {source} were made with other {', '.join(differing)}",
            hint="Repeat these settings of its config.json, or leave --samples-from out.",
        )
    for name in ("prompts", "baseline", "check_baseline", "check_baseline_parts"):
        _copy_once(source / f"{name}.jsonl", out / f"{name}.jsonl")
    if not (out / "spent.jsonl").exists():
        spent = read_lines(source / "spent.jsonl")
        shared = [one for one in spent if (one["round"], one["stage"]) in _SHARED_STAGES]
        write_lines(out / "spent.jsonl", shared)
    for folder, names in (
        ("round-0", ("check", "check_parts")),
        ("round-1", ("samples", "parts")),
    ):
        for name in names:
            _copy_once(source / folder / f"{name}.jsonl", out / folder / f"{name}.jsonl")


def _copy_once(source: Path, target: Path) -> None:
    if source.exists() and not target.exists():
        write_text(target, source.read_text(encoding="utf-8"))
