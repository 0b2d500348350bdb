"""Stage 1: supervised finetuning on annotated responses.

LoRA plus the control-token rows, or all weights.
"""

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pasta_decoding.answer.request import Rules, SamplingParams
from pasta_decoding.answer.text import fed_count
from pasta_decoding.data.rows import Row, digest
from pasta_decoding.engines.support import refuse_unsupported
from pasta_decoding.engines.torch import TorchEngine
from pasta_decoding.errors import PastaError
from pasta_decoding.lang.check import check
from pasta_decoding.lang.control import ControlTokens
from pasta_decoding.lang.layout import (
    ChunkRun,
    Joining,
    Layout,
    MainRun,
    PromiseRun,
    Segment,
    SyncRun,
    lay_out,
    lay_out_rows,
)
from pasta_decoding.lang.measures import geometric_mean, tokens_per_step
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, has_chunk, read, strip, without_topics
from pasta_decoding.models.catalog import BaseAlone, BaseWithAdapter, holds_weights
from pasta_decoding.models.checkpoint import FILE_NAME
from pasta_decoding.models.load import LoadedModel, load_base
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.models.template import Message
from pasta_decoding.scheduling.asking import FAILURES
from pasta_decoding.scheduling.decoder import decoder_over
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.loop import RunTrainer, filled, processes, training_arguments
from pasta_decoding.training.lora import add_lora, in_4bit, recompute_activations, save, take_up
from pasta_decoding.training.run import figures_of, owned, refuse_other_run, write_settings
from pasta_decoding.training.view import Example, LossParts, pack, tokens_of

log = logging.getLogger(__name__)


