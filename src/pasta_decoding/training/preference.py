"""Stage 2: preference training on sampled answers, in rounds of sample, score, pair and train.

The run folder keeps everything, and every stage goes on from what is there:

    config.json  prompts.jsonl    settings and prompts
    baseline.jsonl                the sequential baseline's answers
    round-N/samples.jsonl         answers with token ids and seeds, line by line
    round-N/parts.jsonl           what their scores are made of, prompt by prompt
    round-N/scores.jsonl          the score of each answer
    round-N/pairs.jsonl  round-N/summary.json
    round-N/reference.jsonl       log-probabilities before training
    round-N/train/  round-N/adapter/  checkpoints and metrics; the round's result
    adapter/                      the last round's result

Only scores, pairs and what follows depend on lambda, so runs that differ in it can share the
rest: `share_samples`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import append_line, differing, read_lines, write_lines, write_text
from pasta_decoding.data.rows import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.files import copy_whole
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.control_tokens import add_missing_tokens, grow_vocabulary
from pasta_decoding.models.load import default_device, holds_weights, load_base
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.runtime.request import Rules
from pasta_decoding.training.config import SAMPLING, PreferenceConfig, identity
from pasta_decoding.training.loop import Draw, Say
from pasta_decoding.training.lora import add_lora, save_adapter
from pasta_decoding.training.pairs import PairExample, train_pairs, with_references
from pasta_decoding.training.run import begin_run, owned, refuse_other_run
from pasta_decoding.training.sample import Sample, SampleSet, Track, sample_answers
from pasta_decoding.training.score import (
    PreferencePair,
    Rate,
    ScoreParts,
    baseline_tokens,
    choose_pairs,
    measure,
    score_parts,
    summarise,
)


@dataclass(frozen=True, slots=True)
class PreferenceRun:
    """The stages of a run over its folder.

    load_decoder: adapter folder -> a decoder for it on the engine; held as long as it is needed.
    load_rate:    the measure of quality, loaded when it is first needed.
    draw:         opens what shows the training of a round.
    """

    config: PreferenceConfig
    base: Path
    out: Path
    load_decoder: Callable[[Path], LocalDecoder]
    load_rate: Callable[[], Rate]
    say: Say
    track: Track
    draw: Draw

    def train(self, prompts: Sequence[Question]) -> Path:
        """Run all rounds, resuming what is in the run folder; return where the adapter is.

        Raises PastaError for another run's folder, adapters that do not fit, or nothing to learn
        from.
        """
        config, out = self.config, self.out
        refuse_other_run(out, config)
        refuse_misfits(config)
        with owned(out):
            begin_run(out, config)
            prompts = keep_prompts(out, prompts)
            sequential = replace(config.rules, parallel=False)
            wanted = self._set("baseline", config.baseline_samples, sequential)
            answers = self._sample(Path(config.baseline), prompts, wanted, out / "baseline.jsonl")
            baseline = baseline_tokens(answers)
            policy = Path(config.policy)
            for number in range(1, config.rounds + 1):
                policy = self._round(number, policy, prompts, baseline)
            copy_whole(policy, out / "adapter")
        return out / "adapter"

    def _round(
        self, number: int, policy: Path, prompts: Sequence[Question], baseline: dict[str, float]
    ) -> Path:
        """Sample, score, pair and train; return the round's adapter."""
        config, folder = self.config, self.out / f"round-{number}"
        wanted = self._set(folder.name, config.samples, config.rules)
        samples = self._sample(policy, prompts, wanted, folder / "samples.jsonl")
        parts = self._measure(folder / "parts.jsonl", prompts, samples)
        scores = score_parts(parts, baseline, config.lambda_)
        pairs = choose_pairs(samples, parts, scores)
        scored = zip(parts, scores, strict=True)
        lines = [{"prompt": p.prompt, "number": p.number, "score": one} for p, one in scored]
        write_lines(folder / "scores.jsonl", lines)
        write_lines(folder / "pairs.jsonl", map(asdict, pairs))
        write_text(folder / "summary.json", json.dumps(summarise(parts, pairs), indent=2) + "\n")
        if not pairs:
            raise PastaError(
                f"round {number} has no pair of a better and a worse answer",
                hint="Give more --prompts or --samples, or a larger --max-tokens.",
            )
        if not (folder / "adapter").exists():
            self._train(folder, policy, samples, pairs)
        return folder / "adapter"

    def _set(self, name: str, count: int, rules: Rules) -> SampleSet:
        return SampleSet(name, count, rules, self.config.seed, self.config.temperature)

    def _sample(
        self, adapter: Path, prompts: Sequence[Question], wanted: SampleSet, path: Path
    ) -> list[Sample]:
        """Return the answers of an adapter; those not yet in the file are sampled."""
        return sample_answers(lambda: self.load_decoder(adapter), prompts, wanted, path, self.track)

    def _measure(
        self, path: Path, prompts: Sequence[Question], samples: Sequence[Sample]
    ) -> list[ScoreParts]:
        """Return the parts of all scores; those not yet in the file are measured."""
        parts = [ScoreParts(**line) for line in read_lines(path, resume=True)]
        known = {(part.prompt, part.number): part for part in parts}
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt, []).append(sample)
        missing = [
            prompt
            for prompt in prompts
            if any((prompt.id, sample.number) not in known for sample in groups[prompt.id])
        ]
        for prompt in self.track(missing, "scoring", len(missing)):
            for part in measure(prompt, groups[prompt.id], self.load_rate()):
                append_line(path, asdict(part))
                known[part.prompt, part.number] = part
        return [known[sample.prompt, sample.number] for sample in samples]

    def _train(
        self, folder: Path, policy: Path, samples: Sequence[Sample], pairs: Sequence[PreferencePair]
    ) -> None:
        """Train on the pairs, going on from the policy's own weights, and save the adapter."""
        model, checkpoint = load_policy(self.base, policy, self.config)
        examples = lay_out_pairs(checkpoint, samples, pairs)
        if self.config.objective == "rejection":
            examples = [replace(one, layouts=one.layouts[:1]) for one in examples]
        else:
            examples = self._references(folder / "reference.jsonl", model, examples)
        tokens = sum(example.tokens for example in examples)
        self.say(f"{folder.name}: {len(pairs)} pairs, {tokens} tokens")
        with self.draw(f"training {folder.name}") as show:
            train_pairs(model, examples, self.config, folder / "train", self.say, show)
        # What a policy knew of other joins, this round has not kept up.
        save_adapter(model, replace(checkpoint, joins=(Joining.kv.value,)), folder / "adapter")

    def _references(
        self, path: Path, model: Any, examples: Sequence[PairExample]
    ) -> list[PairExample]:
        """Return the pairs with their log-probabilities before training, computed once."""
        if not path.exists():
            tracked = self.track(examples, "reference", len(examples))
            found = with_references(model, tracked, bf16=self.config.bf16)
            write_lines(path, [{"reference": one.reference} for one in found])
        pairs = zip(examples, read_lines(path), strict=True)
        return [replace(one, reference=tuple(line["reference"])) for one, line in pairs]


