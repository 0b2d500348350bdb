"""Records, one line of JSON an answer, and the run folders that hold them.

A request that failed has a record with its `error` and zeros, so that it counts in every figure. If
a prompt has several records, the last one counts.

A run folder holds one method's answers to one set of prompts:

run.json:           the settings of the run, and where it ran (`provenance`).
records.jsonl:      one line an answer, in the order in which the answers ended.
model_outputs.json: all answers in AlpacaEval's format, in the order of the prompts. It is written
                    when all prompts are answered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pasta_decoding.answer.record import Answer
from pasta_decoding.data.lines import append_line, read_json, read_lines, refuse_other_settings
from pasta_decoding.data.rows import Question
from pasta_decoding.errors import PastaError, errors_as
from pasta_decoding.evaluation.provenance import provenance
from pasta_decoding.files import write_json
from pasta_decoding.lang.measures import repetitions, tokens_per_step
from pasta_decoding.scheduling.decoder import Decoder

SETTINGS = "run.json"
RECORDS = "records.jsonl"
OUTPUTS = "model_outputs.json"


@dataclass(frozen=True, slots=True)
class Record:
    """One method's answer to one question, in figures.

    id:            the question's.
    error:         why there is no answer; None if there is one.
    annotated:     the answer in the text form; parts that were written side by side are chunks.
    plain_tokens:  tokens of the text without tags, tokenised by itself.
    critical_path: forward steps after the first prefill, at unlimited width. A later prefill is one
                   such step, since it had to wait for the text before it.
    fed_tokens:    tokens that were written and fed, tags and discarded drafts included.
    hit_limit:     whether the token limit of the whole answer ended something.
    seconds:       of the whole request, the queue included; of a failed request, its time-out.
    repeats:       the seconds of each turn, if there were several; `seconds` is their median.
    turns:         names the turns in which several methods answered this prompt, each of them alone
                   on the engine. Only seconds of the same turns can be compared. None if the answer
                   was not timed.
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
    """Return the record of a question that one request answered."""
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
    """Return the records of a file. Fields that earlier versions wrote as well are left out.

    resume: the file is about to grow; if its last line was cut off, the line is removed.
    """
    names = {record_field.name for record_field in fields(Record)}
    records = []
    for number, line in enumerate(read_lines(path, resume=resume, hint=""), start=1):
        with errors_as(f"{path}:{number}: not a record of an evaluation", TypeError):
            records.append(Record(**{name: line[name] for name in line.keys() & names}))
    return records


@dataclass(slots=True)
class RunFolder:
    """A run folder: the settings of one method, and its records by the ids of the prompts."""

    folder: Path
    settings: dict[str, Any]
    records: dict[str, Record]

    @property
    def label(self) -> str:
        return self.folder.resolve().name

    def append(self, record: Record) -> None:
        """Write a record to the file. When this returns, a kill cannot lose it."""
        append_line(self.folder / RECORDS, asdict(record))
        self.records[record.id] = record

    def finish(self, questions: Sequence[Question]) -> list[Record]:
        """Write `model_outputs.json`; return the records in the order of the questions."""
        records = [self.records[question.id] for question in questions]
        write_json(self.folder / OUTPUTS, [self._alpaca_output(record) for record in records])
        return records

    def _alpaca_output(self, record: Record) -> dict[str, str]:
        dataset = {} if record.dataset is None else {"dataset": record.dataset}
        return {
            **dataset,
            "instruction": record.instruction,
            "output": record.text,
            "generator": self.label,
        }


def begin_run(folder: Path, settings: Mapping[str, Any]) -> RunFolder:
    """Begin a run, or resume it. Raises PastaError if it was begun with other settings."""
    if (folder / SETTINGS).exists():
        run = _read_run(folder, resume=True)
        hint = "Give the settings it was begun with, or another --out."
        refuse_other_settings(folder, run.settings, settings, hint=hint)
        _note_resumption(run.settings)
    elif (folder / RECORDS).exists():
        raise PastaError(f"{folder} holds records without a {SETTINGS}")
    else:
        run = RunFolder(folder, {**settings, **provenance(), "resumed": []}, {})
    write_json(folder / SETTINGS, run.settings)
    return run


def _note_resumption(settings: dict[str, Any]) -> None:
    """Add this code and machine to `resumed`, unless the run was last on the same ones."""
    current = provenance()
    first = {key: settings.get(key) for key in current}
    resumed = settings.get("resumed", [])
    last = resumed[-1] if resumed else first
    if last != current:
        settings["resumed"] = [*resumed, current]


def _read_run(folder: Path, *, resume: bool = False) -> RunFolder:
    settings = read_json(folder / SETTINGS, dict)
    for key, kind in (("method", str), ("max_tokens", int)):
        if not isinstance(settings.get(key), kind):
            raise PastaError(f"{folder / SETTINGS} has no {key!r}")
    records = read_records(folder / RECORDS, resume=resume)
    return RunFolder(folder, settings, {record.id: record for record in records})


def find_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Read run folders. A path is one, or a folder of several. Raises PastaError.

    Two runs must not have one label, since figures are kept by label.
    """
    folders: dict[str, Path] = {}
    for path in paths:
        for folder in _run_folders(path):
            label = folder.resolve().name
            if folders.setdefault(label, folder).resolve() != folder.resolve():
                raise PastaError(f"several run folders are called {label!r}: rename one")
    runs = [_read_run(folder) for folder in folders.values()]
    for run in runs:
        if not run.records:
            raise PastaError(f"{run.folder} holds no records")
    return runs


def _run_folders(path: Path) -> list[Path]:
    if (path / SETTINGS).is_file():
        return [path]
    folders = [settings.parent for settings in sorted(path.glob(f"*/{SETTINGS}"))]
    if not folders:
        raise PastaError(f"{path}: no run folder of `pasta eval generate`, and none in it")
    return folders
