"""`pasta lint`: exit status and exact output, also when something is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome, Pasta

GOOD = 'One: <promise topic="a" tokens="20"/><async>b</async>\n'
BAD = "One\n<async>b</async> <sync/>\n"


def test_it_names_file_line_column_and_rule(tmp_path: Path, pasta: Pasta) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text('<promise tokens="20"/><async>b</async>')
    assert pasta("lint", good).status == 1
    assert pasta("lint", good, "--no-topic").status == 0
    good.write_text(GOOD)
    bad.write_text(BAD)
    assert pasta("lint", good, good) == Outcome(0, "", "")
    found = pasta("lint", good, bad)
    assert found.status == 1
    assert found.out == (
        f"{bad}:2:1: async-without-promise: <async> keeps no promise\n"
        f"{bad}:2:9: stray-close: </async> closes nothing\n"
        f"{bad}:2:18: idle-sync: <sync/> with no chunk to wait for\n"
    )


def test_it_reads_rows_and_names_the_line_and_the_column_in_the_response(
    tmp_path: Path, pasta: Pasta
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    turns = [{"role": "user", "content": "i"}, {"role": "assistant", "content": BAD}]
    lines = [
        json.dumps({"id": "1", "instruction": "i", "response": GOOD}),
        "{",
        json.dumps({"messages": turns}),
        '{"id": "4"}',
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    found = pasta("lint", path)
    assert (found.status, found.err) == (1, "")
    assert found.out == (
        f"{path}:2: not JSON: Expecting property name enclosed in double quotes (column 2)\n"
        f"{path}:3:5: async-without-promise: <async> keeps no promise\n"
        f"{path}:3:13: stray-close: </async> closes nothing\n"
        f"{path}:3:22: idle-sync: <sync/> with no chunk to wait for\n"
        f"{path}:4: no 'instruction'\n"
    )


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("missing.txt", None, "{path}: No such file or directory"),
        ("latin.txt", "café".encode("latin-1"), "{path}: byte 3 is not UTF-8"),
        ("rows.jsonl.gz", b"plain", "cannot read {path}: Not a gzipped file"),
        ("", None, "{path}: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    name: str, contents: bytes | None, said: str, tmp_path: Path, pasta: Pasta
) -> None:
    path = tmp_path / name
    if contents is not None:
        path.write_bytes(contents)
    found = pasta("lint", path)
    assert (found.status, found.out) == (2, "")
    assert found.err.startswith(f"pasta: {said.format(path=path)}")
