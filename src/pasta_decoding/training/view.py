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
    return sum(len(layout.tokens) for layouts in packs for layout in layouts)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One pack, flattened in reading order, plus who may see whom.

    tokens_T:   int64, token ids.
    position_T: int64, the position ids that decoding uses; not monotone.
    document_T: int64, which answer of the pack; answers do not see each other.
    thread_T:   int64, 0 for the main thread, 1.. for chunks.
    visible_until_T:  int64, ordinal of the last main token that this one may see.
    visible_from_T:   int64, ordinal of the first main token that may see this one.
    source_L:   int64, index in T of the tokens from which something is predicted.
    label_L:    int64, the token id to predict there.
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
    def column(name: str) -> Tensor:
        return torch.tensor([value for layout in layouts for value in getattr(layout, name)])

    labels = [label for layout in layouts for label in layout.label]
    sources = [n for n, label in enumerate(labels) if label is not None]
    return PackedBatch(
        tokens_T=column("tokens"),
        position_T=column("position"),
        document_T=torch.tensor([n for n, layout in enumerate(layouts) for _ in layout.tokens]),
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
    with a window it sees only those of them at positions above its own - window.
    """
    index_T = torch.arange(len(batch.tokens_T), device=batch.tokens_T.device)
    query, key = index_T[:, None], index_T[None, :]
    seen = (query >= key) & (batch.document_T[query] == batch.document_T[key])
    same = batch.thread_T[query] == batch.thread_T[key]
    seen = seen & (same | (batch.visible_from_T[key] <= batch.visible_until_T[query]))
    if window is not None:
        seen = seen & (batch.position_T[query] - batch.position_T[key] < window)
    return seen


def attention_masks(
    batch: PackedBatch, windows: Mapping[str, int | None]
) -> Tensor | dict[str, Tensor]:
    """Return what a Hugging Face forward takes as `attention_mask`: bool [1, 1, Q, K].

    `windows` names the kinds of layers, as `attention_windows` has them; where there are several,
    each has a mask of its own.
    """
    masks = {kind: visibility(batch, window)[None, None] for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


@dataclass(frozen=True, slots=True)
class Example:
    """What one forward pass computes in training: answers that do not see each other.

    layouts:    a pack of stage 1; best and worst of a prompt in stage 2, or the best alone.
    best_rows:  stage 2: how many of them are the best answer's; the others are the worst's.
    scale:      of the loss. Stage 1 sums it up, so that the mean over the packs of a step is that
                over the labels of the step. 0: it only fills the last step up.
    candidates: stage 2: the N that best and worst were chosen from.
    reference:  stage 2: log-probabilities of both under the policy that sampled them, in nats.
    """

    layouts: Sequence[Layout]
    scale: float = 1.0
    best_rows: int = 1
    candidates: int = 0
    reference: tuple[float, ...] = ()

    @property
    def labels(self) -> list[int]:
        return [label for one in self.layouts for label in one.label if label is not None]


LossParts = dict[str, Tensor]
Loss = Callable[[Sequence[Tensor], Example], tuple[Tensor, LossParts]]
"""Takes the log-probabilities of each layout of an example; returns its loss, and figures.

What is minimised is the mean over the examples of a step. The metrics have the figures' means.
"""


def label_logprobs(model: Any, layouts: Sequence[Layout], call: Any = None) -> list[Tensor]:
    """Return, for each layout of one pack, the log-probability of every label (nats).

    Forced tokens have no label and so no entry. They are computed in float32 at least. Gradients
    flow where they are enabled.
    call: what computes the forward: `model`, or what accelerate wrapped it in.
    """
    # cuDNN's attention is torch's first choice on Hopper GPUs. With these masks a run of it came to
    # a loss of NaN, and two runs without it did not; why is not known.
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
    labels = [sum(label is not None for label in layout.label) for layout in layouts]
    return list(torch.split(logprobs_L, labels))


def score_layouts(model: Any, layouts: Sequence[Layout]) -> Iterator[Tensor]:
    """Yield `label_logprobs` of each layout in order, many in one forward pass, no gradients."""
    for together in pack(layouts, 1024 if model.device.type == "cpu" else 4096):
        with torch.inference_mode():
            scored = label_logprobs(model, together)
        yield from (logprobs_L.cpu() for logprobs_L in scored)
