"""Stage 2: preference training on sampled answers, in rounds of sample, score, pair and train.

Each step of a round resumes from its files in the run folder:

    config.json  prompts.jsonl    settings and prompts
    baseline.jsonl                the baseline's greedy answers
    round-N/samples.jsonl         answers with token ids and seeds, one a line
    round-N/answers.jsonl         the plain texts, for those who grade them
    round-N/verdicts.jsonl        replies of a judge
    round-N/grades.jsonl          the grade of each answer
    round-N/parts.jsonl           measures of each answer that its score is computed from
    round-N/scores.jsonl          the score of each answer
    round-N/pairs.jsonl           best and worst answer of each prompt
    round-N/summary.json          means over all, best and worst answers; how training went
    round-N/watch.jsonl           what was watched in training
    round-N/train/                checkpoints and metrics
    round-N/features/             of `eagerness`: hidden states, a file for each prompt
    round-N/adapter/              result of the round
    adapter/                      result of the last round

Sampling, grading and training are stages: while grades are missing, the run ends and says which
file it waits for. Runs that differ in lambda can share samples and grades: `share_samples`.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from pasta_decoding.answer.settings import Rules
from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import ENGINES, choose_engine, find_files, open_local
from pasta_decoding.data.checks import Check
from pasta_decoding.data.endpoint import Endpoint
from pasta_decoding.data.lines import read_json, read_lines, refuse_other_settings, write_lines
from pasta_decoding.data.rows import Question, Row, digest
from pasta_decoding.errors import PastaError, require
from pasta_decoding.files import copy_whole, sha256, write_json
from pasta_decoding.lang.layout import Joining, Layout
from pasta_decoding.models.catalog import adapter_on, holds_weights, model_beside
from pasta_decoding.models.checkpoint import read_checkpoint
from pasta_decoding.models.load import LoadedModel, default_device, load_base
from pasta_decoding.scheduling.decoder import Decoder
from pasta_decoding.training import loop, score
from pasta_decoding.training.config import SAMPLING, PreferenceConfig
from pasta_decoding.training.eagerness import capped_scores, learn_eagerness
from pasta_decoding.training.examples import fill_last_step
from pasta_decoding.training.loop import RunTrainer, processes, training_arguments
from pasta_decoding.training.lora import refuse_learned_eagerness, save, take_up
from pasta_decoding.training.objectives import anchored_pulls
from pasta_decoding.training.pairs import (
    compile_pairs,
    compile_replay,
    lay_out_pairs,
    preference_loss,
    with_references,
    with_replay,
)
from pasta_decoding.training.quality import Grader, half_grade
from pasta_decoding.training.run import owned, refuse_other_run, with_precision, write_settings
from pasta_decoding.training.sample import Sample, sample_answers
from pasta_decoding.training.score import ScoreParts
from pasta_decoding.training.view import Example, tokens_of
from pasta_decoding.training.watch import Watch

log = logging.getLogger(__name__)
CompileExamples = Callable[[LoadedModel], list[Example]]
"""Lays pairs out for a model."""


def engine_of(config: PreferenceConfig, base: Path, adapter: str) -> EngineConfig:
    """Return the engine that samples with an adapter."""
    return EngineConfig(
        adapter,
        model_beside(adapter, base),
        engine=config.engine,
        join=Joining.kv,
        dtype=config.dtype,
        cache_tokens=config.cache_tokens,
        # The other engines decode on the CPU.
        device=config.device if config.engine in ("auto", "torch") else None,
        base_url=config.base_url,
    )


def resolve_engine(config: PreferenceConfig, base: Path, cache: Path) -> PreferenceConfig:
    """Return the settings with the engine and the number format that `auto` stands for here.

    They are stored with the run, so that a resumed run samples in the same way.
    """
    files = find_files(engine_of(config, base, config.policy), cache)
    engine: Any = choose_engine(files)
    dtype: Any = config.dtype
    if engine in ("fast", "torch"):
        dtype = ENGINES[engine].dtype(files)
    return replace(config, engine=engine, dtype=dtype)


@dataclass(frozen=True, slots=True)
class PreferenceRun:
    """A run of stage 2 in the folder `out`.

    cache:   folder for files that the engine exports or builds.
    replay:  rows of stage 1, for the objective `anchored`.
    api_key: key of the servers at `config.base_url`.
    judge:   the endpoint of the judge, if the quality is `judge`.
    checks:  by prompt, if the quality is `checks`.
    """

    config: PreferenceConfig
    base: Path
    out: Path
    cache: Path
    replay: Sequence[Row] = ()
    api_key: str | None = None
    judge: Endpoint | None = None
    checks: Mapping[str, Sequence[Check]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.config.device or default_device()
        object.__setattr__(self, "config", with_precision(self.config, self.out, device))

    def train(self, prompts: Sequence[Question], pairs: Sequence[tuple[Row, Row]] = ()) -> Path:
        """Run all rounds, or resume them; return the adapter's folder.

        prompts: no two are the same.
        pairs:   written answers, chosen and rejected. With pairs, nothing is sampled.

        Raises PastaError if the folder holds another run, if adapters do not fit, or if there is
        nothing to learn from.
        """
        config = self.config
        out = self.out
        policy = Path(config.policy)
        inputs = {"pairs": digest(chain.from_iterable(pairs)), "replay": digest(self.replay)}
        refuse_other_run(out, config, inputs)
        refuse_misfits(config)
        # One process may sample much longer than another.
        distributed_state = processes(timeout=timedelta(days=7))
        loop.examples_per_step(config)
        with owned(out):
            if distributed_state.is_main_process:
                write_settings(out, config, inputs)
                if not config.pairs:
                    write_prompts(out, prompts)
            for number in range(1, config.rounds + 1):
                folder = out / f"round-{number}"
                train = self._prepare(folder, policy, prompts, pairs)
                if not (folder / "adapter").exists():
                    free_memory()
                    train()
                policy = folder / "adapter"
            if distributed_state.is_main_process:
                copy_whole(policy, out / "adapter")
        distributed_state.wait_for_everyone()
        log.info("finished: %d rounds", config.rounds)
        return out / "adapter"

    def _prepare(
        self,
        folder: Path,
        policy: Path,
        prompts: Sequence[Question],
        pairs: Sequence[tuple[Row, Row]],
    ) -> Callable[[], None]:
        """Sample, grade and score, unless there are pairs; return a function that trains."""
        config = self.config
        if config.pairs:
            return partial(self._train, folder, policy, partial(compile_pairs, pairs, config))
        samples, parts, scores = self._score_samples(folder, policy, prompts)
        if config.objective == "eagerness":
            return partial(self._learn_eagerness, folder, policy, samples, parts, scores)
        compile_examples = self._choose_pairs(folder, samples, parts, scores)
        return partial(self._train, folder, policy, compile_examples)

    def _score_samples(
        self, folder: Path, policy: Path, prompts: Sequence[Question]
    ) -> tuple[list[Sample], list[ScoreParts], list[float | None]]:
        """Sample, grade and score the answers of a round."""
        config = self.config
        sequential = replace(config.rules, parallel=False)
        baseline = self._sample(
            "baseline", config.baseline, prompts, 1, sequential, temperature=0.0
        )
        samples = self._sample(
            folder.name,
            str(policy),
            prompts,
            config.samples,
            config.rules,
            temperature=config.temperature,
        )
        baseline_source = adapter_on(self.base, Path(config.baseline))
        grader = Grader(config, baseline_source, folder, self.judge, self.checks)
        grades = grader.grade(prompts, baseline, samples)
        parts = score.measure_all(prompts, baseline, samples, grades)
        scores = score.score_parts(parts, config.lambda_, half_grade(config.quality))
        if processes().is_main_process:
            lines = [
                {"prompt": part.prompt, "number": part.number, "score": part_score}
                for part, part_score in zip(parts, scores, strict=True)
            ]
            write_lines(folder / "parts.jsonl", map(asdict, parts))
            write_lines(folder / "scores.jsonl", lines)
        return samples, parts, scores

    def _choose_pairs(
        self,
        folder: Path,
        samples: Sequence[Sample],
        parts: Sequence[ScoreParts],
        scores: Sequence[float | None],
    ) -> CompileExamples:
        """Choose the pairs of a round; return a function that lays them out."""
        pairs = score.choose_pairs(samples, parts, scores)
        if processes().is_main_process:
            write_lines(folder / "pairs.jsonl", map(asdict, pairs))
            add_to_summary(folder, score.summarise(parts, pairs))
        if not pairs:
            raise PastaError(
                f"{folder.name.replace('-', ' ')} has no pair of a better and a worse answer",
                hint="Give more --prompts or --samples, or a larger --max-tokens.",
            )
        return partial(lay_out_pairs, samples, pairs, self.config)

    def _sample(
        self,
        name: str,
        adapter: str,
        prompts: Sequence[Question],
        count: int,
        rules: Rules,
        *,
        temperature: float,
    ) -> list[Sample]:
        """Return `count` answers to each prompt; `name` is "baseline" or the name of a round."""
        file = "baseline.jsonl" if name == "baseline" else f"{name}/samples.jsonl"
        return sample_answers(
            partial(self._decoder, name, Path(adapter)),
            prompts,
            self.out / file,
            name=name,
            count=count,
            rules=rules,
            temperature=temperature,
            config=self.config,
        )

    @contextmanager
    def _decoder(self, name: str, adapter: Path) -> Iterator[Decoder]:
        """Open a decoder with an adapter. Servers hold the adapter until all processes are done."""
        config = self.config
        if config.engine != "remote":
            yield open_local(engine_of(config, self.base, str(adapter)), self.cache)
            return
        require("httpx2", extra="remote", doing="the remote engine")
        from pasta_decoding.remote.adapters import served_adapter
        from pasta_decoding.remote.decoder import remote_decoder

        weights = sha256(adapter / "adapter_model.safetensors")[:8]
        folder = self.out / f"{self.out.resolve().name}-{name}-{weights}"
        distributed_state = processes()
        on_servers = served_adapter(
            self.base, adapter, folder, base_urls=config.base_url, api_key=self.api_key
        )
        with on_servers if distributed_state.is_main_process else nullcontext():
            distributed_state.wait_for_everyone()
            yield remote_decoder(
                adapter_on(self.base, adapter),
                base_urls=config.base_url,
                api_key=self.api_key,
                names=[folder.name],
                joining=config.joining,
            )
            distributed_state.wait_for_everyone()

    def _learn_eagerness(
        self,
        folder: Path,
        policy: Path,
        samples: Sequence[Sample],
        parts: Sequence[ScoreParts],
        scores: Sequence[float | None],
    ) -> None:
        """Learn when the policy should promise and sync, and save the adapter."""
        figures = learn_eagerness(
            self.base,
            samples,
            capped_scores(parts, scores),
            folder,
            policy=policy,
            config=self.config,
        )
        if figures is not None:
            add_to_summary(folder, score.summarise(parts, []) | {"eagerness": figures})

    def _train(self, folder: Path, policy: Path, compile_examples: CompileExamples) -> None:
        """Train the policy on pairs, and save the adapter in the round's folder."""
        config = self.config
        loaded = self._load_policy(policy)
        replay = compile_replay(self.replay, config, loaded) if self.replay else []
        examples = self._complete(compile_examples(loaded), replay, loaded)
        tokens = tokens_of(example.layouts for example in examples)
        log.info("%s: %d pairs, %d tokens", folder.name, len(examples), tokens)
        distributed_state = processes()
        plan = fill_last_step(
            _all_epochs(examples, config), config.pairs_per_step, distributed_state.num_processes
        )
        loss = partial(preference_loss, config=config)
        device = loaded.model.device.type
        arguments = training_arguments(folder / "train", config, len(plan), device)
        watch = self._watch(folder, loaded, list(chain.from_iterable(replay)))
        weights = RunTrainer(loaded.model, loss, plan, arguments, watch=watch).run()
        if distributed_state.is_main_process:
            if watch is not None:
                watched = read_lines(watch.path)
                add_to_summary(folder, {"watched": watched, "stopped": watch.stop_reason})
            # This round trained one join only; the policy may have unlearned the other.
            checkpoint = replace(loaded.checkpoint, joins=(config.joining.value,))
            save(replace(loaded, checkpoint=checkpoint), folder / "adapter", weights=weights)
        distributed_state.wait_for_everyone()

    def _load_policy(self, policy: Path) -> LoadedModel:
        config = self.config
        all_weights = holds_weights(policy)
        dtype = "bfloat16" if config.bf16 and not all_weights else "float32"
        loaded = load_base(adapter_on(self.base, policy), dtype=dtype)
        model = loaded.model if all_weights else take_up(loaded.model, policy, seed=config.seed)
        return replace(loaded, model=model.to(config.device or default_device()))

    def _complete(
        self, examples: list[Example], replay: Sequence[Sequence[Layout]], loaded: LoadedModel
    ) -> list[Example]:
        """Return the examples with replayed rows and references, as their objective needs them."""
        config = self.config
        if config.objective == "rejection":
            return examples
        if config.objective == "anchored":
            log.info("pulls at the first step: %s", _pulls_line(examples))
        if replay:
            examples = list(with_replay(examples, replay))
        return with_references(loaded.model, examples, bf16=bool(config.bf16))

    def _watch(self, folder: Path, loaded: LoadedModel, rows: Sequence[Layout]) -> Watch | None:
        """Return the watch over the round's training; only `anchored` has one."""
        if self.config.objective != "anchored":
            return None
        return Watch(
            folder / "watch.jsonl",
            rows,
            end=loaded.end,
            sync=loaded.checkpoint.control.sync,
            bf16=bool(self.config.bf16),
        )


