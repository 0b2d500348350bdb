"""What a judge is, and what it is asked.

- preference: probability in [0, 1] that answer a is better than answer b; 0.5 is a tie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """Two answers to one prompt, and how somebody judged them.

    source:     whose judgement it is; figures are kept apart by it.
    preference: that of the somebody, see above.
    """

    source: str
    prompt: str
    a: str
    b: str
    preference: float


class Judge(Protocol):
    """Compares pairs of answers. The order of the two must not matter.

    So `prefer(p, b, a)` is one minus `prefer(p, a, b)`: by construction, or because the judge is
    really asked in both orders.
    """

    def prefer(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]
    ) -> list[float | None]:
        """Return the preference for a over b, one for each prompt; None where there is no verdict.

        A missing verdict is no tie: whoever asks must count it. Raises PastaError if the judge
        cannot be asked at all.
        """
        ...


def fingerprint(prompt: str) -> str:
    """Return twelve hexadecimal digits that stand for a prompt; case and spacing do not count."""
    plain = " ".join(prompt.casefold().split())
    return hashlib.sha256(plain.encode("utf-8", "replace")).hexdigest()[:12]
