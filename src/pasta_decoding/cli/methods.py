"""The methods of `eval generate`: how they are named, which of them go together, how they load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pasta_decoding.errors import PastaError
from pasta_decoding.models.load import DEFAULT_ADAPTER, NO_ADAPTER

if TYPE_CHECKING:
    from pasta_decoding.evaluation.methods.base import Method
    from pasta_decoding.runtime.decoder import Decoder


GREEDY = "greedy"
"""What run.json says of sampling where there is none."""


class Name(StrEnum):
    """The methods."""

    sequential = "sequential"
    pasta = "pasta"
    sot = "sot"
    apar = "apar"
    transformers = "transformers"
    lookup = "lookup"


DEFAULT_ADAPTERS = {
    Name.sequential: "sequential",
    Name.pasta: DEFAULT_ADAPTER,
    Name.sot: "sequential",
    Name.transformers: "sequential",
    Name.lookup: "sequential",
}
TRAINED = (Name.pasta, Name.apar)
THEIRS = (Name.transformers, Name.lookup)
"""Those that transformers' own `generate` computes; the first is the baseline of the second."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One --method: its name and adapter, and the label of its run folder."""

    name: Name
    adapter: str
    label: str


def choose(text: str) -> Chosen:
    """Read one --method."""
    name, given, adapter = text.partition("=")
    if name not in list(Name) or (given and not adapter):
        raise PastaError(
            f"--method {text!r} is none of {', '.join(Name)}",
            hint="An adapter may follow, as in pasta=balanced.",
        )
    if not given and name not in DEFAULT_ADAPTERS:
        raise PastaError(f"no adapter of {name} ships", hint=f"Name yours: --method {name}=FOLDER.")
    if not given:
        return Chosen(Name(name), DEFAULT_ADAPTERS[Name(name)], name)
    if adapter == NO_ADAPTER and name in TRAINED:
        raise PastaError(f"{name} needs an adapter", hint="The others do without.")
    return Chosen(Name(name), adapter, f"{name}-{Path(adapter).name}")


def check_labels(chosen: Sequence[Chosen]) -> None:
    """Refuse two methods with one folder."""
    labels = [one.label for one in chosen]
    for label in labels:
        if labels.count(label) > 1:
            raise PastaError(
                f"--method is given twice for the folder {label!r}",
                hint="Take one out, or rename an adapter's folder.",
            )


def check_servers(chosen: Sequence[Chosen], *, timing: bool) -> None:
    """Refuse what servers cannot do."""
    if timing:
        raise PastaError(
            "--timing is for an engine in this process",
            hint="Leave it out; bench/serve_load.py measures servers under load.",
        )
    if theirs := [one.name.value for one in chosen if one.name in THEIRS]:
        raise PastaError(
            f"{theirs[0]} computes in this process, not on servers",
            hint=f"Leave out --method {theirs[0]}, or --engine remote.",
        )
    if any(one.name is Name.sot for one in chosen):
        raise PastaError(
            "sot ends answers where their text says so, which servers cannot",
            hint="Leave out --method sot, or --engine remote.",
        )
    adapters = sorted({one.adapter for one in chosen})
    if len(adapters) > 1:
        raise PastaError(
            f"the servers have one checkpoint, and methods differ in theirs: {', '.join(adapters)}",
            hint="Name what is served: --method pasta=FOLDER --method sequential=FOLDER. What "
            "other servers have is for another run into the same --out.",
        )


def make_method(one: Chosen, load: Callable[[], Decoder], settings: Mapping[str, Any]) -> Method:
    """Load a method's model."""
    from pasta_decoding.evaluation.methods.own import Own
    from pasta_decoding.evaluation.methods.skeleton import Skeleton
    from pasta_decoding.runtime.local import LocalDecoder
    from pasta_decoding.runtime.request import SamplingParams

    sampling = SamplingParams(**({} if settings["sampling"] == GREEDY else settings["sampling"]))
    decoder, max_tokens = load(), settings["max_tokens"]
    if one.name in TRAINED or one.name is Name.sequential:
        return Own(decoder, max_tokens, parallel=one.name in TRAINED, sampling=sampling)
    assert isinstance(decoder, LocalDecoder), "refused before"
    if one.name is Name.sot:
        return Skeleton(decoder, max_tokens, sampling)
    from pasta_decoding.evaluation.methods.theirs import LOOKUP_TOKENS, Theirs, unpatched

    tokens = LOOKUP_TOKENS if one.name is Name.lookup else None
    limits = (max_tokens, settings["max_seconds"])
    return Theirs(decoder, unpatched(decoder), *limits, tokens, sampling)
