"""What a user is told to type is right for how the package was installed."""

from __future__ import annotations

from pathlib import Path

from pasta_decoding.errors import install_command


def test_an_extra_is_installed_from_the_checkout_or_from_the_index(tmp_path: Path) -> None:
    module = tmp_path / "src" / "pasta_decoding" / "errors.py"
    assert install_command("llama", module) == 'pip install "pasta-decoding[llama]"'
    (tmp_path / "pyproject.toml").touch()
    assert install_command("llama", module) == f'pip install -e "{tmp_path}[llama]"'
