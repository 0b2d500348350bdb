"""What `pasta eval generate` keeps of each prompt, and what everything else is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt's answer; `error` instead of it if the request failed."""

    id: str
    instruction: str
    dataset: str | None = None
    error: str | None = None
    text: str = ""
    annotated: str = ""
    plain_tokens: int = 0
    critical_path: int = 0
    fed_tokens: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    syncs: int = 0
    widths: Mapping[str, int] = field(default_factory=dict)
    interventions: int = 0
    repeated_chunks: int = 0
    truncated_chunks: int = 0
    hit_limit: bool = False
    promises: Sequence[tuple[int, int]] = ()
    near_promises: int = 0
    seconds: float = 0.0
    first_token_s: float | None = None
    first_text_s: float | None = None
    last_text_s: float | None = None
    repeats: Sequence[float] = ()
    timed: bool = False