def add_to_summary(folder: Path, entries: Mapping[str, Any]) -> None:
    """Add entries to `summary.json` of a round; entries of these names are replaced."""
    path = folder / "summary.json"
    summary = read_json(path, dict) if path.exists() else {}
    write_json(path, summary | dict(entries))


def _pulls_line(examples: Sequence[Example]) -> str:
    """Return the mean share of each term in the pull at the first step, for the log."""
    shares = [anchored_pulls(example.best_of, example.worst_of) for example in examples]
    means = {term: fmean(share[term] for share in shares) for term in shares[0]}
    return ", ".join(f"{term} {mean:.0%}" for term, mean in means.items())


def _all_epochs(examples: Sequence[Example], config: PreferenceConfig) -> list[Example]:
    """Fix the order of all epochs in advance, so that a resumed run sees the same one."""
    generator = torch.Generator().manual_seed(config.seed)
    shuffled: list[Example] = []
    for _ in range(config.epochs):
        order = torch.randperm(len(examples), generator=generator)
        shuffled += [examples[int(index)] for index in order]
    return shuffled


def free_memory() -> None:
    """Free the memory of models that are no longer used, cycles and the GPU's cache included."""
    gc.collect()
    torch.cuda.empty_cache()


def refuse_misfits(config: PreferenceConfig) -> None:
    """Raise PastaError if policy, baseline and join do not go together, before hours are spent."""
    policy = Path(config.policy)
    baseline = Path(config.baseline)
    if config.joining not in read_checkpoint(policy).joins:
        raise PastaError(
            f"{policy} was not trained for the join {config.joining}, under which stage 2 samples "
            "and trains",
            hint="pasta train sft --join kv --join text",
        )
    if config.objective != "eagerness":
        refuse_learned_eagerness(policy)
    elif holds_weights(policy):
        raise PastaError(f"eagerness is learned for adapters, and {policy} holds a whole model")
    bases = {
        replace(read_checkpoint(adapter).base, name="")
        for adapter in (policy, baseline)
        if adapter.name and not holds_weights(adapter)
    }
    if len(bases) > 1:
        raise PastaError(
            f"{policy} and {baseline} were trained on different base models",
            hint="pasta train sft --plain, on the policy's base",
        )


