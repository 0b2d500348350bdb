"""Reading pairs of answers that somebody has judged."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean

from pasta_decoding.data.dataset import read_lines, read_objects
from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.judge.base import JudgedPair

_TEXTS = ("prompt", "response_a", "response_b")
_LABELS = {"a": 1.0, "b": 0.0, "tie": 0.5}
# Two models are an even match if neither wins more often than this share of the prompts: then
# knowing which of them wrote an answer says little about which answer is better.
_EVEN = 0.75
# Two verdicts against one reference rank two answers if they differ by this much.
_CLEARLY = 0.25
_SIMILAR_WINS = 0.15
_BETWEEN_PER_PROMPT = 20


def read_pairs(path: Path) -> list[JudgedPair]:
    """Read JSONL (.gz): `prompt`, `response_a`, `response_b`, and `label`, one of a, b and tie.

    Pairs whose label is null were not judged yet, and are left out. Their source is the file's
    name up to its first dot. Raises PastaError.
    """
    source = source_name(path)
    read = (_pair(source, found, f"{path}:{number}") for number, found in read_objects(path))
    return [pair for pair in read if pair is not None]


def source_name(path: Path) -> str:
    """Return what the pairs of a file are called."""
    return path.name.partition(".")[0]


def _pair(source: str, found: dict[str, object], where: str) -> JudgedPair | None:
    texts = []
    for name in _TEXTS:
        text = found.get(name)
        if not isinstance(text, str):
            raise PastaError(f"{where}: no text {name!r}", hint=f"A pair has {', '.join(_TEXTS)}.")
        texts.append(text)
    if "label" not in found:
        message = f"{where}: no 'label'"
        raise PastaError(message, hint=f"A label is one of {', '.join(_LABELS)}.")
    label = found["label"]
    if label is None:
        return None
    if not isinstance(label, str) or label not in _LABELS:
        message = f"{where}: the label is {label!r}"
        raise PastaError(message, hint=f"A label is one of {', '.join(_LABELS)}.")
    prompt, a, b = texts
    return JudgedPair(source, prompt, a, b, _LABELS[label])


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What an annotator thinks of a model's answer: how sure, in [0, 1], it beats the reference."""

    prompt_id: int
    model: str
    reference: str
    preference: float


@dataclass(frozen=True, slots=True)
class _Texts:
    """Prompts by their number, and answers by number and who wrote them."""

    prompts: dict[int, str]
    answers: dict[tuple[int, str], str]

    def pair(self, source: str, prompt_id: int, a: str, b: str, preference: float) -> JudgedPair:
        """Return a pair by the names of those who wrote its answers."""
        first, second = self.answers[prompt_id, a], self.answers[prompt_id, b]
        return JudgedPair(source, self.prompts[prompt_id], first, second, preference)

    def has(self, one: _Verdict) -> bool:
        """Are the prompt and both answers there?"""
        writers = (one.model, one.reference)
        return one.prompt_id in self.prompts and all(
            (one.prompt_id, writer) in self.answers for writer in writers
        )


def read_alpaca_eval(folder: Path) -> list[JudgedPair]:
    """Read AlpacaEval's outputs and annotations: many models on the same prompts.

    The folder holds `prompts*.jsonl`, `outputs*.jsonl`, `references*.jsonl` and
    `annotations*.csv`, all perhaps with .gz. An annotator NAME gives up to three sources: model
    against reference, `NAME/even` where the two win about equally often and `NAME/uneven`
    elsewhere, and `NAME-between`: two models that win about equally often, on a prompt where
    their verdicts against the reference differ clearly. Raises PastaError.
    """
    texts = _read_texts(folder)
    by_annotator: dict[str, list[_Verdict]] = defaultdict(list)
    for annotator, one in _read_verdicts(folder):
        if texts.has(one):
            by_annotator[annotator].append(one)
    pairs: list[JudgedPair] = []
    for annotator, verdicts in by_annotator.items():
        wins = _win_rates(verdicts)
        pairs += _against_reference(annotator, verdicts, wins, texts)
        pairs += _between_models(annotator, verdicts, wins, texts)
    if not pairs:
        hint = "It must hold the prompts, the outputs, the references and the annotations."
        raise PastaError(f"{folder}: no verdict with both of its answers", hint=hint)
    return pairs


