"""Stage 2: preference training on sampled answers, in rounds of sample, score, pair and train.

The run folder keeps everything, and every stage goes on from what is there:

    config.json  prompts.jsonl    settings and prompts
    baseline.jsonl                the sequential baseline's answers
    round-N/samples.jsonl         answers with token ids and seeds, line by line
    round-N/parts.jsonl           what their scores are made of, prompt by prompt
    round-N/scores.jsonl          the score of each answer
    round-N/pairs.jsonl  round-N/summary.json
    round-N/train/  round-N/adapter/  checkpoints and metrics; the round's result
    adapter/                      the last round's result

Only scores, pairs and what follows depend on lambda, so runs that differ in it can share the
rest: `share_samples`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from pasta_decoding.api.checkpoints import find
from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import ENGINES, choose_engine, open_local
from pasta_decoding.data.lines import (
    append_line,
    read_json,
    read_lines,
    refuse_other_settings,
    write_lines,
)
from pasta_decoding.data.rows import Question, Row, digest
from pasta_decoding.errors import PastaError
from pasta_decoding.files import copy_whole, write_json
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.load import default_device, holds_weights, load_base, native_dtype
from pasta_decoding.runtime.request import Rules
from pasta_decoding.training import bonbon, score
from pasta_decoding.training.bonbon import Compile, preference_loss, with_references
from pasta_decoding.training.config import SAMPLING, PreferenceConfig
from pasta_decoding.training.loop import RunTrainer, training_arguments
from pasta_decoding.training.lora import save, take_up
from pasta_decoding.training.run import begin_run, figures_of, owned, refuse_other_run, tracked
from pasta_decoding.training.sample import Sample, sample_answers
from pasta_decoding.training.score import ScoreParts
from pasta_decoding.training.view import tokens_of

log = logging.getLogger(__name__)


def engine_of(config: PreferenceConfig, base: Path, adapter: str) -> EngineConfig:
    return EngineConfig(
        model=base,
        engine=config.engine,
        join=Joining.kv,
        dtype=config.dtype,
        cache_tokens=config.cache_tokens,
        device=config.device,
    ).of(adapter)


def settled(config: PreferenceConfig, base: Path) -> PreferenceConfig:
    """Return the settings with one engine and one number format, which are kept with the run."""
    checkpoint = find(engine_of(config, base, config.policy), Path())
    engine: Any = choose_engine(checkpoint)
    dtype: Any = config.dtype if engine == "llama" else ENGINES[engine].dtype(checkpoint)
    return replace(config, engine=engine, dtype=dtype)


@dataclass(frozen=True, slots=True)
class PreferenceRun:
    """The stages of a run over its folder. `cache` is for what the engine exports on the way."""

    config: PreferenceConfig
    base: Path
    out: Path
    cache: Path

    def train(self, prompts: Sequence[Question]) -> Path:
        """Run all rounds over prompts that differ, resuming them; return the adapter's folder.

        Raises PastaError for another run's folder, adapters that do not fit, or nothing to learn
        from.
        """
        config, out = self.config, self.out
        refuse_other_run(out, config)
        refuse_misfits(config)
        with owned(out):
            begin_run(out, config)
            keep_prompts(out, prompts)
            count, rules = config.baseline_samples, replace(config.rules, parallel=False)
            own = self._sample("baseline", config.baseline, prompts, count, rules)
            baseline = score.baseline_tokens(own)
            policy = Path(config.policy)
            for number in range(1, config.rounds + 1):
                policy = self._round(number, policy, prompts, baseline)
            copy_whole(policy, out / "adapter")
        log.info("finished: %d rounds", config.rounds)
        return out / "adapter"

    def train_on(self, pairs: Sequence[tuple[Row, Row]]) -> Path:
        """Train on answers that somebody else has chosen and rejected; as `train` otherwise."""
        config, out = self.config, self.out
        inputs = {"pairs": digest(chain.from_iterable(pairs))}
        refuse_other_run(out, config, inputs)
        refuse_misfits(config)
        with owned(out):
            begin_run(out, config, inputs)
            if not (out / "adapter").exists():
                compile_pairs = partial(bonbon.compile_pairs, pairs, config=config)
                self._train(out, Path(config.policy), compile_pairs)
        log.info("finished: %s", figures_of(out / "train"))
        return out / "adapter"

    def _round(
        self, number: int, policy: Path, prompts: Sequence[Question], baseline: dict[str, float]
    ) -> Path:
        config, folder = self.config, self.out / f"round-{number}"
        samples = self._sample(folder.name, str(policy), prompts, config.samples, config.rules)
        parts = self._measure(folder / "parts.jsonl", prompts, samples)
        scores = score.score_parts(parts, baseline, config.lambda_)
        pairs = score.choose_pairs(samples, parts, scores)
        scored = zip(parts, scores, strict=True)
        lines = [{"prompt": p.prompt, "number": p.number, "score": one} for p, one in scored]
        write_lines(folder / "scores.jsonl", lines)
        write_lines(folder / "pairs.jsonl", map(asdict, pairs))
        write_json(folder / "summary.json", score.summarise(parts, pairs))
        if not pairs:
            raise PastaError(
                f"round {number} has no pair of a better and a worse answer",
                hint="Give more --prompts or --samples, or a larger --max-tokens.",
            )
        if not (folder / "adapter").exists():
            self._train(folder, policy, partial(bonbon.lay_out_pairs, samples, pairs))
        return folder / "adapter"

    def _sample(
        self, name: str, adapter: str, prompts: Sequence[Question], count: int, rules: Rules
    ) -> list[Sample]:
        config, engine = self.config, engine_of(self.config, self.base, adapter)
        place = "baseline.jsonl" if name == "baseline" else f"{name}/samples.jsonl"
        settings: Any = {"name": name, "count": count, "rules": rules, "config": config}
        return sample_answers(
            lambda: open_local(engine, self.cache), prompts, self.out / place, **settings
        )

    def _measure(
        self, path: Path, prompts: Sequence[Question], samples: Sequence[Sample]
    ) -> list[ScoreParts]:
        """Return the parts of all scores; those not yet in the file are measured."""
        parts = [ScoreParts(**line) for line in read_lines(path, resume=True)]
        known = {(part.prompt, part.number): part for part in parts}
        groups = {prompt: list(some) for prompt, some in groupby(samples, attrgetter("prompt"))}
        lacking = {one.prompt for one in samples if (one.prompt, one.number) not in known}
        if missing := [prompt for prompt in prompts if prompt.id in lacking]:
            free_memory()
            device = self.config.device or default_device()
            baseline, dtype = Path(self.config.baseline), native_dtype(device)
            rate = score.likelihood_rate(self.base, baseline, dtype=dtype, device=device)
            for prompt in tracked(missing, "scoring", len(missing)):
                for part in score.measure(prompt, groups[prompt.id], rate):
                    append_line(path, asdict(part))
                    known[part.prompt, part.number] = part
        return [known[sample.prompt, sample.number] for sample in samples]

    def _train(self, folder: Path, policy: Path, compile_examples: Compile) -> None:
        """Train on pairs, going on from the policy's own weights, and save the adapter."""
        free_memory()
        config, whole = self.config, holds_weights(policy)
        dtype = "bfloat16" if config.bf16 and not whole else "float32"
        loaded = load_base(self.base, policy, dtype=dtype)
        model = loaded.model if whole else take_up(loaded.model, policy, seed=config.seed)
        loaded = replace(loaded, model=model.to(config.device or default_device()))
        examples = compile_examples(loaded)
        if config.objective == "rejection":
            examples = [replace(one, layouts=one.layouts[:1]) for one in examples]
        else:
            shown = tracked(examples, "reference", len(examples))
            examples = with_references(loaded.model, shown, bf16=config.bf16)
        tokens = tokens_of(example.layouts for example in examples)
        log.info("%s: %d pairs, %d tokens", folder.name, len(examples), tokens)
        # The order of all epochs is fixed in advance, so that a resumed run sees the same one.
        generator = torch.Generator().manual_seed(config.seed)
        orders = [torch.randperm(len(examples), generator=generator) for _ in range(config.epochs)]
        plan = [examples[int(place)] for order in orders for place in order]
        device, loss = loaded.model.device.type, partial(preference_loss, alpha=config.alpha)
        arguments = training_arguments(folder / "train", config, len(plan), device)
        RunTrainer(loaded.model, loss, plan, arguments).run()
        # What a policy knew of other joins, this round has not kept up.
        checkpoint = replace(loaded.checkpoint, joins=(Joining.kv.value,))
        save(replace(loaded, checkpoint=checkpoint), folder / "adapter")


