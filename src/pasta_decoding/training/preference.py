"""Stage 2: preference training on sampled answers, in rounds of sample, score, pair and train.

The run folder keeps everything, and each stage resumes:

    config.json  prompts.jsonl    settings and prompts
    baseline.jsonl                the sequential baseline's answers
    round-N/samples.jsonl         answers with token ids and seeds, line by line
    round-N/parts.jsonl           what their scores are made of, prompt by prompt
    round-N/scores.jsonl          the score of each answer
    round-N/pairs.jsonl  round-N/summary.json
    round-N/train/  round-N/adapter/  checkpoints and metrics; the round's result
    adapter/                      the last round's result

Runs that differ in lambda can share samples and parts: `share_samples`.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from pasta_decoding.answer.request import Rules
from pasta_decoding.api.config import EngineConfig
from pasta_decoding.api.opening import ENGINES, choose_engine, find_files, open_local
from pasta_decoding.data.lines import read_json, read_lines, refuse_other_settings, write_lines
from pasta_decoding.data.rows import Question, Row, digest
from pasta_decoding.errors import PastaError, require
from pasta_decoding.files import copy_whole, sha256, write_json
from pasta_decoding.lang.layout import Joining
from pasta_decoding.models.catalog import adapter_on, holds_weights, model_beside
from pasta_decoding.models.checkpoint import read_checkpoint
from pasta_decoding.models.load import default_device, load_base, native_dtype
from pasta_decoding.scheduling.decoder import Decoder
from pasta_decoding.training import bonbon, loop, score
from pasta_decoding.training.bonbon import preference_loss, with_references
from pasta_decoding.training.config import SAMPLING, PreferenceConfig
from pasta_decoding.training.loop import RunTrainer, processes, training_arguments
from pasta_decoding.training.lora import save, take_up
from pasta_decoding.training.run import owned, refuse_other_run, tracked, write_settings
from pasta_decoding.training.sample import JsonLine, Sample, SampleKey, grown, sample_answers
from pasta_decoding.training.score import ScoreParts
from pasta_decoding.training.view import Example, tokens_of

log = logging.getLogger(__name__)


def engine_of(config: PreferenceConfig, base: Path, adapter: str) -> EngineConfig:
    names = ["engine", "dtype", "cache_tokens", "base_url"]
    if config.engine in ("auto", "torch"):  # the others decode on the CPU
        names.append("device")
    same = {name: getattr(config, name) for name in names}
    model = model_beside(adapter, base)
    return EngineConfig(adapter, model, join=Joining.kv, **same)


def settled(config: PreferenceConfig, base: Path, cache: Path) -> PreferenceConfig:
    """Return the settings with one engine and one number format, which are kept with the run."""
    files = find_files(engine_of(config, base, config.policy), cache)
    engine: Any = choose_engine(files)
    fixed = engine in ("fast", "torch")
    dtype: Any = ENGINES[engine].dtype(files) if fixed else config.dtype
    return replace(config, engine=engine, dtype=dtype)


@dataclass(frozen=True, slots=True)
class PreferenceRun:
    """The stages of a run over its folder. `cache` is for what the engine exports on the way."""

    config: PreferenceConfig
    base: Path
    out: Path
    cache: Path
    api_key: str | None = None

    def train(self, prompts: Sequence[Question], pairs: Sequence[tuple[Row, Row]] = ()) -> Path:
        """Run all rounds over prompts that differ, resuming them; return the adapter's folder.

        pairs: chosen and rejected answers that were written; if given, nothing is sampled.

        Raises PastaError for another run's folder, misfitting adapters, or nothing to learn from.
        """
        config, out, policy = self.config, self.out, Path(self.config.policy)
        inputs = {"pairs": digest(chain.from_iterable(pairs))}
        refuse_other_run(out, config, inputs)
        refuse_misfits(config)
        shared = processes(timeout=timedelta(days=7))  # one may sample much longer than another
        loop.examples_per_step(config)
        with owned(out):
            if shared.is_main_process:
                write_settings(out, config, inputs)
                if not config.pairs:
                    keep_prompts(out, prompts)
            for number in range(1, config.rounds + 1):
                folder = out / f"round-{number}"
                written = partial(bonbon.compile_pairs, pairs, config)
                compiled = written if config.pairs else self._choose(folder, policy, prompts)
                if not (folder / "adapter").exists():
                    self._train(folder, policy, compiled)
                policy = folder / "adapter"
            if shared.is_main_process:
                copy_whole(policy, out / "adapter")
        shared.wait_for_everyone()
        log.info("finished: %d rounds", config.rounds)
        return out / "adapter"

    def _choose(
        self, folder: Path, policy: Path, prompts: Sequence[Question]
    ) -> partial[list[Example]]:
        """Sample, score and pair; return what lays the pairs out."""
        config, plain = self.config, replace(self.config.rules, parallel=False)
        own = self._sample("baseline", config.baseline, prompts, config.baseline_samples, plain)
        samples = self._sample(folder.name, str(policy), prompts, config.samples, config.rules)
        parts = self._measure(folder / "parts.jsonl", prompts, samples)
        scores = score.score_parts(parts, score.baseline_tokens(own), config.lambda_)
        pairs = score.choose_pairs(samples, parts, scores)
        scored = zip(parts, scores, strict=True)
        lines = [{"prompt": p.prompt, "number": p.number, "score": one} for p, one in scored]
        if processes().is_main_process:
            write_lines(folder / "scores.jsonl", lines)
            write_lines(folder / "pairs.jsonl", map(asdict, pairs))
            write_json(folder / "summary.json", score.summarise(parts, pairs))
        if not pairs:
            raise PastaError(
                f"{folder.name.replace('-', ' ')} has no pair of a better and a worse answer",
                hint="Give more --prompts or --samples, or a larger --max-tokens.",
            )
        return partial(bonbon.lay_out_pairs, samples, pairs, config.joining)

    def _sample(
        self, name: str, adapter: str, prompts: Sequence[Question], count: int, rules: Rules
    ) -> list[Sample]:
        place = "baseline.jsonl" if name == "baseline" else f"{name}/samples.jsonl"
        settings: Any = {"name": name, "count": count, "rules": rules, "config": self.config}
        load = partial(self._decoding, name, Path(adapter))
        return sample_answers(load, prompts, self.out / place, **settings)

    @contextmanager
    def _decoding(self, name: str, adapter: Path) -> Iterator[Decoder]:
        """Open what decodes with an adapter; servers hold that until all processes are through."""
        config, shared = self.config, processes()
        if config.engine != "remote":
            yield open_local(engine_of(config, self.base, str(adapter)), self.cache)
            return
        require("httpx2", extra="remote", doing="the remote engine")
        from pasta_decoding.remote.adapters import served_adapter
        from pasta_decoding.remote.decoder import remote_decoder

        weights = sha256(adapter / "adapter_model.safetensors")[:8]
        folder = self.out / f"{self.out.resolve().name}-{name}-{weights}"
        where: Any = {"base_urls": config.base_url, "api_key": self.api_key}
        held = served_adapter(self.base, adapter, folder, **where)
        with held if shared.is_main_process else nullcontext():
            shared.wait_for_everyone()
            where |= {"names": [folder.name], "joining": config.joining}
            yield remote_decoder(adapter_on(self.base, adapter), **where)
            shared.wait_for_everyone()

    def _measure(
        self, path: Path, prompts: Sequence[Question], samples: Sequence[Sample]
    ) -> list[ScoreParts]:
        """Return the parts of all scores; those not yet in the file are measured."""
        known = {(one.prompt, one.number): one for one in samples}
        questions = {prompt.id: prompt for prompt in prompts}

        def measured(missing: Sequence[SampleKey]) -> Iterator[JsonLine]:
            free_memory()
            device = self.config.device or default_device()
            baseline, dtype = Path(self.config.baseline), native_dtype(device)
            source = adapter_on(self.base, baseline)
            rate = score.likelihood_rate(source, dtype=dtype, device=device)
            groups = {prompt: list(keys) for prompt, keys in groupby(missing, itemgetter(0))}
            for prompt, keys in tracked(groups.items(), "scoring", len(groups)):
                some = [known[key] for key in keys]
                yield from map(asdict, score.measure(questions[prompt], some, rate))

        return [ScoreParts(**line) for line in grown(path, list(known), measured)]

    def _train(self, folder: Path, policy: Path, compiled: partial[list[Example]]) -> None:
        """Train on pairs, going on from the policy's own weights, and save the adapter."""
        free_memory()
        config, whole = self.config, holds_weights(policy)
        dtype = "bfloat16" if config.bf16 and not whole else "float32"
        loaded = load_base(adapter_on(self.base, policy), dtype=dtype)
        model = loaded.model if whole else take_up(loaded.model, policy, seed=config.seed)
        loaded = replace(loaded, model=model.to(config.device or default_device()))
        examples = compiled(loaded)
        if config.objective == "rejection":
            examples = [replace(one, layouts=one.layouts[: one.best_rows]) for one in examples]
        else:
            examples = with_references(loaded.model, examples, bf16=config.bf16)
        tokens = tokens_of(example.layouts for example in examples)
        log.info("%s: %d pairs, %d tokens", folder.name, len(examples), tokens)
        # The order of all epochs is fixed in advance, so that a resumed run sees the same one.
        generator = torch.Generator().manual_seed(config.seed)
        orders = [torch.randperm(len(examples), generator=generator) for _ in range(config.epochs)]
        plan = [examples[int(place)] for order in orders for place in order]
        shared = processes()
        plan = loop.filled(plan, config.pairs_per_step, shared.num_processes)
        device, loss = loaded.model.device.type, partial(preference_loss, alpha=config.alpha)
        arguments = training_arguments(folder / "train", config, len(plan), device)
        weights = RunTrainer(loaded.model, loss, plan, arguments).run()
        # What a policy knew of other joins, this round has not kept up.
        checkpoint = replace(loaded.checkpoint, joins=(config.joining.value,))
        if shared.is_main_process:
            save(replace(loaded, checkpoint=checkpoint), folder / "adapter", weights=weights)
        shared.wait_for_everyone()


def free_memory() -> None:
    """Give back what models that are no longer used hold, cycles and a GPU's cache included."""
    gc.collect()
    torch.cuda.empty_cache()


def refuse_misfits(config: PreferenceConfig) -> None:
    """Refuse adapters that do not go together, before hours are spent."""
    policy, baseline = Path(config.policy), Path(config.baseline)
    if config.joining not in read_checkpoint(policy).joins:
        raise PastaError(
            f"{policy} was not trained for the join {config.joining}, under which stage 2 samples "
            "and trains",
            hint="pasta train sft --join kv --join text",
        )
    adapters = [one for one in (policy, baseline) if one.name and not holds_weights(one)]
    if len({replace(read_checkpoint(adapter).base, name="") for adapter in adapters}) > 1:
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
        for file in source.glob(f"{name}*.jsonl"):
            if not (ours := out / file.relative_to(source)).exists():
                write_lines(ours, read_lines(file))  # a kill may have left a torn one