def lay_out_pairs(
    checkpoint: checkpoints.Checkpoint,
    samples: Sequence[Sample],
    pairs: Sequence[PreferencePair],
) -> list[PairExample]:
    """Lay the pairs out; the best promise the lengths that their chunks came to."""
    scheme, control = scheme_named(checkpoint.scheme), checkpoint.control
    sampled = {(sample.prompt, sample.number): sample for sample in samples}
    examples = []
    for pair in pairs:
        best = sampled[pair.prompt, pair.best].with_true_lengths(control)
        layouts = (best, sampled[pair.prompt, pair.worst])
        laid = tuple(one.layout(scheme, control) for one in layouts)
        examples.append(PairExample(laid, pair.candidates))
    return examples


def load_policy(
    base: Path, policy: Path, config: PreferenceConfig
) -> tuple[Any, checkpoints.Checkpoint]:
    """Return the policy with its LoRA trainable, and its checkpoint's record."""
    checkpoint = checkpoints.load(policy)
    model, tokenizer = load_base(base, dtype="bfloat16" if config.bf16 else "float32")
    add_missing_tokens(tokenizer, checkpoint.token_texts)
    checkpoints.check_match(checkpoint, model, tokenizer)
    grow_vocabulary(model, checkpoint.control)
    # The rank is the policy's own.
    model = add_lora(model, checkpoint.control, rank=0, seed=config.seed, start=str(policy))
    return model.to(config.device or default_device()), checkpoint


def refuse_misfits(config: PreferenceConfig) -> None:
    """Refuse adapters that do not go together, before hours are spent."""
    policy, baseline = Path(config.policy), Path(config.baseline)
    if holds_weights(policy):
        raise PastaError(
            f"{policy} holds a whole model, not an adapter to go on from: "
            "give --policy what pasta train sft wrote"
        )
    if Joining.kv not in checkpoints.load(policy).joins:
        raise PastaError(
            f"{policy} was not trained for the join kv, under which stage 2 samples and trains",
            hint="pasta train sft --join kv --join text",
        )
    bases = [replace(checkpoints.load(adapter).base, name="") for adapter in (policy, baseline)]
    if bases[0] != bases[1]:
        raise PastaError(
            f"{policy} and {baseline} were trained on different base models",
            hint="pasta train sft --plain, on the policy's base",
        )


def keep_prompts(out: Path, prompts: Sequence[Question]) -> list[Question]:
    """Return the prompts, each once; refuse others than those that the run folder knows."""
    prompts = list({prompt.id: prompt for prompt in prompts}.values())
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
    return prompts


def share_samples(source: Path, out: Path, config: PreferenceConfig) -> None:
    """Copy what another run of the same policy sampled and measured, before a run begins.

    Raises PastaError if that run's samples were made with other settings, `out` is another run, or
    the adapters do not fit.
    """
    refuse_other_run(out, config)
    refuse_misfits(config)
    try:
        theirs = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PastaError(f"{source} holds no run: {error}", hint="Check --samples-from.") from error
    ours = json.loads(json.dumps(identity(config)))
    if others := sorted(SAMPLING.intersection(differing(theirs, ours))):
        raise PastaError(
            f"the samples of {source} were made with other {', '.join(others)}",
            hint="Repeat these settings of its config.json, or leave --samples-from out.",
        )
    for name in ("prompts", "baseline", "round-1/samples", "round-1/parts"):
        if (source / f"{name}.jsonl").exists() and not (out / f"{name}.jsonl").exists():
            # All whole lines: a run that was broken off may have left a torn one.
            write_lines(out / f"{name}.jsonl", read_lines(source / f"{name}.jsonl"))