def free_memory() -> None:
    """Give back what models that are no longer used hold, cycles and a GPU's cache included."""
    gc.collect()
    torch.cuda.empty_cache()


def refuse_misfits(config: PreferenceConfig) -> None:
    """Refuse adapters that do not go together, before hours are spent."""
    policy, baseline = Path(config.policy), Path(config.baseline)
    if Joining.kv not in checkpoints.load(policy).joins:
        raise PastaError(
            f"{policy} was not trained for the join kv, under which stage 2 samples and trains",
            hint="pasta train sft --join kv --join text",
        )
    adapters = [one for one in (policy, baseline) if one.name and not holds_weights(one)]
    if len({replace(checkpoints.load(adapter).base, name="") for adapter in adapters}) > 1:
        raise PastaError(
            f"{policy} and {baseline} were trained on different base models",
            hint="pasta train sft --plain, on the policy's base",
        )


def keep_prompts(out: Path, prompts: Sequence[Question]) -> None:
    """Write the prompts into the run folder; refuse others than those that it knows."""
    if not prompts:
        raise PastaError("no prompt to answer: give other --prompts")
    lines = [{"id": prompt.id, "instruction": prompt.instruction} for prompt in prompts]
    known = read_lines(out / "prompts.jsonl")
    if known and known != lines:
        raise PastaError(
            f"the prompts are not those that {out} was begun with",
            hint="Choose another --out, or restore the files of --prompts.",
        )
    write_lines(out / "prompts.jsonl", lines)


def share_samples(source: Path, out: Path, config: PreferenceConfig) -> None:
    """Copy what another run of the same policy sampled and measured, before a run begins.

    Raises PastaError if that run's samples were made with other settings, `out` is another run, or
    the adapters do not fit.
    """
    refuse_other_run(out, config)
    refuse_misfits(config)
    hint = "Repeat these settings of its config.json, or leave --samples-from out."
    sampling = {name: getattr(config, name) for name in SAMPLING}
    refuse_other_settings(source, read_json(source / "config.json", dict), sampling, hint=hint)
    for name in ("prompts", "baseline", "round-1/samples", "round-1/parts"):
        if (source / f"{name}.jsonl").exists() and not (out / f"{name}.jsonl").exists():
            # All whole lines: a run that was broken off may have left a torn one.
            write_lines(out / f"{name}.jsonl", read_lines(source / f"{name}.jsonl"))
