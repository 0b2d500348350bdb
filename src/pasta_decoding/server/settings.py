"""What the operator of a server decides; nothing here needs the extra `serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from pasta_decoding.runtime.prompt_pace import DEFAULT_STRETCH
from pasta_decoding.runtime.rules import Rules


@dataclass(frozen=True, slots=True)
class Settings:
    """How requests are met.

    body_s: how long a request's body may take.
    hosts:  what the server may be called beside localhost; None: anything.
    """

    api_key: Annotated[
        str | None,
        Option(envvar="PASTA_API_KEY", help="Ask clients for this key.", show_envvar=True),
    ] = None
    origins: Annotated[
        tuple[str, ...],
        Option(
            "--allow-origin",
            help="Let pages from here ask, such as https://example.org; * for any.",
        ),
    ] = ()
    answer_tokens: Annotated[
        int,
        Option(
            "--max-tokens",
            min=1,
            help="End answers after so many tokens where a request does not say.",
        ),
    ] = Rules().max_tokens
    max_body_bytes: Annotated[
        int, Option("--max-body", min=1024, help="Refuse requests with more bytes.")
    ] = 2**20
    body_s: float = 30.0
    hosts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """How much is done at a time."""

    max_requests: Annotated[int, Option(min=1, help="Write so many answers at a time.")] = 16
    max_queue: Annotated[int, Option(min=0, help="Let so many answers wait; others get a 429.")] = (
        64
    )
    target_ms_per_token: Annotated[
        float | None,
        Option(
            min=0.001,
            help="Milliseconds that a step should take at most: fewer threads write at a time "
            "where that makes it so. As is cheapest if left out.",
        ),
    ] = None
    stretch: Annotated[
        float,
        Option(
            min=1.01,
            help="Let steps take so many times as long, on average, for the prompt tokens in them.",
        ),
    ] = DEFAULT_STRETCH
