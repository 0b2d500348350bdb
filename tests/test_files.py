"""What is written is there whole or not at all, and nothing is taken for a file that is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pasta_decoding.files import writable, write_text, written_whole


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with written_whole(link) as partial, written_whole(link) as other:
        assert partial != other, "two writers, of one process number, do not mix"
        other.write_text("other")
        partial.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_writer_left_goes_with_the_next_writer_of_the_target(
    kind: str, tmp_path: Path
) -> None:
    write = "partial.write_text('half')" if kind == "file" else "partial.mkdir()"
    writer = (
        "import os, signal, sys, pathlib\n"
        "from pasta_decoding.files import written_whole\n"
        "with written_whole(pathlib.Path(sys.argv[1])) as partial:\n"
        f"    {write}\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = tmp_path / "model [1].gguf"
    subprocess.run([sys.executable, "-c", writer, str(target)], check=False)
    other = tmp_path / ".else.0123456789ab.partial"
    other.mkdir()
    left = set(tmp_path.iterdir())
    assert len(left) == 2
    with written_whole(target) as held:
        held.write_text("older")
        write_text(target, "newer")
        assert held.exists(), "another writer holds it"
    assert target.read_text() == "older"
    assert set(tmp_path.iterdir()) == {target, other}


def test_what_is_written_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    synced: list[tuple[str, bool]] = []

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with written_whole(target) as partial:
        partial.mkdir()
        (partial / "weights").touch()
    assert synced == [("weights", False), ("target", False), (tmp_path.name, True)]


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="neither a file nor a folder"), written_whole(pipe):
        raise AssertionError("nothing is to be written")
    assert pipe.is_fifo()


def test_a_folder_has_to_have_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsADirectoryError), written_whole(Path()):
        raise AssertionError("nothing is to be written")


def test_a_cache_that_cannot_be_written_is_told_and_one_of_this_process_takes_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "file").touch()
    assert writable(file / "cache", "it").is_dir()
    assert caplog.messages == [f"it cannot be kept in {file / 'cache'}: Not a directory"]
