"""Made-up run folders, as `pasta eval generate` writes them."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pasta_decoding.evaluation.records import Record

CHUNKED = (
    'Two things: <promise topic="diet" tokens="20"/><async>A good diet matters.</async> and '
    '<promise topic="sleep" tokens="30"/><async>Rest matters, too.</async><sync/> So do both.'
)
PLAIN = "Two things: A good diet matters. and Rest matters, too. So do both."

Change = Callable[[int, Record], Record]


def record(number: int, **fields: Any) -> Record:
    """One sequential answer of 100 tokens in 100 steps and 10 seconds."""
    instruction = f"What about {number}?"
    answer = Record(
        hashlib.sha256(instruction.encode()).hexdigest()[:16],
        instruction,
        dataset="selfinstruct" if number % 2 else "koala",
        text=f"This about {number}.",
        annotated=f"This about {number}.",
        plain_tokens=100,
        critical_path=100,
        fed_tokens=100,
        seconds=10.0,
    )
    return replace(answer, **fields)


def parallel(number: int, **fields: Any) -> Record:
    """The same answer in two chunks and 50 steps."""
    return record(
        number, **{"text": PLAIN, "annotated": CHUNKED, "critical_path": 50, "chunks": 2} | fields
    )


def failed(number: int, **fields: Any) -> Record:
    """A request that ended at its time-out."""
    empty = record(number)
    failure = Record(empty.id, empty.instruction, empty.dataset, error="no answer", seconds=60.0)
    return replace(failure, **fields)


def write_run(folder: Path, method: str, records: Sequence[Record], **settings: Any) -> Path:
    """Write a run folder; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    defaults: Mapping[str, Any] = {"method": method, "max_tokens": 400, "machine": "here"}
    (folder / "run.json").write_text(json.dumps({**defaults, **settings}))
    lines = "".join(json.dumps(asdict(answer)) + "\n" for answer in records)
    (folder / "records.jsonl").write_text(lines)
    return folder
