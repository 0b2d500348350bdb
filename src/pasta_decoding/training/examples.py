"""From annotated rows to the examples of stage 1: encode, lay out, pack, share out.

Stage 2 encodes and lays out its answers with the same functions.
"""

import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from pasta_decoding.answer.text import fed_count
from pasta_decoding.data.rows import Row
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
from pasta_decoding.lang.positions import scheme_named
from pasta_decoding.lang.tree import Chunk, Span, Sync, Tree, has_chunk, read, strip, without_topics
from pasta_decoding.models.load import LoadedModel
from pasta_decoding.models.prompt import PromptEncoder
from pasta_decoding.training.config import SftConfig
from pasta_decoding.training.view import Example, pack

log = logging.getLogger(__name__)


def compile_rows(rows: Sequence[Row], loaded: LoadedModel, config: SftConfig) -> list[Layout]:
    """Lay out all rows that can be used, and log why others cannot.

    Raises PastaError if no row is left.
    """
    groups = compile_groups([[row] for row in rows], loaded, config)
    return list(chain.from_iterable(groups))


def compile_groups(
    groups: Iterable[Sequence[Row]], loaded: LoadedModel, config: SftConfig
) -> list[list[Layout]]:
    """Lay out groups of rows; leave a group out, and log why, if one of its rows cannot be used.

    Raises PastaError if no group is left.
    """
    control = loaded.checkpoint.control
    encoder = PromptEncoder(loaded.tokenizer, forbidden_ids=control.ids)
    added_tokens = loaded.tokenizer.added_tokens_decoder.values()
    special_texts = tuple(token.content for token in added_tokens if token.special)
    end = loaded.end
    compiled: list[list[Layout]] = []
    ids_by_reason: dict[str, list[str]] = {}
    for rows in groups:
        layouts: list[Layout] = []
        try:
            for row in rows:
                _refuse_rendered(row, special_texts)
                segments = segments_of(_tree_to_teach(row.response, config), control, encoder)
                prompt = encoder.encode(row.conversation)
                layouts += compile_answer(prompt, segments, control.async_close, end, config)
            if len(rows) > 1 and layouts[0] == layouts[1]:
                raise PastaError("both answers are the same")
            compiled.append(layouts)
        except PastaError as error:
            ids_by_reason.setdefault(str(error), []).append(rows[0].id)
    for reason, ids in ids_by_reason.items():
        log.info("%d rows left out, the first is %s: %s", len(ids), ids[0], reason)
    if not compiled:
        raise PastaError("no row to train on", hint="Give other rows, or a larger limit of tokens.")
    return compiled


def _refuse_rendered(row: Row, special_texts: tuple[str, ...]) -> None:
    """Raise PastaError if another program has already put the row into its chat template.

    Here the template's tokens would be ordinary characters, and the model would learn to write
    them.
    """
    instruction = row.instruction.lstrip()
    response = row.response.rstrip()
    for text in special_texts:
        if instruction.startswith(text) or response.endswith(text):
            raise PastaError(f"its text has the chat template's {text!r} in it")


def _tree_to_teach(response: str, config: SftConfig) -> Tree:
    """Return the response as a tree, for a `plain` run without its tags.

    Raises PastaError if the response is empty or its annotation is wrong.
    """
    has_topics = config.topic == "required"
    tree = read(response) if has_topics else without_topics(read(response))
    text = strip(tree)
    problems = check(response, topic_required=has_topics)
    if problems:
        raise PastaError(f"broken tags ({problems[0].rule})")
    if has_chunk(read(text)):
        raise PastaError("annotated twice: its tags are text")
    if not text.strip():
        raise PastaError("empty response")
    return (Span(text),) if config.plain else tree


def segments_of(tree: Tree, control: ControlTokens, encoder: PromptEncoder) -> list[Segment]:
    """Encode an annotated response piece by piece, so that no token spans a tag.

    A promise gets the length of its chunk in these tokens, not the length in the annotation.
    """
    segments: list[Segment] = []
    encode = partial(encoder.encode_text, continues=True)
    for node in tree:
        match node:
            case Span(text):
                ids = encoder.encode_text(text, continues=bool(segments))
                segments.append(MainRun(tuple(ids)))
            case Chunk(topic, _, text):
                body_ids = encode(text)
                topic_ids = encode(topic) if topic else []
                bucket = control.bucket(len(body_ids))
                promise_ids = (control.promise_open, *topic_ids, control.promise_close[bucket])
                segments.append(PromiseRun(promise_ids, bucket))
                segments.append(ChunkRun((control.async_open, *body_ids)))
            case Sync():
                segments.append(SyncRun(control.sync))
    return segments


def compile_answer(
    prompt: Sequence[int],
    segments: Sequence[Segment],
    async_close: int,
    end: int | None,
    config: SftConfig,
) -> list[Layout]:
    """Lay an annotated answer out for each join. Raises PastaError if it is too long.

    `kv` has one layout; `text` has one row for each stretch between syncs. With both joins, the
    first row is left out if the `kv` layout begins with the same positions.
    """
    if len(prompt) + fed_count(segments) > config.max_tokens:
        raise PastaError(f"longer than {config.max_tokens} tokens")
    layouts: list[Layout] = []
    if Joining.kv in config.joins:
        scheme = scheme_named(config.scheme)
        layouts.append(lay_out(prompt, segments, scheme, async_close=async_close, end=end))
    if Joining.text in config.joins:
        rows = lay_out_rows(prompt, segments, async_close=async_close, end=end)
        first_positions = rows[0].position
        if layouts and layouts[0].position[: len(first_positions)] == first_positions:
            rows = rows[1:]
        layouts += rows
    return layouts


def plan_packs(layouts: Sequence[Layout], config: SftConfig) -> list[list[Layout]]:
    """Fix the packs of the whole run in advance, so that a resumed run sees the same ones."""
    packs: list[list[Layout]] = []
    shuffle = random.Random(config.seed).shuffle
    for _ in range(config.epochs):
        order = list(layouts)
        shuffle(order)
        packs += pack(order, config.pack_tokens)
    max_packs = None if config.max_steps is None else config.max_steps * config.packs_per_step
    return packs[:max_packs]


def shared_out(packs: Sequence[Sequence[Layout]], per_step: int, processes: int) -> list[Example]:
    """Make an example of each pack, and fill up the last step for all processes.

    The scales are such that the mean loss over the packs of a step is the mean over its labels.
    """
    examples: list[Example] = []
    for first in range(0, len(packs), per_step):
        step = packs[first : first + per_step]
        labels = sum(len(Example(layouts).labels) for layouts in step)
        examples += [Example(layouts, scale=len(step) / labels) for layouts in step]
    return fill_last_step(examples, per_step, processes)


def fill_last_step(examples: list[Example], per_step: int, processes: int) -> list[Example]:
    """Add examples of scale 0 until the processes, which take turns, all have the same number.

    Otherwise the Trainer would fill the last turn with the first examples again. The real examples
    of the last step are scaled up, so that its mean does not depend on the number of processes.
    """
    last_step_examples = len(examples) % per_step
    fillers = -last_step_examples % processes
    if fillers == 0:
        return examples
    factor = 1 + fillers / last_step_examples
    last_step = [
        replace(example, scale=example.scale * factor) for example in examples[-last_step_examples:]
    ]
    filler = replace(last_step[-1], scale=0.0)
    return examples[:-last_step_examples] + last_step + [filler] * fillers
