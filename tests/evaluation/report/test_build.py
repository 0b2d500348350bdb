"""Reading run folders, refusing what cannot be compared, and the numbers of a report."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.evaluation.report.build import build, numbers, prompts_csv, runs_csv
from pasta_decoding.evaluation.runs import find_runs, read_run, text_digest
from tests.runfolders import CHUNKED, PLAIN, failed, parallel, record, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four runs of twelve prompts."""
    folder = tmp_path / "runs"
    write_run(folder / "sequential", "sequential", [record(n) for n in range(12)])
    write_run(folder / "pasta-fast", "pasta", [parallel(n, critical_path=30) for n in range(12)])
    write_run(folder / "sot", "sot", [parallel(n, critical_path=60) for n in range(12)])
    some = [failed(n) if n == 3 else parallel(n, critical_path=70) for n in range(12)]
    write_run(folder / "apar", "apar", some)
    return folder


def rate(folder: Path, gain: float, *, by: str = "sequential") -> None:
    """Say that every text is likelier than the baseline's by so many nats."""
    rows = [
        {
            "id": one.id,
            "answer": text_digest(one.text),
            "baseline_answer": text_digest(f"This about {n}."),
            "nats": 3 - gain,
            "baseline_nats": 3.0,
            "rep_4": 0.0,
            "baseline_rep_4": 0.0,
            "topics": 2,
            "missing_topics": 1,
        }
        for n, one in enumerate(read_run(folder).records.values())
    ]
    (folder / "quality.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rating.json").write_text(json.dumps({"likelihood_under": by}))


def annotate(folder: Path, preferences: list[float | None], text: str = PLAIN) -> None:
    rows = [
        {"instruction": f"What about {n}?", "output_1": f"This about {n}.", "output_2": text,
         "annotator": "somebody", "preference": preference}
        for n, preference in enumerate(preferences)
    ]  # fmt: skip
    (folder / "annotations.json").write_text(json.dumps(rows))


def test_runs_are_found_alone_and_inside_a_folder(runs: Path) -> None:
    assert [run.label for run in find_runs([runs])] == ["apar", "pasta-fast", "sequential", "sot"]
    both = find_runs([runs / "sequential", runs])
    assert [run.label for run in both] == ["sequential", "apar", "pasta-fast", "sot"]


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PastaError, match="no run folder, and none in it"):
        find_runs([tmp_path])


def test_a_report_needs_a_sequential_run(runs: Path) -> None:
    with pytest.raises(PastaError, match="no run is sequential: sot"):
        build(find_runs([runs / "sot"]))


def test_runs_of_different_prompts_are_refused_by_name(runs: Path) -> None:
    write_run(runs / "sot", "sot", [parallel(n) for n in (*range(11), 99)])
    with pytest.raises(PastaError) as refused:
        build(find_runs([runs / "sequential", runs / "sot"]))
    assert str(refused.value) == (
        f"{runs}/sequential and {runs}/sot are of different prompts: {runs}/sequential has no "
        f"answer to 1 of them, such as 'What about 99?'; {runs}/sot has no answer to 1 of them, "
        "such as 'What about 11?'"
    )


@pytest.mark.parametrize(
    ("key", "value"), [("max_tokens", 500), ("engine", "torch"), ("model", "another")]
)
def test_runs_that_differ_in_more_than_the_method_are_refused(
    runs: Path, key: str, value: object
) -> None:
    same = {"engine": "llama", "model": "m", "max_tokens": 400}
    base, ours = (runs / name for name in ("sequential", "pasta-fast"))
    write_run(base, "sequential", [record(0)], **same)
    write_run(ours, "pasta", [parallel(0)], **same)
    assert build(find_runs([base, ours])).lines
    write_run(ours, "pasta", [parallel(0)], **same | {key: value})
    with pytest.raises(PastaError) as refused:
        build(find_runs([base, ours]))
    assert str(refused.value) == f"{base} has {key} {same[key]!r}, {ours} has {value!r}"


def test_servers_hold_a_model_for_each_method(runs: Path) -> None:
    for label in ("sequential", "pasta-fast"):
        write_run(runs / label, label.split("-")[0], [record(0)], engine="remote", model=label)
    assert len(build(find_runs([runs / "sequential", runs / "pasta-fast"])).lines) == 2


def test_the_formula_of_a_win_rate_is_told(runs: Path) -> None:
    annotate(runs / "sot", [1.2 + n / 20 for n in range(12)])
    assert build(find_runs([runs])).lines[2].qualities["lc_win_rate"].by == (
        "somebody; length_controlled_minimal"
    )


def test_a_run_that_was_stopped_does_not_drop_out_silently(runs: Path) -> None:
    write_run(runs / "sot", "sot", [parallel(n) for n in range(7)])
    with pytest.raises(PastaError, match=r"sot has no answer to 5 of them, such as 'What about 7"):
        build(find_runs([runs]))
    found = build(find_runs([runs]), common=True)
    assert found.left_out == {"sequential": 5, "pasta-fast": 5, "apar": 5}
    assert {line.figures.prompts for line in found.lines} == {7}


