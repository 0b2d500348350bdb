"""Train a reading head (data/annotate/head.py), and the weights of a candidate's facts.

Both are convex: a softmax regression on hidden states that were computed once, and a semi-Markov
chain over a response's units (data/annotate/lattice.py). The second is fitted on what the first
says of responses that it was not fitted on (folds), since that is how it will be used.

Shapes: U units, F inputs of the head, C candidates, N facts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import compress, islice

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pasta_decoding.data.annotate.candidates import Candidate, find_candidates
from pasta_decoding.data.annotate.draft import Draft
from pasta_decoding.data.annotate.head import Head, unit_inputs
from pasta_decoding.data.annotate.lattice import semi_markov_marginals
from pasta_decoding.data.annotate.prior import NAMES, Facts, Seen, find_facts
from pasta_decoding.data.annotate.reading import BaseReader, Laid, Reading, read_together
from pasta_decoding.data.dataset import Row
from pasta_decoding.lang.tree import chunk_extents, read, strip

FOLDS = 5
HEAD_PENALTY = 0.1  # on the squared weights of the head, beside the mean loss of a unit
FACTS_PENALTY = 1e-3  # on the squared weights of the facts, beside the mean loss of a response


@dataclass(frozen=True, slots=True)
class Example:
    """One annotated response: what can be known of it, and what its annotator did.

    taken:     of each candidate, whether it is a chunk.
    labels_U:  of each unit, 0 for main text, 1 if it begins a chunk, 2 if it goes on with one.
    states_VD: as `unit_inputs` takes them; None if the reader gives none.
    """

    draft: Draft
    candidates: tuple[Candidate, ...]
    taken: tuple[bool, ...]
    labels_U: Tensor
    states_VD: Tensor | None


def read_examples(
    rows: Iterable[Row], reader: BaseReader, *, together: int = 8
) -> Iterator[Example]:
    """Yield an example for each annotated row that has a candidate; the model reads each once."""
    waiting = iter(rows)
    while batch := list(islice(waiting, together)):
        found = read_together([_example(row, reader) for row in batch], reader.read)
        yield from (example for example in found if example is not None)


def train_head(examples: Sequence[Example], *, base: str, layers: Sequence[int]) -> Head:
    """Fit head and weights on `examples`, which were read with the states of `layers`."""
    seen: dict[int, list[Seen]] = {}
    for fold in range(FOLDS):
        others = [one for n, one in enumerate(examples) if n % FOLDS != fold]
        head = _fit_head(others, base, layers)
        seen |= {n: head.see(_states(examples[n])) for n in range(fold, len(examples), FOLDS)}
    weights = fit_facts(examples, [seen[n] for n in range(len(examples))])
    return replace(_fit_head(examples, base, layers), weights=weights)


def fit_facts(examples: Sequence[Example], seen: Sequence[Sequence[Seen] | None]) -> Facts:
    """Return the weights under which the annotators' choices are most likely.

    `seen`: what a head says of each example's units, None without a head.
    """
    facts = [_facts(one, units) for one, units in zip(examples, seen, strict=True)]
    weights_N = torch.zeros(len(NAMES), dtype=torch.float64)
    optimizer = torch.optim.LBFGS([weights_N], max_iter=40, line_search_fn="strong_wolfe")

    def loss() -> float:
        weights_N.grad = 2 * FACTS_PENALTY * weights_N
        total = FACTS_PENALTY * float(weights_N @ weights_N)
        for one, facts_CN in zip(examples, facts, strict=True):
            odds_C = facts_CN @ weights_N
            weight, likely = semi_markov_marginals(
                len(one.draft.units), one.candidates, odds_C.tolist()
            )
            taken_C = torch.tensor(one.taken, dtype=torch.float64)
            total += (weight - float(odds_C @ taken_C)) / len(examples)
            surplus_C = torch.tensor(likely, dtype=torch.float64) - taken_C
            weights_N.grad += facts_CN.T @ surplus_C / len(examples)
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return Facts(*weights_N.tolist())


def _example(
    row: Row, reader: BaseReader
) -> Generator[Sequence[Laid], list[Reading], Example | None]:
    tree = read(row.response)
    draft = Draft.of(reader, replace(row, response=strip(tree)))
    candidates = find_candidates(draft.units)
    if not candidates:
        return None
    (reading,) = yield draft.pay(draft.lay())
    chunks = set(chunk_extents(tree))
    units = draft.units
    taken = tuple((units[one.first].start, units[one.last].end) in chunks for one in candidates)
    labels_U = torch.zeros(len(units), dtype=torch.long)
    for one in compress(candidates, taken):
        labels_U[one.first] = 1
        labels_U[one.first + 1 : one.last + 1] = 2
    return Example(draft, candidates, taken, labels_U, draft.states(reading))


def _facts(one: Example, seen: Sequence[Seen] | None) -> Tensor:
    draft = one.draft
    found = find_facts(draft.instruction, draft.text, draft.units, one.candidates, seen)
    return torch.tensor([astuple(facts) for facts in found], dtype=torch.float64)


def _states(one: Example) -> Tensor:
    assert one.states_VD is not None, "a head is trained on what a reader with layers gave"
    return one.states_VD


def _fit_head(examples: Sequence[Example], base: str, layers: Sequence[int]) -> Head:
    """Fit the softmax regression; the weights of facts are left at zero."""
    inputs_UF = torch.cat([unit_inputs(_states(one)) for one in examples])
    labels_U = torch.cat([one.labels_U for one in examples])
    mean_F, scale_F = inputs_UF.mean(0), inputs_UF.std(0) + 1e-3
    inputs_UF = (inputs_UF - mean_F) / scale_F
    weight_F3 = torch.zeros(inputs_UF.shape[1], 3, requires_grad=True)
    bias_3 = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_F3, bias_3], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        total = cross_entropy(inputs_UF @ weight_F3 + bias_3, labels_U)
        total = total + HEAD_PENALTY * (weight_F3**2).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    zeros = Facts(*[0.0] * len(NAMES))
    return Head(base, tuple(layers), mean_F, scale_F, weight_F3.detach(), bias_3.detach(), zeros)
