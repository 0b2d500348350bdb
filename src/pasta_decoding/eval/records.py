"""What `pasta eval generate` keeps of each prompt, and what everything else is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import read_lines
from pasta_decoding.errors import PastaError


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt's answer in figures; `error` instead of it if the request failed."""

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
    widths: Mapping[int, int] = field(default_factory=dict)
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


def to_line(record: Record) -> dict[str, Any]:
    """Return what JSON keeps of a record."""
    return asdict(record)


def read_records(path: Path) -> list[Record]:
    """Return the records of a file; a last line that a kill left unfinished is not one."""
    return [record_at(path, number, line) for number, line in enumerate(read_lines(path), start=1)]


def record_at(path: Path, number: int, line: dict[str, Any]) -> Record:
    """Return the record of a line. Raises PastaError, naming the place, if it holds none."""
    try:
        record = Record(**line)
        return replace(
            record,
            widths={int(width): steps for width, steps in record.widths.items()},
            promises=tuple((promised, tokens) for promised, tokens in record.promises),
            repeats=tuple(record.repeats),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PastaError(
            f"{path}:{number}: not a record of an evaluation: {error}",
            hint="Choose another folder, or remove the file to start again.",
        ) from error
