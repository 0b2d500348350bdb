"""The settings of `pasta serve`. This module does not need the extra `serve`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pasta_decoding.setting import Setting


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the server listens, who may ask, and how much.

    body_s: seconds that a request's body may take.
    hosts:  names of the server besides localhost; None allows any.
    """

    host: Annotated[
        str, Setting("Address to listen on; only this machine's is safe without a key.")
    ] = "127.0.0.1"
    port: Annotated[int, Setting("Port; 0 takes a free one.")] = 8000
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting("debug, info (a line for each request), warning or error.", metavar="LEVEL"),
    ] = "warning"
    api_key: Annotated[
        str | None,
        Setting("Ask clients for this key.", envvar="PASTA_API_KEY"),
    ] = None
    origins: Annotated[
        tuple[str, ...],
        Setting("Allow requests from pages of this origin; * allows any.", flag="--allow-origin"),
    ] = ()
    answer_tokens: Annotated[
        int, Setting("Token limit of requests that set none.", flag="--max-tokens", min=1)
    ] = 512
    max_body_bytes: int = 2**20
    body_s: float = 30.0
    hosts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """How much is done at the same time. `max_queue`: answers that wait; more are refused."""

    max_requests: Annotated[int, Setting("Answers written at the same time.", min=1)] = 16
    max_queue: int = 64
    target_ms_per_token: Annotated[
        float, Setting("Run fewer threads if a step would take longer; 0 = off.", min=0)
    ] = 0.0
