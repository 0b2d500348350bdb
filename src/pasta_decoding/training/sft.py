"""Stage 1: supervised finetuning on annotated responses.

It trains LoRA and the control-token rows, or all weights.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pasta_decoding.answer.settings import Rules, SamplingParams
from pasta_decoding.data.rows import Row, digest
from pasta_decoding.engines.support import refuse_unsupported
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.layout import Joining
from pasta_decoding.lang.measures import geometric_mean, tokens_per_step
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.models.catalog import BaseAlone, BaseWithAdapter, holds_weights
from pasta_decoding.models.checkpoint import FILE_NAME
from pasta_decoding.models.load import LoadedModel, load_base
from pasta_decoding.models.template import Message
from pasta_decoding.scheduling.asking import FAILURES
from pasta_decoding.scheduling.decoder import decoder_over
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.examples import compile_rows, plan_packs, shared_out
from pasta_decoding.training.loop import RunTrainer, processes, training_arguments
from pasta_decoding.training.lora import add_lora, in_4bit, recompute_activations, save, take_up
from pasta_decoding.training.run import (
    figures_of,
    owned,
    refuse_other_run,
    tracked,
    with_precision,
    write_settings,
)
from pasta_decoding.training.view import Example, LossParts, pack, tokens_of

log = logging.getLogger(__name__)
SHIPPED_STEPS = 240
"""Steps of stage 1 for the adapter `qwen2.5-coder-1.5b`, on 2,148 rows."""


def train_sft(
    config: SftConfig, rows: Sequence[Row], *, base: Path, out: Path, held_out: Sequence[Row] = ()
) -> Path:
    """Train, or resume the run in `out`; return the folder of the finished adapter.

    held_out: rows whose loss is measured on the way.

    Under `accelerate launch` every process calls this, and all must see `out`. The main process
    writes, and no process returns before it has written.
    """
    if not rows:
        raise PastaError("no row to train on: give --data")
    distributed_state = processes()
    config = with_precision(config, out, distributed_state.device.type)
    adapter = out / "adapter"
    inputs: dict[str, Any] = {"rows": digest(rows), "held_out": digest(held_out)}
    refuse_other_run(out, config, inputs)
    if (adapter / FILE_NAME).is_file():
        log.info("this run is finished: %s", figures_of(out))
        return adapter
    loaded = load_trainable(base, config)
    inputs["base"] = asdict(loaded.checkpoint.base)
    refuse_other_run(out, config, inputs)
    packs = plan_packs(compile_rows(rows, loaded, config), config)
    examples = shared_out(packs, config.packs_per_step, distributed_state.num_processes)
    held_out_packs = pack(
        compile_rows(held_out, loaded, config) if held_out else [], config.pack_tokens
    )
    log.info(
        "%d tokens in %d packs, %d held out",
        tokens_of(packs),
        len(packs),
        tokens_of(held_out_packs),
    )
    arguments = training_arguments(
        out, config, len(examples), distributed_state.device.type, evaluates=bool(held_out_packs)
    )
    with owned(out):
        if arguments.should_save:
            write_settings(out, config, inputs)
        trainer = RunTrainer(
            loaded.model,
            partial(label_loss, control_ids=sorted(loaded.checkpoint.control.ids)),
            examples,
            arguments,
            checkpoint=loaded.checkpoint,
            held_out=shared_out(
                held_out_packs, config.packs_per_step, distributed_state.num_processes
            ),
        )
        weights = trainer.run()
        if arguments.should_save:
            save(loaded, adapter, weights=weights)
            log.info("finished: %s", figures_of(out))
            if config.try_prompts and weights is None and not config.plain:
                conversations = [row.conversation for row in held_out or rows]
                log.info(trial_line(loaded, conversations[: config.try_prompts]))
    # When one process fails, the launcher ends all of them. None may end while the main one writes.
    distributed_state.wait_for_everyone()
    return adapter


def load_trainable(base: Path, config: SftConfig) -> LoadedModel:
    """Load the base model with what is trained: LoRA, new or from `config.start`, or all weights.

    The checkpoint describes the adapter that this run will make.
    """
    start = None if config.start is None else Path(config.start)
    if start is not None and holds_weights(start):
        raise PastaError(f"{start} holds a whole model, not an adapter: give it as --model")
    dtype = "bfloat16" if config.bf16 and config.lora_rank else "float32"
    settings = {"quantization_config": in_4bit(dtype)} if config.load_in_4bit else {}
    source = BaseAlone(base) if start is None else BaseWithAdapter(base, start)
    loaded = load_base(source, dtype=dtype, **settings)
    if loaded.warning is not None:
        log.warning(loaded.warning)
    model = loaded.model
    checkpoint = replace(
        loaded.checkpoint,
        base=replace(loaded.checkpoint.base, name=config.base_name),
        scheme=scheme_named(config.scheme).name,
        topic=config.topic,
        joins=tuple(join.value for join in config.joins),
        eagerness=0.0,
    )
    if Joining.kv in config.joins:
        refuse_unsupported(model)
    if config.gradient_checkpointing:
        recompute_activations(model)
    if start is not None:
        model = take_up(model, start, seed=config.seed, rank=config.lora_rank)
    elif config.lora_rank:
        model = add_lora(model, checkpoint.control, config)
    return replace(loaded, model=model, checkpoint=checkpoint)


def label_loss(
    logprobs: Sequence[Tensor], example: Example, *, control_ids: Sequence[int]
) -> tuple[Tensor, LossParts]:
    """Return the summed cross entropy of a pack in nats, and its parts label by label.

    The parts are the losses of text labels, of control-token labels, and of all labels.
    """
    nats_L = -torch.cat(list(logprobs))
    label_L = torch.tensor(example.labels, device=nats_L.device)
    is_control_L = torch.isin(label_L, torch.tensor(control_ids, device=nats_L.device))
    parts = {
        "text_loss": nats_L[~is_control_L],
        "control_loss": nats_L[is_control_L],
        "loss": nats_L,
    }
    return nats_L.sum(), parts


def trial_line(loaded: LoadedModel, conversations: Sequence[Sequence[Message]]) -> str:
    """Answer greedily; return a line with the share of answers with promises, and tokens per step.

    If decoding fails, the line says why.
    """
    loaded.model.eval()
    rules = Rules(max_tokens=200)
    greedy = SamplingParams(temperature=0.0)
    answers = []
    try:
        decoder = decoder_over(TorchEngine(loaded.model, cache_tokens=4096), loaded)
        for conversation in tracked(conversations, "trying the adapter", len(conversations)):
            prompt_ids = decoder.prompt_ids(conversation, rules.max_tokens)
            answers.append(decoder.answer(decoder.request(prompt_ids, rules, greedy)))
    except FAILURES as error:
        return f"the adapter was not tried: {error}"
    promising = sum("<promise" in answer.annotated for answer in answers)
    speeds = [
        tokens_per_step(decoder.plain_tokens(answer.text), answer.critical_path)
        for answer in answers
    ]
    line = f"promises in {promising} of {len(answers)}"
    line += f", {geometric_mean(speeds):.1f} tokens per step"
    if not promising:
        line += f": it has not learnt the tags; the shipped 1.5B adapter took {SHIPPED_STEPS} steps"
    return line
