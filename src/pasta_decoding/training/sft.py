"""Stage 1: supervised finetuning on annotated responses.

LoRA plus the control-token rows, or all weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pasta_decoding.data.rows import Row, digest
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.measures import geometric_mean, tokens_per_step
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import FILE_NAME, Checkpoint
from pasta_decoding.models.control_tokens import choose_tokens, grow_vocabulary
from pasta_decoding.models.load import Loaded, answer_end, eos_ids_of, load_base
from pasta_decoding.runtime.decoder import decoder_over
from pasta_decoding.runtime.request import Rules, SamplingParams
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.loop import RunTrainer, processes, training_arguments
from pasta_decoding.training.lora import (
    add_lora,
    in_4bit,
    recompute_activations,
    refuse_other_start,
    save,
    set_attention,
)
from pasta_decoding.training.loss import Example, LabelLoss
from pasta_decoding.training.packs import compile_rows, plan_packs, shared_out, tokens_of
from pasta_decoding.training.run import (
    begin_run,
    figures_of,
    owned,
    plot_losses,
    refuse_other_run,
)
from pasta_decoding.training.view import pack

log = logging.getLogger(__name__)


def train_sft(
    config: SftConfig, rows: Sequence[Row], *, base: Path, out: Path, held_out: Sequence[Row] = ()
) -> Path:
    """Train, resuming if `out` holds this run, and return the folder of the finished adapter.

    A run that is finished is left as it is, and its figures are said again.
    held_out: rows whose loss is measured on the way.

    Under `accelerate launch` every process calls this, and all must see `out`; the main one writes,
    and none returns before it has.
    """
    if not rows:
        raise PastaError("no row to train on: give --data")
    adapter = out / "adapter"
    inputs: dict[str, Any] = {"rows": digest(rows), "held_out": digest(held_out)}
    refuse_other_run(out, config, inputs)
    if (adapter / FILE_NAME).is_file():
        log.info("this run is finished: %s", figures_of(out))
        return adapter
    device = processes().device.type
    model, tokenizer, checkpoint = load_trainable(base, config, on_gpu=device == "cuda")
    inputs["base"] = asdict(checkpoint.base)
    refuse_other_run(out, config, inputs)
    examples, evaluated = plan(rows, held_out, model, tokenizer, checkpoint, config)
    arguments = training_arguments(
        out,
        config,
        len(examples),
        config.packs_per_step,
        device,
        logging_steps=5,
        eval_strategy="steps" if evaluated else "no",
        eval_steps=config.save_every_steps,
    )
    with owned(out):
        if arguments.should_save:
            begin_run(out, config, inputs)
        loss = LabelLoss(checkpoint.control.ids)
        trainer = RunTrainer(
            model, loss, examples, arguments, checkpoint=checkpoint, held_out=evaluated
        )
        weights = trainer.run()
        if arguments.should_save:
            save(model, tokenizer, checkpoint, adapter, weights=weights)
            plot_losses(out)
            log.info("finished: %s", figures_of(out))
            if config.try_prompts and weights is None and not config.plain:
                asked = (held_out or rows)[: config.try_prompts]
                log.info(tried(model, tokenizer, checkpoint, [row.instruction for row in asked]))
    # Where one process ends badly the launcher ends all: not while the main one writes.
    processes().wait_for_everyone()
    return adapter


def load_trainable(base: Path, config: SftConfig, *, on_gpu: bool) -> tuple[Any, Any, Checkpoint]:
    """Return the model to train, its tokenizer, and what the trained checkpoint will be."""
    frozen_in_bf16 = config.bf16 and config.lora_rank > 0
    dtype = "bfloat16" if frozen_in_bf16 else "float32"
    settings = {"quantization_config": in_4bit(dtype)} if config.load_in_4bit else {}
    model, tokenizer = load_base(base, dtype=dtype, **settings)
    control = choose_tokens(tokenizer)
    checkpoint = replace(
        checkpoints.describe(model, tokenizer, control, name=config.base_name),
        scheme=scheme_named(config.scheme).name,
        topic=config.topic,
        joins=tuple(join.value for join in config.joins),
    )
    if config.start is not None:
        refuse_other_start(Path(config.start), config.lora_rank, model, tokenizer, control)
    grow_vocabulary(model, control)
    log.info("attention: %s", set_attention(model, config.attention, on_gpu=on_gpu))
    if config.gradient_checkpointing:
        recompute_activations(model)
    if config.lora_rank:
        model = add_lora(
            model,
            control,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            seed=config.seed,
            start=config.start,
        )
    return model, tokenizer, checkpoint


def plan(
    rows: Sequence[Row],
    held_out: Sequence[Row],
    model: Any,
    tokenizer: Any,
    checkpoint: Checkpoint,
    config: SftConfig,
) -> tuple[list[Example], list[Example]]:
    """Return the packs of the run, and those that are held out, and say how much that is."""
    end = answer_end(tokenizer, eos_ids_of(model.generation_config, tokenizer))
    layouts, evaluated = (
        compile_rows(some, tokenizer, checkpoint.control, config, end=end) if some else []
        for some in (rows, held_out)
    )
    packs = plan_packs(layouts, config)
    what = "rows" if Joining.text in config.joins else "answers"
    log.info("%d %s, %d tokens in %d packs", len(layouts), what, tokens_of(packs), len(packs))
    if evaluated:
        tokens = tokens_of([evaluated])
        log.info("%d %s, %d tokens are held out", len(evaluated), what, tokens)
    some = packs, pack(evaluated, config.pack_tokens)
    shared = [shared_out(each, config.packs_per_step, processes().num_processes) for each in some]
    return shared[0], shared[1]


def tried(model: Any, tokenizer: Any, checkpoint: Checkpoint, prompts: Sequence[str]) -> str:
    """Answer the prompts greedily; return in a line how many have promises, and tokens a step."""
    model.eval()
    model.set_attn_implementation("sdpa")
    loaded = Loaded(model, tokenizer, checkpoint, eos_ids_of(model.generation_config, tokenizer))
    decoder = decoder_over(TorchEngine(model, cache_tokens=4096), loaded)
    rules, greedy = Rules(max_tokens=200), SamplingParams(temperature=0.0)
    answers = [decoder.answer(decoder.request(one, rules, greedy)) for one in prompts]
    promising = sum("<promise" in answer.annotated for answer in answers)
    if not promising:
        return "no promises yet: more steps or rows"
    speeds = [
        tokens_per_step(decoder.plain_tokens(answer.text), answer.critical_path)
        for answer in answers
    ]
    return f"promises in {promising} of {len(answers)}, {geometric_mean(speeds):.1f} tokens a step"