def train_sft(
    config: SftConfig, rows: Sequence[Row], *, base: Path, out: Path, held_out: Sequence[Row] = ()
) -> Path:
    """Train, or resume the run in `out`; return the folder of the finished adapter.

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
    shared = processes()
    loaded = load_trainable(base, config)
    inputs["base"] = asdict(loaded.checkpoint.base)
    refuse_other_run(out, config, inputs)
    packs = plan_packs(compile_rows(rows, loaded, config), config)
    apart = compile_rows(held_out, loaded, config) if held_out else []
    examples, evaluated = (
        shared_out(some, config.packs_per_step, shared.num_processes)
        for some in (packs, pack(apart, config.pack_tokens))
    )
    log.info("%d tokens in %d packs, %d held out", tokens_of(packs), len(packs), tokens_of([apart]))
    arguments = training_arguments(
        out, config, len(examples), shared.device.type, evaluates=bool(evaluated)
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
            held_out=evaluated,
        )
        weights = trainer.run()
        if arguments.should_save:
            save(loaded, adapter, weights=weights)
            log.info("finished: %s", figures_of(out))
            if config.try_prompts and weights is None and not config.plain:
                asked = (held_out or rows)[: config.try_prompts]
                log.info(trial_line(loaded, [row.conversation for row in asked]))
    # Where one process ends badly the launcher ends all: not while the main one writes.
    shared.wait_for_everyone()
    return adapter


def load_trainable(base: Path, config: SftConfig) -> LoadedModel:
    start = None if config.start is None else Path(config.start)
    if start is not None and holds_weights(start):
        raise PastaError(f"{start} holds a whole model, not an adapter: give it as --model")
    dtype = "bfloat16" if config.bf16 and config.lora_rank else "float32"
    settings = {"quantization_config": in_4bit(dtype)} if config.load_in_4bit else {}
    source = BaseAlone(base) if start is None else BaseWithAdapter(base, start)
    loaded = load_base(source, dtype=dtype, **settings)
    if loaded.warning is not None:
        log.warning(loaded.warning)
    model, record = loaded.model, loaded.checkpoint
    checkpoint = replace(
        record,
        base=replace(record.base, name=config.base_name),
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
        model = add_lora(model, record.control, config)
    return replace(loaded, model=model, checkpoint=checkpoint)


def compile_rows(rows: Sequence[Row], loaded: LoadedModel, config: SftConfig) -> list[Layout]:
    """Lay out the rows that teach something. Raises PastaError if none is left."""
    return list(chain.from_iterable(compile_groups(((row,) for row in rows), loaded, config)))


def compile_groups(
    groups: Iterable[Sequence[Row]], loaded: LoadedModel, config: SftConfig
) -> list[list[Layout]]:
    """Lay out rows that belong together, all or none. Raises PastaError if no group is left."""
    control = loaded.checkpoint.control
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=control.ids)
    added = loaded.tokenizer.added_tokens_decoder.values()
    special = tuple(one.content for one in added if one.special)
    found: list[list[Layout]] = []
    end = loaded.end
    left_out: dict[str, list[str]] = {}
    for rows in groups:
        laid: list[Layout] = []
        try:
            for row in rows:
                _refuse_rendered(row, special)
                segments = segments_of(_taught(row.response, config), control, encoder)
                prompt = encoder.encode(row.conversation)
                laid += compile_answer(prompt, segments, control.async_close, end, config)
            if len(rows) > 1 and laid[0] == laid[1]:
                raise PastaError("both answers are the same")
            found.append(laid)
        except PastaError as reason:
            left_out.setdefault(str(reason), []).append(rows[0].id)
    for why, ids in left_out.items():
        log.info("%d rows left out, the first is %s: %s", len(ids), ids[0], why)
    if not found:
        raise PastaError("no row to train on", hint="Give other rows, or a larger limit of tokens.")
    return found


def _refuse_rendered(row: Row, special: tuple[str, ...]) -> None:
    """Raise PastaError for what another program has put into its chat template already.

    Here that would be ordinary characters, and the model would learn to write them.
    """
    begins, ends = row.instruction.lstrip(), row.response.rstrip()
    for token in special:
        if begins.startswith(token) or ends.endswith(token):
            raise PastaError(f"its text has the chat template's {token!r} in it")


def _taught(response: str, config: SftConfig) -> Tree:
    """Return what a response teaches. Raises PastaError if that is nothing, or wrong."""
    has_topics = config.topic == "required"
    tree = read(response) if has_topics else without_topics(read(response))
    text = strip(tree)
    if problems := check(response, topic_required=has_topics):
        raise PastaError(f"broken tags ({problems[0].rule})")
    if has_chunk(read(text)):
        raise PastaError("annotated twice: its tags are text")
    if not text.strip():
        raise PastaError("empty response")
    return (Span(text),) if config.plain else tree


def compile_answer(
    prompt: Sequence[int],
    segments: Sequence[Segment],
    close: int,
    end: int | None,
    config: SftConfig,
) -> list[Layout]:
    """Lay an annotated answer out. Raises PastaError if it is too long.

    For each join: one layout for `kv`, a row for each stretch between syncs for `text`. The first
    of these rows is left out where it is how the `kv` layout begins.
    """
    if len(prompt) + fed_count(segments) > config.max_tokens:
        raise PastaError(f"longer than {config.max_tokens} tokens")
    laid: list[Layout] = []
    if Joining.kv in config.joins:
        scheme = scheme_named(config.scheme)
        laid.append(lay_out(prompt, segments, scheme, async_close=close, end=end))
    if Joining.text in config.joins:
        rows = lay_out_rows(prompt, segments, async_close=close, end=end)
        known = laid and laid[0].position[: len(rows[0].position)] == rows[0].position
        laid += rows[1:] if known else rows
    return laid


def segments_of(tree: Tree, control: ControlTokens, encoder: PromptEncoder) -> list[Segment]:
    """Encode an annotated response piece by piece; no token ever spans a tag.

    Promises say the chunks' lengths in these tokens, whatever lengths the annotation names.
    """
    segments: list[Segment] = []
    encode = partial(encoder.encode_text, behind=True)
    for node in tree:
        match node:
            case Span(text):
                segments.append(MainRun(tuple(encoder.encode_text(text, behind=bool(segments)))))
            case Chunk(topic, _, text):
                body = tuple(encode(text))
                bucket = control.bucket(len(body))
                words = tuple(encode(topic)) if topic else ()
                promise = (control.promise_open, *words, control.promise_close[bucket])
                segments.append(PromiseRun(promise, bucket))
                segments.append(ChunkRun((control.async_open, *body)))
            case Sync():
                segments.append(SyncRun(control.sync))
    return segments


def label_loss(
    logprobs: Sequence[Tensor], example: Example, *, control_ids: Sequence[int]
) -> tuple[Tensor, LossParts]:
    """Return the cross entropy of a pack, in sum; nats of text and control tokens apart."""
    nats_L = -torch.cat(list(logprobs))
    label_L = torch.tensor(example.labels, device=nats_L.device)
    control_L = torch.isin(label_L, torch.tensor(control_ids, device=nats_L.device))
    figures = {"text_loss": nats_L[~control_L], "control_loss": nats_L[control_L], "loss": nats_L}
    return nats_L.sum(), figures


def plan_packs(layouts: Sequence[Layout], config: SftConfig) -> list[list[Layout]]:
    """Fix the packs of the whole run in advance, so that a resumed run sees the same ones."""
    packs = []
    shuffle = random.Random(config.seed)
    for _ in range(config.epochs):
        order = list(layouts)
        shuffle.shuffle(order)
        packs += pack(order, config.pack_tokens)
    limit = None if config.max_steps is None else config.max_steps * config.packs_per_step
    return packs[:limit]


def shared_out(packs: Sequence[Sequence[Layout]], per_step: int, processes: int) -> list[Example]:
    """Return the packs `filled`; the mean over those of a step is that over the step's labels."""
    found = []
    for first in range(0, len(packs), per_step):
        step = packs[first : first + per_step]
        labels = sum(len(Example(layouts).labels) for layouts in step)
        found += [Example(layouts, len(step) / labels) for layouts in step]
    return filled(found, per_step, processes)


def trial_line(loaded: LoadedModel, conversations: Sequence[Sequence[Message]]) -> str:
    """Answer greedily; return in a line how many have promises, and tokens a step, or why not."""
    loaded.model.eval()
    rules, greedy = Rules(max_tokens=200), SamplingParams(temperature=0.0)
    try:
        decoder = decoder_over(TorchEngine(loaded.model, cache_tokens=4096), loaded)
        prompts = [decoder.prompt_ids(one, rules.max_tokens) for one in conversations]
        answers = [decoder.answer(decoder.request(one, rules, greedy)) for one in prompts]
    except FAILURES as error:
        return f"the adapter was not tried: {error}"
    promising = sum("<promise" in answer.annotated for answer in answers)
    said = [(decoder.plain_tokens(answer.text), answer.critical_path) for answer in answers]
    speeds = [tokens_per_step(*tokens_and_steps) for tokens_and_steps in said]
    return f"promises in {promising} of {len(answers)}, {geometric_mean(speeds):.1f} tokens a step"
