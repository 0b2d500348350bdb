"""What ends a run that has left the numbers, before it can spoil a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pasta_decoding.errors import PastaError
from pasta_decoding.training.metrics import Meter


class FiniteGuard(TrainerCallback):
    """Raises PastaError where a loss, or a weight that is about to be saved, is not a number.

    begin_again: says what to do then.
    """

    def __init__(self, meter: Meter, begin_again: Callable[[], str]) -> None:
        self._meter = meter
        self._begin_again = begin_again

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,  # noqa: ARG002 (the Trainer's signature)
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Look at the losses whose gradients are about to move the weights."""
        if not self._meter.finite:
            raise self._error(f"the loss is not a number at step {state.global_step + 1}")

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Look at the weights themselves where they are to be saved: gradients overflow, too."""
        trained = (one for one in kwargs["model"].parameters() if one.requires_grad)
        if control.should_save and not all(bool(one.isfinite().all()) for one in trained):
            raise self._error(f"weights are no longer numbers after step {state.global_step}")

    def _error(self, message: str) -> PastaError:
        return PastaError(message, hint=self._begin_again())
