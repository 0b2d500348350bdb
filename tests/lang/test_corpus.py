"""The conformance corpus: every `name.txt` under tests/corpus has its result in `name.json`.

`python tests/lang/test_corpus.py --write` writes the results anew; read the difference before
committing it, because from then on it is the definition.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pasta_decoding.lang import tags
from pasta_decoding.lang.check import RULES, WARNINGS, Problem, check, warn
from pasta_decoding.lang.tree import Chunk, Node, Span, read, strip, text_form

CORPUS = Path(__file__).parents[1] / "corpus"
CASES = sorted(CORPUS.glob("*/*.txt"))
Record = dict[str, object]


def result(text: str) -> Record:
    """Return what the golden file of `text` must hold."""
    tree = read(text)
    record: Record = {
        "events": [_event(event) for event in tags.parse(text)],
        "tree": [_node(node) for node in tree],
        "stripped": strip(tree),
        "printed": text_form(tree),
        "problems": _places(check(text)),
    }
    warnings = _places(warn(text))
    if warnings:
        record["warnings"] = warnings
    return record


def _places(problems: Sequence[Problem]) -> list[list[int | str]]:
    return [[problem.line, problem.column, problem.rule] for problem in problems]


def _event(event: tags.TagEvent) -> Record:
    match event:
        case tags.Text(pos, text):
            return {"event": "text", "pos": pos, "text": text}
        case tags.Promise(pos, topic, tokens, _):
            return {"event": "promise", "pos": pos, "topic": topic, "tokens": tokens}
        case tags.AsyncOpen(pos):
            return {"event": "async", "pos": pos}
        case tags.AsyncClose(pos):
            return {"event": "/async", "pos": pos}
        case tags.Sync(pos):
            return {"event": "sync", "pos": pos}


def _node(node: Node) -> Record:
    match node:
        case Span(text):
            return {"node": "span", "text": text}
        case Chunk(topic, tokens, text):
            return {"node": "chunk", "topic": topic, "tokens": tokens, "text": text}
        case _:
            return {"node": "sync"}


def source(case: Path) -> str:
    """Return the text of a case, its line ends unchanged."""
    return case.read_bytes().decode("utf-8")


def golden(case: Path) -> Record:
    """Return the stored result of a case."""
    stored: Record = json.loads(case.with_suffix(".json").read_text(encoding="utf-8"))
    return stored


def _name(case: Path) -> str:
    return f"{case.parent.name}/{case.stem}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_the_case_means_what_its_golden_file_says(case: Path) -> None:
    assert result(source(case)) == golden(case)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_text_after_it_changes_only_its_last_event(case: Path) -> None:
    text = source(case)
    continued = tags.parse(text + "\n<sync/>tail")
    events = [event for event in continued if event.pos < len(text)]
    assert events[:-1] == tags.parse(text)[:-1]


def test_only_the_cases_under_valid_have_no_problems() -> None:
    clean = {_name(case): not golden(case)["problems"] for case in CASES}
    assert clean == {name: name.startswith("valid/") for name in clean}


def test_every_rule_is_broken_somewhere_in_the_corpus() -> None:
    assert {rule for case in CASES for rule in _broken(case)} == {*RULES, *WARNINGS}


def _broken(case: Path) -> list[str]:
    text = source(case)
    return [problem.rule for problem in [*check(text), *warn(text)]]


def test_no_golden_file_has_lost_its_case() -> None:
    assert {case.with_suffix("") for case in CASES} == {
        stored.with_suffix("") for stored in CORPUS.glob("*/*.json")
    }


def main(arguments: Sequence[str]) -> int:
    """Write every golden file anew; return the exit status."""
    if list(arguments) != ["--write"]:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    for case in CASES:
        stored = json.dumps(result(source(case)), indent=1, ensure_ascii=False)
        case.with_suffix(".json").write_text(stored + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