def write_prompts(out: Path, prompts: Sequence[Question]) -> None:
    """Write the prompts into the run folder. Raises PastaError if it holds other prompts."""
    if not prompts:
        raise PastaError("no prompt to answer: give other --prompts")
    lines = [{"id": prompt.id, "instruction": prompt.instruction} for prompt in prompts]
    present_lines = read_lines(out / "prompts.jsonl")
    if present_lines and present_lines != lines:
        raise PastaError(
            f"the prompts are not those that {out} was begun with",
            hint="Choose another --out, or restore the files of --prompts.",
        )
    write_lines(out / "prompts.jsonl", lines)


def share_samples(source: Path, out: Path, config: PreferenceConfig) -> None:
    """Copy samples and verdicts of another run with the same policy, before a run begins.

    Raises PastaError if the samples in `source` were made with other settings, if `out` holds
    another run, or if the adapters do not fit.
    """
    config = with_precision(config, out, config.device or default_device())
    refuse_other_run(out, config)
    refuse_misfits(config)
    hint = "Repeat these settings of its config.json, or leave --samples-from out."
    sampling = {name: getattr(config, name) for name in SAMPLING}
    refuse_other_settings(source, read_json(source / "config.json", dict), sampling, hint=hint)
    for name in ("prompts", "baseline", "round-1/samples", "round-1/verdicts"):
        for file in source.glob(f"{name}*.jsonl"):
            target = out / file.relative_to(source)
            if not target.exists():
                write_lines(target, read_lines(file))  # without a line that a kill has torn
