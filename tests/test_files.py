"""What is written is there whole or not at all, and nothing is taken for a file that is none."""

import os
from pathlib import Path

import pytest

from pasta_decoding.files import writable, written_whole


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
