"""A run folder: one method's answers to one set of prompts, kept as they end.

run.json:           the settings, and where it ran.
records.jsonl:      a line an answer, in the order in which they ended; a prompt's newest counts.
model_outputs.json: all answers in AlpacaEval's format, in the order of the prompts; at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import append_line, refuse_other_settings, write_text
from pasta_decoding.data.questions import Question
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.machine import commit, machine, versions
from pasta_decoding.evaluation.records import Record, read_records, to_line

Settings = Mapping[str, Any]
"""What the answers depend on, as JSON holds it."""


class RunFolder:
    """Opens or begins a folder. Raises PastaError if it was begun with other settings.

    retry_failed: forget the requests that failed, and count them in run.json.
    """

    def __init__(self, path: Path, settings: Settings, *, retry_failed: bool = False) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        here = {"machine": machine(), "commit": commit(), "versions": versions()}
        before = self._before()
        if before is None:
            run = {**settings, **here, "resumed": []}
        else:
            known = {name: before.get(name) for name in settings}
            hint = "Give the settings it was begun with, or another --out."
            refuse_other_settings(path, known, settings, hint=hint)
            found = read_records(self._records, resume=True)
            self.records = {record.id: record for record in found}
            run = _resumed(before, here)
            failed = [key for key, record in self.records.items() if record.error is not None]
            if retry_failed and failed:
                run["retried"] = before.get("retried", 0) + len(failed)
                for key in failed:
                    del self.records[key]
        write_text(self._run, json.dumps(run, indent=2, ensure_ascii=False) + "\n")

    def missing(self, questions: Sequence[Question]) -> list[Question]:
        """Return the questions that have no record yet."""
        return [question for question in questions if question.id not in self.records]

    def append(self, record: Record) -> None:
        """Keep a record; when this returns, a kill cannot lose it any more."""
        append_line(self._records, to_line(record))
        self.records[record.id] = record

    def finish(self, questions: Sequence[Question]) -> list[Record]:
        """Write the answers in AlpacaEval's format, whole; return the records in order."""
        records = [self.records[question.id] for question in questions]
        outputs = [model_output(record, self.path.name) for record in records]
        text = json.dumps(outputs, indent=2, ensure_ascii=False) + "\n"
        write_text(self.path / "model_outputs.json", text)
        return records

    @property
    def _run(self) -> Path:
        return self.path / "run.json"

    @property
    def _records(self) -> Path:
        return self.path / "records.jsonl"

    def _before(self) -> dict[str, Any] | None:
        """Return what an earlier command wrote; None if there was none."""
        if not self._run.exists():
            if self._records.exists():
                raise PastaError(
                    f"{self.path} holds records without a run.json",
                    hint="Give another --out, or remove the folder.",
                )
            return None
        try:
            return dict(json.loads(self._run.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise PastaError(
                f"{self._run} is broken: {error}", hint="Give another --out, or remove the folder."
            ) from error


def _resumed(before: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Return run.json of a run that goes on here; other code or machines are added to it."""
    places = [{key: before.get(key) for key in here}, *before.get("resumed", [])]
    return before if places[-1] == here else before | {"resumed": [*places[1:], here]}


def model_output(record: Record, generator: str) -> dict[str, str]:
    """Return one answer as AlpacaEval wants it; a failed request has answered nothing."""
    output = {"instruction": record.instruction, "output": record.text, "generator": generator}
    return output if record.dataset is None else {"dataset": record.dataset, **output}
