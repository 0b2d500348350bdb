"""Stage 2: preference training on sampled answers, in rounds of sample, score, pair and train.

The run folder keeps everything, and every stage goes on from what is there:

    config.json  prompts.jsonl  spent.jsonl   settings, prompts, seconds and tokens of each stage
    baseline.jsonl                            the sequential baseline's answers
    round-N/samples.jsonl                     answers with token ids and seeds, line by line
    round-N/parts.jsonl                       what their scores are made of, prompt by prompt
    round-N/scores.jsonl  pairs.jsonl  summary.json
    round-N/reference.jsonl                   log-probabilities before training
    round-N/train/  round-N/adapter/          checkpoints and metrics; the round's result
    adapter/                                  the last round's result

Only scores, pairs and what follows depend on lambda, so runs that differ in it can share the
rest: `share_samples`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import append_line, differing, read_lines, write_lines, write_text
from pasta_decoding.data.questions import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.files import copy_whole
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.control_tokens import add_missing_tokens, grow_vocabulary
from pasta_decoding.models.load import default_device, holds_weights, load_base
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.training.config import FREE_OF_SAMPLES, PreferenceConfig
from pasta_decoding.training.loop import GOES_ON, Draw
from pasta_decoding.training.lora import add_lora, save_adapter
from pasta_decoding.training.pairs import PairExample, Reference, reference_sums, train_pairs
from pasta_decoding.training.run import begin_run, find_run, owned
from pasta_decoding.training.sample import AnswerSampler, Sample, Track, sample_answers
from pasta_decoding.training.score import (
    PreferencePair,
    Quality,
    ScoreParts,
    baseline_tokens,
    choose_pairs,
    measure,
    score_parts,
    summarise,
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a run needs from outside, and what it tells.

    load_decoder: adapter folder -> a decoder for it on the engine; held as long as it is needed.
    load_quality: the measure of quality, loaded when it is first needed.
    draw:         opens what shows the training of a round.
    report_to:    trackers that the Trainer logs to, by its names.
    """

    base: Path
    out: Path
    load_decoder: Callable[[Path], LocalDecoder]
    load_quality: Callable[[], Quality]
    say: Callable[[str], None]
    track: Track
    draw: Draw
    report_to: Sequence[str] = ()


def train_preference(
    config: PreferenceConfig, prompts: Sequence[Question], around: Surroundings
) -> dict[str, Any]:
    """Run all rounds, resuming what is in the run folder; return where the adapter is, and figures.

    Raises PastaError for another run's folder, adapters that do not fit, or nothing to learn from.
    """
    find_run(around.out, config)
    refuse_misfits(config)
    with owned(around.out):
        begin_run(around.out, config)
        run = PreferenceRun(config, around, keep_prompts(around.out, prompts))
        baseline = baseline_tokens(run.baseline_answers())
        policy = Path(config.policy)
        for number in range(1, config.rounds + 1):
            policy = run.round(number, policy, baseline)
        copy_whole(policy, around.out / "adapter")
        return run.result()


