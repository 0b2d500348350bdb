"""What the annotator `likelihood` accepts; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option


@dataclass(frozen=True, slots=True)
class Limits:
    """What is accepted.

    probability: of a candidate, at which taking it is even: about half of the F1 that is reached.
    """

    max_nats: Annotated[
        float, Option(help="likelihood: what hiding a chunk's siblings may cost, in nats a token.")
    ] = 2.0
    sync_nats: Annotated[
        float,
        Option(
            help="likelihood: what main text may lose before it asks for a sync, in nats a token."
        ),
    ] = 0.5
    probability: float = 0.35
