"""Compiled code on disk: whole, ours and made for this machine, or a sentence says why not."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pasta_decoding.engines.compile_cache import Origin, find, is_there, make, this_origin
from pasta_decoding.errors import PastaError
from tests.cli.conftest import interrupted

HERE = Origin(format=1, torch="2.13.0", processor="Intel Xeon 1234", threads=2)
CODE = b"not really code"


def write(target: Path, _scratch: Path) -> None:
    target.write_bytes(CODE)


def make_here(
    folder: Path,
    compile_to: Callable[[Path, Path], None] = write,
    origin: Origin = HERE,
    tell: Callable[[str], None] = print,
) -> Path:
    return make(folder, "tiny", origin, compile_to, tell=tell)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "compiled"


def complaint(folder: Path, origin: Origin = HERE) -> str:
    with pytest.raises(PastaError) as error:
        find(folder, "tiny", origin)
    assert "\n" not in str(error.value)
    assert error.value.hint
    return str(error.value)


def test_what_was_made_is_found_and_not_made_again(folder: Path) -> None:
    assert complaint(folder) == "tiny is not compiled yet"
    assert not is_there(folder, "tiny")
    made = make_here(folder)
    assert find(folder, "tiny", HERE) == made
    assert make_here(folder, interrupted) == made
    assert made.read_bytes() == CODE
    assert made.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("here", "what"),
    [
        (replace(HERE, torch="2.14.0"), "another torch (2.13.0; here: 2.14.0)"),
        (replace(HERE, processor="AMD"), "another processor (Intel Xeon 1234; here: AMD)"),
        (replace(HERE, threads=4), "another threads (2; here: 4)"),
        (replace(HERE, format=2), "another format (1; here: 2)"),
    ],
)
def test_what_was_made_for_another_machine_is_refused_and_replaced(
    folder: Path, here: Origin, what: str
) -> None:
    make_here(folder)
    assert complaint(folder, here).endswith(what)

    def write_other(target: Path, _scratch: Path) -> None:
        target.write_bytes(b"other")

    made = make_here(folder, write_other, here)
    assert find(folder, "tiny", here) == made
    assert [path.read_bytes() for path in folder.glob("*.pt2")] == [b"other"]


def test_tampered_code_is_refused(folder: Path) -> None:
    made = make_here(folder)
    made.write_bytes(CODE + b"!")
    assert complaint(folder) == "the compiled model tiny was changed on disk"


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "{",
        "[]",
        '{"file": 3}',
        '{"file": "tiny.pt2"}',
        "{}",
        '{"file": "tiny.pt2", "sha256": "0", "origin": ["x"]}',
    ],
)
def test_a_damaged_manifest_is_refused(folder: Path, manifest: str) -> None:
    make_here(folder)
    (folder / "tiny.json").write_text(manifest)
    assert complaint(folder) == "the compiled model tiny is damaged"


def test_a_manifest_names_no_file_elsewhere(folder: Path, tmp_path: Path) -> None:
    make_here(folder)
    elsewhere = tmp_path / "elsewhere.pt2"
    elsewhere.write_bytes(CODE)
    manifest = json.loads((folder / "tiny.json").read_text())
    (folder / "tiny.json").write_text(json.dumps(manifest | {"file": str(elsewhere)}))
    assert complaint(folder) == "the compiled model tiny is damaged"


def test_a_missing_file_is_refused(folder: Path) -> None:
    make_here(folder).unlink()
    assert complaint(folder) == "the compiled model tiny is damaged"


@pytest.mark.parametrize("which", ["", "tiny.json", "code"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_what_others_may_write_is_refused(folder: Path, which: str, mode: int) -> None:
    made = make_here(folder)
    path = made if which == "code" else folder / which
    path.chmod(mode)
    assert complaint(folder) == (
        f"{path} may be written by others, so no compiled code is loaded from there"
    )


def test_nothing_is_made_where_others_may_write(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PastaError, match="may be written by others"):
        make_here(folder)


def test_ctrl_c_leaves_nothing_half_made(folder: Path) -> None:
    def half(target: Path, _scratch: Path) -> None:
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_here(folder, half)
    assert [path.name for path in folder.iterdir()] == ["tiny.lock"]
    assert complaint(folder) == "tiny is not compiled yet"


def test_a_full_disk_is_told_and_leaves_what_was_there(folder: Path) -> None:
    make_here(folder)
    there = sorted(folder.iterdir())

    def full(_target: Path, _scratch: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(PastaError, match=r"cannot write .* No space left") as error:
        make_here(folder, full, replace(HERE, torch="2.14.0"))
    assert "PASTA_CACHE" in error.value.hint
    assert sorted(folder.iterdir()) == there


def test_what_a_killed_process_left_is_cleared_away(folder: Path) -> None:
    left = folder / ".tiny-abc"
    left.mkdir(parents=True)
    (left / "model.pt2").write_bytes(b"half")
    folder.chmod(0o700)
    make_here(folder)
    assert not left.exists()


def test_two_that_compile_at_once_make_it_once(folder: Path) -> None:
    began, go_on = threading.Event(), threading.Event()
    told: list[str] = []

    def slowly(target: Path, scratch: Path) -> None:
        began.set()
        assert go_on.wait(120)
        write(target, scratch)

    def tell(line: str) -> None:
        told.append(line)
        go_on.set()

    first = threading.Thread(target=make_here, args=(folder, slowly))
    first.start()
    assert began.wait(120)
    second = make_here(folder, interrupted, tell=tell)
    first.join()
    assert second.read_bytes() == CODE
    assert told == ["another process is compiling the same: waiting for it"]


def test_this_machine_is_told_the_same_twice() -> None:
    assert this_origin(1) == this_origin(1) != this_origin(2)
