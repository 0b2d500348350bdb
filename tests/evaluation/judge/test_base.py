"""When two prompts are the same one."""

from __future__ import annotations

from pasta_decoding.evaluation.judge.base import fingerprint


def test_case_and_spacing_do_not_make_another_prompt() -> None:
    assert (
        fingerprint(" What  is\nit? ") == fingerprint("what is it?") != fingerprint("what was it?")
    )