@dataclass(frozen=True, slots=True)
class PreferenceRun:
    """The stages of a run over its folder."""

    config: PreferenceConfig
    around: Surroundings
    prompts: list[Question]

    def baseline_answers(self) -> list[Sample]:
        """Return the sequential baseline's sampled answers."""
        count, baseline = self.config.baseline_samples, Path(self.config.baseline)
        with self.spending(0, "baseline") as spent:
            answers = self.sample(baseline, "baseline", count, "baseline.jsonl", parallel=False)
            spent["tokens"] = sum(answer.fed_tokens for answer in answers)
        return answers

    def round(self, number: int, policy: Path, baseline: dict[str, float]) -> Path:
        """Sample, score, pair and train; return the round's adapter."""
        folder = self.around.out / f"round-{number}"
        samples = self.sample_round(number, policy)
        parts = self.measure(number, samples)
        scores = score_parts(parts, baseline, self.config.lambda_)
        pairs = choose_pairs(samples, scores)
        write_lines(folder / "scores.jsonl", map(asdict, scores.scored))
        write_lines(folder / "pairs.jsonl", map(asdict, pairs))
        figures = summarise(samples, scores, pairs, baseline)
        write_text(folder / "summary.json", json.dumps(figures, indent=2) + "\n")
        if not pairs:
            raise PastaError(
                f"round {number} has no pair of a better and a worse answer",
                hint="Give more --prompts or --samples, or a larger --max-tokens.",
            )
        if not (folder / "adapter").exists():
            self.train(number, policy, samples, pairs)
        return folder / "adapter"

    def sample_round(self, number: int, policy: Path) -> list[Sample]:
        """Return the policy's annotated answers."""
        with self.spending(number, "sample") as spent:
            name, stage = f"round-{number}/samples.jsonl", f"round-{number}"
            samples = self.sample(policy, stage, self.config.samples, name)
            spent["tokens"] = sum(sample.fed_tokens for sample in samples)
        return samples

    def measure(self, number: int, samples: Sequence[Sample]) -> list[ScoreParts]:
        """Return the parts of all scores; what is not yet in the file is measured."""
        path = self.around.out / f"round-{number}" / "parts.jsonl"
        parts = [ScoreParts(**line) for line in read_lines(path, resume=True)]
        known = {(part.prompt, part.number): part for part in parts}
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt, []).append(sample)
        missing = [
            prompt
            for prompt in self.prompts
            if any((prompt.id, sample.number) not in known for sample in groups[prompt.id])
        ]
        with self.spending(number, "parts") as spent:
            for prompt in self.around.track(missing, "scoring", len(missing)):
                measured = measure(prompt, groups[prompt.id], self.around.load_quality())
                for part in measured:
                    append_line(path, asdict(part))
                known |= {(part.prompt, part.number): part for part in measured}
            spent["tokens"] = sum(sample.plain_tokens for sample in samples)
        return [known[sample.prompt, sample.number] for sample in samples]

    def train(
        self, number: int, policy: Path, samples: Sequence[Sample], pairs: Sequence[PreferencePair]
    ) -> None:
        """Train on the pairs, going on from the policy's own weights, and save the adapter."""
        folder = self.around.out / f"round-{number}"
        model, checkpoint = load_policy(self.around.base, policy, self.config)
        examples = self.examples(checkpoint, samples, pairs)
        tokens = sum(example.tokens for example in examples)
        self.around.say(f"round {number}: {len(pairs)} pairs, {tokens} tokens")
        references = self.references(number, model, examples)
        drawn = self.around.draw(f"training round {number}")
        with self.spending(number, "train") as spent, drawn as show:
            interrupted = train_pairs(
                model,
                examples,
                references,
                self.config,
                folder / "train",
                self.around.say,
                show,
                self.around.report_to,
            )
            spent["tokens"] = tokens * self.config.epochs
        # What a policy knew of other joins, this round has not kept up.
        save_adapter(model, replace(checkpoint, joins=(Joining.kv.value,)), folder / "adapter")
        if interrupted:
            raise KeyboardInterrupt(GOES_ON)

    def examples(
        self,
        checkpoint: checkpoints.Checkpoint,
        samples: Sequence[Sample],
        pairs: Sequence[PreferencePair],
    ) -> list[PairExample]:
        """Lay the pairs out; the best promise the lengths that their chunks came to."""
        scheme, control = scheme_named(checkpoint.scheme), checkpoint.control
        sampled = {(sample.prompt, sample.number): sample for sample in samples}
        alone = self.config.objective == "rejection"
        return [
            PairExample(
                sampled[one.prompt, one.best].with_true_lengths(control).layout(scheme, control),
                None if alone else sampled[one.prompt, one.worst].layout(scheme, control),
                one.candidates,
            )
            for one in pairs
        ]

    def references(
        self, number: int, model: Any, examples: Sequence[PairExample]
    ) -> list[Reference] | list[None]:
        """Return the log-probabilities before training, computed once; none for best alone."""
        if self.config.objective == "rejection":
            return [None] * len(examples)
        path = self.around.out / f"round-{number}" / "reference.jsonl"
        if not path.exists():
            with self.spending(number, "reference") as spent:
                tracked = self.around.track(examples, "reference", len(examples))
                found = reference_sums(model, tracked, bf16=self.config.bf16)
                write_lines(path, map(asdict, found))
                spent["tokens"] = sum(example.tokens for example in examples)
        return [Reference(**line) for line in read_lines(path)]

    def sample(
        self, adapter: Path, stage: str, count: int, name: str, *, parallel: bool = True
    ) -> list[Sample]:
        """Return the answers of an adapter that are kept in the file of that name."""
        config, around = self.config, self.around
        rules = replace(config.rules, parallel=parallel)
        sampler = AnswerSampler(stage, count, rules, config.seed, config.temperature)
        load = around.load_decoder
        path = around.out / name
        return sample_answers(lambda: load(adapter), self.prompts, sampler, path, around.track)

    @contextmanager
    def spending(self, number: int, stage: str) -> Iterator[dict[str, int]]:
        """Note seconds and tokens of a stage, each stage's tokens once."""
        path = self.around.out / "spent.jsonl"
        spent = {"tokens": 0}
        began_s = time.monotonic()
        try:
            yield spent
        finally:
            past = [
                one for one in read_lines(path) if (one["round"], one["stage"]) == (number, stage)
            ]
            if not any(one["tokens"] for one in past):
                seconds = round(time.monotonic() - began_s, 2)
                line = {"round": number, "stage": stage, "seconds": seconds, **spent}
                write_lines(path, [*read_lines(path), line])

    def result(self) -> dict[str, Any]:
        """Return the figures of the whole run."""
        summaries = [
            json.loads((self.around.out / f"round-{n}/summary.json").read_text(encoding="utf-8"))
            for n in range(1, self.config.rounds + 1)
        ]
        return {
            "adapter": str(self.around.out / "adapter"),
            "rounds": summaries,
            "spent": read_lines(self.around.out / "spent.jsonl"),
        }


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
    return model.to(default_device()), checkpoint


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
    find_run(out, config)
    refuse_misfits(config)
    try:
        theirs = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PastaError(f"{source} holds no run: {error}", hint="Check --samples-from.") from error
    ours = json.loads(json.dumps(asdict(config)))
    if others := sorted(set(differing(theirs, ours)) - FREE_OF_SAMPLES):
        raise PastaError(
            f"the samples of {source} were made with other {', '.join(others)}",
            hint="Repeat these settings of its config.json, or leave --samples-from out.",
        )
    if not (out / "spent.jsonl").exists():
        stages = (0, "baseline"), (1, "sample"), (1, "parts")
        spent = read_lines(source / "spent.jsonl")
        shared = [one for one in spent if (one["round"], one["stage"]) in stages]
        write_lines(out / "spent.jsonl", shared)
    for name in ("prompts", "baseline", "round-1/samples", "round-1/parts"):
        _copy_once(source / f"{name}.jsonl", out / f"{name}.jsonl")


def _copy_once(source: Path, target: Path) -> None:
    """Copy all whole lines of a file: a run that was broken off may have left a torn one."""
    if source.exists() and not target.exists():
        whole = source.read_bytes()
        write_text(target, whole[: whole.rfind(b"\n") + 1].decode("utf-8"))