def test_prompts_that_no_run_has_come_to_are_told(runs: Path) -> None:
    for path in runs.iterdir():
        settings = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(settings | {"prompts": {"number": 20}}))
    found = build(find_runs([runs]))
    assert found.unanswered == dict.fromkeys(("apar", "pasta-fast", "sequential", "sot"), 8)


def test_the_order_of_the_prompts_does_not_matter(runs: Path) -> None:
    before = numbers(build(find_runs([runs])))["runs"]["sot"]["speedups"]
    write_run(runs / "sot", "sot", [parallel(n, critical_path=60) for n in reversed(range(12))])
    assert numbers(build(find_runs([runs])))["runs"]["sot"]["speedups"] == before


def test_the_numbers_are_json_with_failures_inside(runs: Path) -> None:
    found = json.loads(json.dumps(numbers(build(find_runs([runs])))))
    assert list(found["runs"]) == ["sequential", "pasta-fast", "sot", "apar"]
    assert found["runs"]["apar"]["failures"] == 1
    ratios = [100 / 70] * 11 + [100 / 400]
    product = 1.0
    for ratio in ratios:
        product *= ratio
    theoretical = found["runs"]["apar"]["speedups"]["theoretical"]["value"]
    assert theoretical == pytest.approx(product ** (1 / 12))
    assert found["judge"] == "judge: not used, because none was given to `pasta eval rate`"


def rows(text: str) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_tables_have_a_line_a_run_and_a_line_a_prompt(runs: Path) -> None:
    rate(runs / "sot", 0.5)
    found = build(find_runs([runs]))
    by_run = {row["run"]: row for row in rows(runs_csv(found))}
    assert float(by_run["sot"]["speedups.own.value"]) == pytest.approx(100 / 60)
    assert float(by_run["sot"]["quality.text_quality.value"]) == pytest.approx(0.5)
    assert by_run["apar"]["quality.text_quality.value"] == ""
    prompts = rows(prompts_csv(found))
    assert len(prompts) == 4 * 12
    assert sum(row["error"] != "" for row in prompts) == 1


def test_dominance_is_told_for_each_rival_that_was_rated(runs: Path) -> None:
    rate(runs / "pasta-fast", 0.3)
    rate(runs / "sot", 0.2)
    rate(runs / "apar", 0.5)
    [*found] = build(find_runs([runs])).dominance["text_quality"]
    assert [(row.rival, row.at, row.ours, row.holds) for row in found] == [
        ("sot", "speed", "pasta-fast", True),
        ("sot", "quality", "pasta-fast", True),
        ("apar", "speed", "pasta-fast", False),
        ("apar", "quality", None, False),
    ]


def test_a_missing_annotation_is_counted_and_is_no_tie(runs: Path) -> None:
    annotate(runs / "sot", [2.0] * 8 + [None] * 3)  # and the twelfth is not there at all
    found = build(find_runs([runs])).lines[2].qualities["win_rate"]
    assert found.interval.value == pytest.approx(100)
    assert (found.rated, found.missing) == (8, 4)


def test_annotations_of_other_answers_are_refused(runs: Path) -> None:
    annotate(runs / "sot", [2.0], text="Something else.")
    with pytest.raises(PastaError, match=r"rated with another answer to 'What about 0.*/sot holds"):
        build(find_runs([runs]))


def test_ratings_of_other_answers_are_refused(runs: Path) -> None:
    rate(runs / "sot", 0.5)
    write_run(runs / "sot", "sot", [parallel(n, text="Something else.") for n in range(12)])
    with pytest.raises(PastaError, match=r"rated with another answer to 'What about 0.*/sot holds"):
        build(find_runs([runs]))


def test_ratings_against_another_baseline_are_refused(runs: Path) -> None:
    rate(runs / "sot", 0.5)
    other = [record(n, text=f"Other {n}.") for n in range(12)]
    write_run(runs / "sequential", "sequential", other)
    with pytest.raises(PastaError, match=r"another answer to 'What about 0.*/sequential holds"):
        build(find_runs([runs]))


def test_a_preference_out_of_range_is_refused(runs: Path) -> None:
    annotate(runs / "sot", [0.7])
    with pytest.raises(PastaError, match=r"the preference 0.7 is not in \[1, 2\]"):
        find_runs([runs])


def test_figures_of_different_judges_do_not_stand_side_by_side(runs: Path) -> None:
    rate(runs / "sot", 0.5)
    rate(runs / "apar", 0.5, by="another model")
    with pytest.raises(PastaError, match="was rated by"):
        build(find_runs([runs]))


def test_a_text_with_chunks_is_the_plain_text() -> None:
    from pasta_decoding.lang.tree import read, strip

    assert strip(read(CHUNKED)) == PLAIN
