"""One answer to be written."""

from dataclasses import dataclass, field

from pasta_decoding.answer.sampler import Sampler
from pasta_decoding.answer.settings import Priority, Rules


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be written. `sampler`: where its tokens come from."""

    prompt: tuple[int, ...]
    sampler: Sampler
    rules: Rules = field(default_factory=Rules)
    priority: Priority = Priority.normal
