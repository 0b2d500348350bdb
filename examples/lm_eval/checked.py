"""How many answers do all that their prompt asks for, as far as a program can tell."""

from __future__ import annotations

from typing import Any

from pasta_decoding.data.checks import make_check


def score(asked: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Return 1 for an answer that passes every check of its prompt, else 0."""
    passed = [_check(one).passes(answers[0]) for one in asked["checks"]]
    return {"all_checks": float(all(passed))}


def _check(written: dict[str, Any]) -> Any:
    """Return a check as its prompt has it, without the empty columns of the others."""
    arguments = written.get("arguments") or {}
    said = {name: value for name, value in arguments.items() if value is not None}
    return make_check(written["kind"], said)
