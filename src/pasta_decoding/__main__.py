"""`python -m pasta_decoding`: the command `pasta`, for launchers that take a module."""

from __future__ import annotations

from pasta_decoding.cli import run

run()
