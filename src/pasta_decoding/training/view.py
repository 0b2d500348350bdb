"""From layouts to the tensors of a training forward, and to the log-probabilities of their labels.

Shapes: T tokens of one pack (several answers in a row), L labelled tokens, Q queries, K keys,
V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pasta_decoding.engines.support import attention_windows
from pasta_decoding.lang.layout import Layout


def pack(layouts: Iterable[Layout], max_tokens: int) -> list[list[Layout]]:
    """Fill packs of at most `max_tokens` in the order given; an answer is never cut."""
    packs: list[list[Layout]] = []
    room = 0
    for layout in layouts:
        size = len(layout.tokens)
        if not packs or size > room:
            packs.append([])
            room = max_tokens
        packs[-1].append(layout)
        room -= size
    return packs


def tokens_of(packs: Iterable[Sequence[Layout]]) -> int:
    """Count the tokens of all packs together."""
    return sum(len(layout.tokens) for layouts in packs for layout in layouts)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One pack, flattened in reading order, plus who may see whom.

    tokens_T:   int64, token ids.
    position_T: int64, the position ids that decoding uses; not monotone.
    document_T: int64, index of the answer in the pack; answers do not see each other.
    thread_T:   int64, 0 for the main thread, 1.. for chunks.
    visible_until_T:  int64, ordinal of the last main token that this one may see.
    visible_from_T:   int64, ordinal of the first main token that may see this one.
    source_L:   int64, indices in T of the tokens that have a label.
    label_L:    int64, the token id to predict from each of them.
    """

    tokens_T: Tensor
    position_T: Tensor
    document_T: Tensor
    thread_T: Tensor
    visible_until_T: Tensor
    visible_from_T: Tensor
    source_L: Tensor
    label_L: Tensor


def packed_batch(layouts: Sequence[Layout]) -> PackedBatch:
    """Flatten a pack. The tensors are made on torch's default device."""

    def column(name: str) -> Tensor:
        return torch.tensor([value for layout in layouts for value in getattr(layout, name)])

    labels = [label for layout in layouts for label in layout.label]
    sources = [index for index, label in enumerate(labels) if label is not None]
    documents = [index for index, layout in enumerate(layouts) for _ in layout.tokens]
    return PackedBatch(
        tokens_T=column("tokens"),
        position_T=column("position"),
        document_T=torch.tensor(documents),
        thread_T=column("thread"),
        visible_until_T=column("visible_until"),
        visible_from_T=column("visible_from"),
        source_L=torch.tensor(sources, dtype=torch.long),
        label_L=torch.tensor([labels[source] for source in sources], dtype=torch.long),
    )


def visibility(batch: PackedBatch, window: int | None = None) -> Tensor:
    """Return mask_QK (bool): may query token q attend to key token k?

    A token sees the earlier tokens of its own thread, and of the other threads those with
    `visible_from` <= its `visible_until`. That one rule covers fork, join and siblings. In a layer
    with a window it sees only the tokens of these whose position is above its own minus `window`.
    """
    index_T = torch.arange(len(batch.tokens_T), device=batch.tokens_T.device)
    query = index_T[:, None]
    key = index_T[None, :]
    same_document_QK = batch.document_T[query] == batch.document_T[key]
    same_thread_QK = batch.thread_T[query] == batch.thread_T[key]
    revealed_QK = batch.visible_from_T[key] <= batch.visible_until_T[query]
    mask_QK = (query >= key) & same_document_QK & (same_thread_QK | revealed_QK)
    if window is not None:
        mask_QK = mask_QK & (batch.position_T[query] - batch.position_T[key] < window)
    return mask_QK


def attention_masks(
    batch: PackedBatch, windows: Mapping[str, int | None]
) -> Tensor | dict[str, Tensor]:
    """Return the `attention_mask` of a Hugging Face forward: bool [1, 1, Q, K].

    windows: the window of each kind of layer, from `attention_windows`. If there are several kinds,
             the result has a mask for each.
    """
    masks = {kind: visibility(batch, window)[None, None] for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


@dataclass(frozen=True, slots=True)
class Example:
    """The answers of one training forward pass. They do not see each other.

    layouts:    stage 1: a pack. Stage 2: the best answer to a prompt, then the worst, if there is
                one, then a replayed row of stage 1, if there is one.
    scale:      factor of the loss. Stage 1 sums the loss of a pack up; the scale makes the mean
                over the packs of a step a mean over its labels. An example of scale 0 teaches
                nothing: it fills up the last step.
    best_rows:  stage 2: number of layouts of the best answer, which come first.
    replay_rows: stage 2: number of layouts of the replayed row, which come last.
    worst_counts: stage 2: for each layout of the worst answer, which of its labels count.
    best_of, worst_of: stage 2: numbers of answers that best and worst were chosen from.
    reference:  stage 2: log-probabilities of best and worst under the policy that sampled them,
                in nats.
    """

    layouts: Sequence[Layout]
    scale: float = 1.0
    best_rows: int = 1
    replay_rows: int = 0
    worst_counts: tuple[tuple[bool, ...], ...] = ()
    best_of: int = 0
    worst_of: int = 0
    reference: tuple[float, ...] = ()

    @property
    def labels(self) -> list[int]:
        """All labels in order; their log-probabilities come in the same order."""
        return [label for layout in self.layouts for label in layout.label if label is not None]


LossParts = dict[str, Tensor]
Loss = Callable[[Sequence[Tensor], Example], tuple[Tensor, LossParts]]
"""(log-probabilities of each layout, example) -> (loss, parts of the loss by name).

The optimiser minimises the mean loss over the examples of a step. The metrics hold the means of
the parts.
"""


def label_logprobs(model: Any, layouts: Sequence[Layout], call: Any = None) -> list[Tensor]:
    """Return, for each layout of one pack, the log-probability of every label (nats).

    Forced tokens have no label and so no entry. The log-probabilities are computed in float32 or
    better. Gradients flow if they are enabled.
    call: `model` as accelerate wrapped it, to compute the forward; None calls `model` itself.
    """
    # cuDNN's attention is torch's first choice on Hopper GPUs. With these masks, the loss of a run
    # became NaN; two runs without cuDNN had no NaN. The cause is not known.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with model.device:
        batch = packed_batch(layouts)
    outputs = (call or model)(
        input_ids=batch.tokens_T[None],
        position_ids=batch.position_T[None],
        attention_mask=attention_masks(batch, attention_windows(model.config.get_text_config())),
        logits_to_keep=batch.source_L,
        use_cache=False,
    )
    logits_LV = outputs.logits[0]
    logits_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32))
    logprobs_L = -cross_entropy(logits_LV, batch.label_L, reduction="none")
    label_counts = [sum(label is not None for label in layout.label) for layout in layouts]
    return list(torch.split(logprobs_L, label_counts))


def score_layouts(model: Any, layouts: Sequence[Layout]) -> Iterator[Tensor]:
    """Yield `label_logprobs` of each layout in order, on the CPU and without gradients."""
    pack_tokens = 1024 if model.device.type == "cpu" else 4096
    for layouts_of_pack in pack(layouts, pack_tokens):
        with torch.inference_mode():
            logprobs_by_layout = label_logprobs(model, layouts_of_pack)
        for logprobs_L in logprobs_by_layout:
            yield logprobs_L.cpu()