def _against_reference(
    annotator: str, verdicts: Sequence[_Verdict], wins: Mapping[str, float], texts: _Texts
) -> Iterator[JudgedPair]:
    for one in verdicts:
        match = "even" if 1 - _EVEN <= wins[one.model] <= _EVEN else "uneven"
        source = f"{annotator}/{match}"
        yield texts.pair(source, one.prompt_id, one.model, one.reference, one.preference)


def _between_models(
    annotator: str, verdicts: Sequence[_Verdict], wins: Mapping[str, float], texts: _Texts
) -> Iterator[JudgedPair]:
    """Yield at most `_BETWEEN_PER_PROMPT` pairs a prompt, drawn with a fixed seed."""
    by_prompt: dict[int, list[_Verdict]] = defaultdict(list)
    for one in verdicts:
        by_prompt[one.prompt_id].append(one)
    for prompt_id, judged in sorted(by_prompt.items()):
        ranked = [
            (a, b)
            for a, b in combinations(judged, 2)
            if a.reference == b.reference
            and abs(a.preference - b.preference) > _CLEARLY
            and abs(wins[a.model] - wins[b.model]) < _SIMILAR_WINS
        ]
        Random(prompt_id).shuffle(ranked)
        for a, b in ranked[:_BETWEEN_PER_PROMPT]:
            better = float(a.preference > b.preference)
            yield texts.pair(f"{annotator}-between", prompt_id, a.model, b.model, better)


def _win_rates(verdicts: Iterable[_Verdict]) -> dict[str, float]:
    won: dict[str, list[float]] = defaultdict(list)
    for one in verdicts:
        won[one.model].append(one.preference)
    return {model: fmean(preferences) for model, preferences in won.items()}


def _read_texts(folder: Path) -> _Texts:
    prompts = {key: text for (key, _), text in _read_column(folder, "prompts", "instruction")}
    references = _read_column(folder, "references", "output", "reference")
    outputs = _read_column(folder, "outputs", "output", "model")
    return _Texts(prompts, dict([*references, *outputs]))


def _read_column(
    folder: Path, kind: str, column: str, writer: str | None = None
) -> Iterator[tuple[tuple[int, str], str]]:
    for path in _files(folder, kind, "jsonl"):
        for number, found in read_objects(path):
            key, text = found.get("instruction_id"), found.get(column)
            name = found.get(writer) if writer else ""
            if not (isinstance(key, int) and isinstance(text, str) and isinstance(name, str)):
                needed = ", ".join(filter(None, ("instruction_id", writer, column)))
                raise PastaError(f"{path}:{number}: a row needs {needed}")
            yield (key, name), text


def _read_verdicts(folder: Path) -> Iterator[tuple[str, _Verdict]]:
    for path in _files(folder, "annotations", "csv"):
        lines = (line.decode("utf-8", "replace") for line in read_lines(path))
        for number, row in enumerate(csv.DictReader(lines), start=2):
            annotator = row.get("annotator") or source_name(path)
            try:
                # AlpacaEval counts from 1, the reference wins, to 2, the model wins.
                better = float(row["preference"]) - 1
                key = int(row["instruction_id"])
                verdict = _Verdict(key, row["model"], row["reference"], better)
            except (KeyError, TypeError, ValueError) as error:
                hint = "The columns are instruction_id, model, reference and preference (1 to 2)."
                raise PastaError(f"{path}:{number}: not an annotation", hint=hint) from error
            if not 0 <= better <= 1:
                raise PastaError(f"{path}:{number}: the preference {1 + better:g} is not in [1, 2]")
            yield annotator, verdict


def _files(folder: Path, kind: str, suffix: str) -> list[Path]:
    found = sorted([*folder.glob(f"{kind}*.{suffix}"), *folder.glob(f"{kind}*.{suffix}.gz")])
    if not found:
        raise PastaError(f"{folder}: no {kind}*.{suffix} or {kind}*.{suffix}.gz")
    return found
