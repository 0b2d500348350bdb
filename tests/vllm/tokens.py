"""What vLLM has, in small: a tokenizer, and what it tells of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

from pasta_decoding.answer.guided import XARG, GuidedParams, write_params
from tests.answer.play import ID, TEXTS
from tests.law.world import CONTROL, END


class Direction(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass
class Tokenizer:
    """The vocabulary of `tests.answer.play`, as a tokenizer. `spare`: what is reserved there."""

    spare: frozenset[int] = CONTROL.ids
    eos_token_id: int = END

    def __len__(self) -> int:
        return len(TEXTS)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002
        return [ID[text]]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:  # noqa: ARG002
        return "".join(TEXTS[token] for token in ids)

    def batch_decode(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool
    ) -> list[str]:
        return [self.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<unused{token}>" if token in self.spare else TEXTS[token] or f"<special{token}>"


def params(guide: GuidedParams | None, temperature: float = 0.0) -> Any:
    """A request's sampling parameters, as far as a processor looks at them."""
    extra_args = None if guide is None else {XARG: write_params(guide)}
    return SimpleNamespace(extra_args=extra_args, temperature=temperature)


def change(removed: Any = (), added: Any = (), moved: Any = ()) -> Any:
    return SimpleNamespace(removed=removed, added=added, moved=moved)
