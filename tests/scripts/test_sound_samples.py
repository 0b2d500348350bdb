"""Sampled answers become what is asked by one mend of their form, or stay out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pasta_decoding.data.asked import Asked, read_all_asked
from pasta_decoding.data.checks import KINDS, make_check
from pasta_decoding.lang.tree import read, show
from scripts.sound_samples import MENDS, main, mended, rows_of

FIRST, SECOND, THIRD = "Bees make honey.", "They gather nectar!", "It dries in the comb."
PROSE = f"{FIRST} {SECOND} {THIRD}"
LONG = (
    f"{PROSE} A colony holds some thirty thousand workers in June, one queen, and, until autumn, "
    "a few hundred drones that do no work at all."
)
LISTED = "- Bread\n- Cheese"
CHUNKS = (
    'Two things:\n- <promise topic="bread" tokens="10"/><async>Bread is baked.</async>\n'
    '- <promise topic="cheese" tokens="10"/><async>Cheese is aged.</async>'
)


def asked(*checks: tuple[str, dict[str, Any]], instruction: str = "Explain bees.") -> Asked:
    return Asked("q", "q", instruction, tuple(make_check(*check) for check in checks))


def mend(one: Asked, text: str) -> str | None:
    tree = mended(one, read(text))
    return None if tree is None else show(tree)


@pytest.mark.parametrize(
    ("kind", "arguments", "text", "wanted"),
    [
        ("ends", {"string": "The end."}, PROSE, PROSE + " The end."),
        ("ends", {"string": "The end."}, LISTED, LISTED + "\n\nThe end."),
        ("ends", {"string": "The end."}, CHUNKS, CHUNKS + "\n\nThe end."),
        ("sentences", {"at_least": 2, "at_most": 2}, PROSE, f"{FIRST} {SECOND}"),
        ("sentences", {"at_least": 4, "at_most": 4}, PROSE, None),
        ("words", {"at_most": 5}, PROSE, "Bees make honey."),
        ("words", {"at_least": 50}, PROSE, None),
        ("words", {"at_most": 1}, LISTED, None),
        ("paragraphs", {"at_least": 2, "at_most": 2}, PROSE, f"{FIRST} {SECOND}\n\n{THIRD}"),
        ("paragraphs", {"at_least": 4, "at_most": 4}, PROSE, None),
        ("excludes", {"strings": ["honey"]}, PROSE, f"{SECOND} {THIRD}"),
        ("excludes", {"strings": ["nectar", "comb"]}, PROSE, None),
        ("one_of", {"strings": ["yes", "no"]}, "No, bees make honey.", "No"),
        ("one_of", {"strings": ["yes", "no"]}, "Bees do. No.", None),
        ("json", {"keys": ["bee"]}, 'Here: {"bee": 1}', '{"bee": 1}'),
        ("json", {"keys": ["bee"]}, "Here: {bee}", None),
        ("sentences", {"at_most": 1}, f'"{FIRST}" {SECOND}', f'"{FIRST}"'),
        ("without", {"characters": "!"}, PROSE, PROSE.replace("!", ".")),
        ("without", {"characters": ","}, "Bees, wasps", None),
        ("quoted", {}, "Hum.\n", '"Hum."'),
        ("upper", {}, PROSE, PROSE.upper()),
        ("lower", {}, PROSE, PROSE.lower()),
        ("titled", {}, LONG, "# Bees\n\n" + LONG),
        ("titled", {}, PROSE, None),
        ("bullets", {"at_least": 3}, LISTED, None),
    ],
)
def test_an_answer_is_mended_where_one_mend_is_enough(
    kind: str, arguments: dict[str, Any], text: str, wanted: str | None
) -> None:
    assert mend(asked((kind, arguments)), text) == wanted


def test_all_mends_are_of_kinds_that_there_are() -> None:
    assert MENDS.keys() <= KINDS.keys()


def test_what_an_answer_with_chunks_promises_stays_true() -> None:
    assert mend(asked(("upper", {})), CHUNKS) is None
    assert mend(asked(("words", {"at_most": 3})), CHUNKS) is None


def test_the_other_demands_must_be_met_too() -> None:
    last = ("ends", {"string": "Hum."})
    assert mend(asked(last, ("excludes", {"strings": ["wasps"]})), PROSE) == PROSE + " Hum."
    assert mend(asked(last, ("excludes", {"strings": ["bees"]})), PROSE) is None
    assert mend(asked(last), "") is None


def test_a_title_is_what_the_prompt_is_about() -> None:
    one = asked(
        ("titled", {}), instruction="Write a story about the last tree in a city. Title it."
    )
    assert mend(one, LONG) == f"# Last Tree In A City\n\n{LONG}"


def test_the_fastest_sound_answers_come_first_and_mended_ones_fill_up() -> None:
    hums = asked(("ends", {"string": "Hum."}))
    sample = {"truncated": False, "plain_tokens": 20, "critical_path": 20}
    samples = [
        sample | {"number": 0, "annotated": PROSE},
        sample | {"number": 1, "annotated": f"{FIRST} Hum.", "truncated": True},
        sample | {"number": 2, "annotated": f"{FIRST} Hum."},
        sample | {"number": 3, "annotated": f"{CHUNKS} Hum.", "critical_path": 10},
        sample | {"number": 4, "annotated": f"{SECOND} Hum. " * 9 + "Hum."},
        sample | {"number": 5, "annotated": f"Bread is baked. {CHUNKS} Hum."},
    ]
    mended_one = ("q-0", "samples/mended", f"{PROSE} Hum.")
    slow = ("q-2", "samples/sound", f"{FIRST} Hum.")
    fast = ("q-3", "samples/sound", f"{CHUNKS} Hum.")
    for left_out, wanted in (
        (None, [fast, slow]),
        (3, [slow, mended_one]),
        (2, [fast, mended_one]),
    ):
        rows = rows_of(hums, [one for one in samples if one["number"] != left_out])
        assert [(row.id, row.source, row.response) for row in rows] == wanted


def test_the_script_reads_a_run_and_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "asked.jsonl", tmp_path / "sound.jsonl"
    checks = [{"kind": "ends", "arguments": {"string": "Hum."}}]
    prompts.write_text(json.dumps({"instruction": "Bees?", "checks": checks}) + "\n")
    (one,) = read_all_asked(prompts)
    sample = {
        "prompt": one.id, "number": 0, "annotated": PROSE,
        "truncated": False, "plain_tokens": 9, "critical_path": 9,
    }  # fmt: skip
    (tmp_path / "round-1").mkdir()
    (tmp_path / "round-1/samples.jsonl").write_text(json.dumps(sample) + "\n")
    command = ["sound_samples", str(tmp_path), "--prompts", str(prompts), "-o", str(out)]
    monkeypatch.setattr("sys.argv", command)
    main()
    assert json.loads(capsys.readouterr().out) == {"samples/mended": 1}
    assert json.loads(out.read_text())["response"] == f"{PROSE} Hum."

    out.unlink()
    (tmp_path / "round-1/samples.jsonl").write_text("")
    with pytest.raises(SystemExit, match="is sound or can be mended"):
        main()
    assert not out.exists()
