"""What a user's mistake raises. Anything else that escapes is a bug of ours."""

from __future__ import annotations


class PastaError(Exception):
    """Something the user can mend: what is wrong and where, and in `hint` what to do next."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
