"""One run of stage 2: its folder, its rounds and their stages, each going on from what is there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pasta_decoding.data.asked import Asked
from pasta_decoding.data.lines import append_line, read_lines, write_lines, write_text
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.control_tokens import add_missing_tokens, grow_vocabulary
from pasta_decoding.models.load import default_device, load_base
from pasta_decoding.runtime.local import LocalDecoder
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.lora import add_lora, save_adapter
from pasta_decoding.training.pairs import (
    PairExample,
    Reference,
    reference_sums,
    train_pairs,
)
from pasta_decoding.training.progress import GOES_ON, Draw, Watching, undrawn
from pasta_decoding.training.rounds import summarise, worst_repeats
from pasta_decoding.training.run import begin_run, find_run
from pasta_decoding.training.sample import (
    AnswerSampler,
    Sample,
    Track,
    sample_answers,
)
from pasta_decoding.training.scoring import (
    PreferencePair,
    Quality,
    ScoreParts,
    Scores,
    choose_pairs,
    measure,
    score_parts,
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
    draw: Draw = undrawn
    report_to: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PreferenceRun:
    """The stages of a run over its folder."""

    config: PreferenceConfig
    around: Surroundings
    prompts: list[Asked]

    def baseline_answers(self) -> list[Sample]:
        """Return the sequential baseline's sampled answers."""
        sampler = self.sampler("baseline", self.config.baseline_samples, parallel=False)
        with self.spending(0, "baseline") as spent:
            answers = self.sample(
                Path(self.config.baseline), self.prompts, sampler, "baseline.jsonl"
            )
            spent["tokens"] = sum(answer.fed_tokens for answer in answers)
        return answers

    def round(self, number: int, policy: Path, baseline: dict[str, float]) -> Path:
        """Sample, score, pair and train; return the round's adapter."""
        folder = self.around.out / f"round-{number}"
        adapter = folder / "adapter"
        samples = self.sample_round(number, policy)
        parts = self.measure(number, samples)
        scores = score_parts(parts, baseline, self.config.weights)
        pairs = choose_pairs(samples, scores)
        self.write_scores(folder, samples, scores, pairs, baseline)
        if not pairs:
            raise PastaError(
                f"round {number} has no pair of a better and a worse answer",
                hint="Give more --prompts or --samples, or a larger --max-tokens.",
            )
        if not adapter.exists():
            self.train(number, policy, samples, pairs)
        return adapter

    def sample_round(self, number: int, policy: Path) -> list[Sample]:
        """Return the policy's annotated answers."""
        sampler = self.sampler(f"round-{number}", self.config.samples)
        with self.spending(number, "sample") as spent:
            samples = self.sample(policy, self.prompts, sampler, f"round-{number}/samples.jsonl")
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

    def write_scores(
        self,
        folder: Path,
        samples: Sequence[Sample],
        scores: Scores,
        pairs: Sequence[PreferencePair],
        baseline: dict[str, float],
    ) -> None:
        """Write scores, pairs and figures of a round."""
        figures = summarise(samples, scores, pairs, baseline)
        write_lines(folder / "scores.jsonl", map(asdict, scores.scored))
        write_lines(folder / "pairs.jsonl", map(asdict, pairs))
        write_lines(folder / "worst_repeats.jsonl", worst_repeats(samples, scores))
        write_text(folder / "summary.json", json.dumps(figures, indent=2) + "\n")

    def train(
        self, number: int, policy: Path, samples: Sequence[Sample], pairs: Sequence[PreferencePair]
    ) -> Path:
        """Train on the pairs, going on from the policy's own weights, and save the adapter."""
        folder = self.around.out / f"round-{number}"
        resume = find_run(folder / "train", self.config.pair_config)
        model, checkpoint = load_policy(self.around.base, policy, self.config)
        scheme = scheme_named(checkpoint.scheme)
        control = checkpoint.control
        sampled = {(sample.prompt, sample.number): sample for sample in samples}
        examples = []
        for pair in pairs:
            best, worst = sampled[pair.prompt, pair.best], sampled[pair.prompt, pair.worst]
            if self.config.true_lengths:
                best = best.with_true_lengths(control)
            layouts = best.layout(scheme, control), worst.layout(scheme, control)
            examples.append(PairExample(*layouts, pair.candidates))
        tokens = sum(len(one.best.tokens) + len(one.worst.tokens) for one in examples)
        self.around.say(f"round {number}: {len(pairs)} pairs, {tokens} tokens")
        references = self.references(number, model, examples)
        begin_run(folder / "train", self.config.pair_config)
        drawn = self.around.draw(f"training round {number}")
        with self.spending(number, "train") as spent, drawn as show:
            watching, trackers = Watching(self.around.say, show), self.around.report_to
            config, out = self.config.pair_config, folder / "train"
            asked = train_pairs(
                model, examples, references, config, out, resume, watching, trackers
            )
            spent["tokens"] = tokens * self.config.epochs
        # What a policy knew of other joins, this round has not kept up.
        record = replace(checkpoint, joins=(Joining.kv.value,))
        adapter = save_adapter(model, record, folder / "adapter")
        if asked:
            raise KeyboardInterrupt(GOES_ON)
        return adapter

    def references(
        self, number: int, model: Any, examples: Sequence[PairExample]
    ) -> list[Reference]:
        """Return the log-probabilities before training, computed once."""
        path = self.around.out / f"round-{number}" / "reference.jsonl"
        if not path.exists():
            with self.spending(number, "reference") as spent:
                tracked = self.around.track(examples, "reference", len(examples))
                found = reference_sums(model, tracked, bf16=self.config.bf16)
                write_lines(path, map(asdict, found))
                spent["tokens"] = sum(len(e.best.tokens) + len(e.worst.tokens) for e in examples)
        return [Reference(**line) for line in read_lines(path)]

    def sampler(self, stage: str, count: int, *, parallel: bool = True) -> AnswerSampler:
        """Return how the answers of a stage are sampled."""
        rules = replace(self.config.rules, parallel=parallel)
        return AnswerSampler(stage, count, rules, self.config.seed, self.config.temperature)

    def sample(
        self, adapter: Path, prompts: Sequence[Asked], sampler: AnswerSampler, name: str
    ) -> list[Sample]:
        """Return the answers of an adapter that are kept in the file of that name."""
        around = self.around
        return sample_answers(
            lambda: around.load_decoder(adapter), prompts, sampler, around.out / name, around.track
        )

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


def load_policy(base: Path, policy: Path, config: PreferenceConfig) -> tuple[Any, Any]:
    """Return the policy with its LoRA trainable, and its checkpoint's record."""
    checkpoint = checkpoints.load(policy)
    model, tokenizer = load_base(base, dtype="bfloat16" if config.bf16 else "float32")
    add_missing_tokens(tokenizer, checkpoint.token_texts)
    checkpoints.check_match(checkpoint, model, tokenizer)
    grow_vocabulary(model, checkpoint.control)
    # The rank is the policy's own.
    model = add_lora(model, checkpoint.control, rank=0, seed=config.seed, start=str(policy))
    return model.to(default_device()), checkpoint
