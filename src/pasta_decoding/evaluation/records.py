"""Records, one line of JSON an answer, and the run folders that hold them.

A request that failed has a record with its `error` and zeros, so that it counts in every figure. A
prompt's newest record counts.

A run folder holds one method's answers to one set of prompts:

run.json:           the settings, and where it ran.
records.jsonl:      a line an answer, in the order in which they ended.
model_outputs.json: all answers in AlpacaEval's format, in the order of the prompts; at the end.
"""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pasta_decoding.answer.record import Answer
from pasta_decoding.data.lines import append_line, read_json, read_lines, refuse_other_settings
from pasta_decoding.data.rows import Question
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.files import write_json
from pasta_decoding.lang.measures import repetitions, tokens_per_step
from pasta_decoding.scheduling.decoder import Decoder

SETTINGS, RECORDS, OUTPUTS = "run.json", "records.jsonl", "model_outputs.json"


@dataclass(frozen=True, slots=True)
class Record:
    """One answer of one method in figures.

    id:            the question's.
    error:         why there is no answer; None if there is one.
    annotated:     the text in the text form; parts that were written side by side are chunks.
    critical_path: forward steps after the first prefill at unlimited width. A later prefill is one
                   such step, since what came before it had to be known.
    fed_tokens:    tokens that were written and fed, tags and discarded drafts included.
    hit_limit:     whether the token budget of the whole answer ended something.
    seconds:       of the whole request, the queue included; of a failed one, its time-out.
    repeats:       seconds of each turn, if there were several; `seconds` is their median.
    turns:         names the turns that methods took on this prompt, each alone on the engine: only
                   seconds of the same turns may be compared. None if it was not timed.
    """

    id: str
    instruction: str
    dataset: str | None = None
    error: str | None = None
    text: str = ""
    annotated: str = ""
    plain_tokens: int = 0
    critical_path: int = 0
    fed_tokens: int = 0
    chunks: int = 0
    interventions: int = 0
    repeated_chunks: int = 0
    truncated_chunks: int = 0
    hit_limit: bool = False
    seconds: float = 0.0
    repeats: list[float] = field(default_factory=list)
    turns: str | None = None

    @property
    def tokens_per_step(self) -> float:
        return tokens_per_step(self.plain_tokens, self.critical_path)


def record_of(decoder: Decoder, question: Question, answer: Answer) -> Record:
    return Record(
        **asdict(question),
        text=answer.text,
        annotated=answer.annotated,
        plain_tokens=decoder.plain_tokens(answer.text),
        critical_path=answer.critical_path,
        fed_tokens=answer.fed_tokens,
        chunks=answer.chunks,
        interventions=answer.interventions,
        repeated_chunks=len(repetitions(answer.tree)),
        truncated_chunks=answer.truncated_chunks,
        hit_limit=answer.hit_limit,
        seconds=answer.seconds,
    )


def read_records(path: Path, *, resume: bool = False) -> list[Record]:
    """Return the records of a file. `resume`: it is to grow on, so a torn last line is cut away."""
    known = {one.name for one in fields(Record)}  # earlier versions kept more
    records = []
    for number, line in enumerate(read_lines(path, resume=resume, hint=""), start=1):
        with errors_as(f"{path}:{number}: not a record of an evaluation", TypeError):
            records.append(Record(**{name: line[name] for name in line.keys() & known}))
    return records


@dataclass(slots=True)
class RunFolder:
    """A run folder: one method's settings, and its records by the prompts' ids."""

    folder: Path
    settings: dict[str, Any]
    records: dict[str, Record]

    @property
    def label(self) -> str:
        return self.folder.resolve().name

    def append(self, record: Record) -> None:
        """Keep a record; when this returns, a kill cannot lose it any more."""
        append_line(self.folder / RECORDS, asdict(record))
        self.records[record.id] = record

    def finish(self, questions: Sequence[Question]) -> list[Record]:
        """Write the answers in AlpacaEval's format, whole; return the records in order."""
        records = [self.records[question.id] for question in questions]
        outputs = [
            ({} if one.dataset is None else {"dataset": one.dataset})
            | {"instruction": one.instruction, "output": one.text, "generator": self.label}
            for one in records
        ]
        write_json(self.folder / OUTPUTS, outputs)
        return records


def begin_run(folder: Path, settings: Mapping[str, Any]) -> RunFolder:
    """Begin a run, or go on with it. Raises PastaError if it was begun with other settings."""
    here = {"machine": machine(), "commit": commit(), "versions": versions()}
    if (folder / SETTINGS).exists():
        run = _read(folder, resume=True)
        hint = "Give the settings it was begun with, or another --out."
        refuse_other_settings(folder, run.settings, settings, hint=hint)
        places = [{key: run.settings.get(key) for key in here}, *run.settings.get("resumed", [])]
        if places[-1] != here:  # other code, or another machine
            run.settings["resumed"] = [*places[1:], here]
    elif (folder / RECORDS).exists():
        raise PastaError(f"{folder} holds records without a {SETTINGS}")
    else:
        run = RunFolder(folder, {**settings, **here, "resumed": []}, {})
    write_json(folder / SETTINGS, run.settings)
    return run


def _read(folder: Path, *, resume: bool = False) -> RunFolder:
    settings = read_json(folder / SETTINGS, dict)
    for key, kind in (("method", str), ("max_tokens", int)):
        if not isinstance(settings.get(key), kind):
            raise PastaError(f"{folder / SETTINGS} has no {key!r}")
    records = read_records(folder / RECORDS, resume=resume)
    return RunFolder(folder, settings, {one.id: one for one in records})


def find_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Read the run folders given, and those inside of the other folders. Raises PastaError."""
    folders: dict[str, Path] = {}
    for path in paths:
        one = [path] if (path / SETTINGS).is_file() else []
        found = one or [settings.parent for settings in sorted(path.glob(f"*/{SETTINGS}"))]
        if not found:
            raise PastaError(f"{path}: no run folder of `pasta eval generate`, and none in it")
        for folder in found:
            name = folder.resolve().name
            if folders.setdefault(name, folder).resolve() != folder.resolve():
                raise PastaError(f"several run folders are called {name!r}: rename one")
    runs = list(map(_read, folders.values()))
    if empty := [run.folder for run in runs if not run.records]:
        raise PastaError(f"{empty[0]} holds no records")
    return runs


# Where a figure was measured


def machine() -> str:
    """Name processor, core count, GPU and system, for the side of a figure."""
    import torch

    processor = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line for line in lines if line.startswith("model name"))
        processor = model.partition(":")[2].strip()
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join([processor, f"{os.cpu_count()} cores", *gpu, platform.system()])


def versions() -> dict[str, str]:
    """Return the versions of what computes an answer, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in ("pasta-decoding", "torch", "transformers", "llama-cpp-python"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str | None:
    """Return the commit of the code that runs, `+` if it was changed since; None outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # not that of a project around site-packages
        return git("describe", "--always", "--dirty=+")
    except (OSError, subprocess.CalledProcessError):
        return None
