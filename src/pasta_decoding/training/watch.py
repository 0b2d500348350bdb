"""Watches a round of stage 2 while it trains, and stops it when it unlearns something.

Every 4 steps it writes a line of `watch.jsonl`:

    ratio_best   mean ln p - ln q of the best answers since the last line, in nats
    end, sync    mean ln p of these labels on rows of stage 1, in nats

A round stops when `ratio_best` is below 0 twice in a row, or when `end` or `sync` has fallen by 0.3
since its beginning. If the best answers have hardly risen after 16 steps, the learning rate is
doubled once.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pasta_decoding.data.lines import append_line, read_lines, write_lines
from pasta_decoding.lang.layout import Layout
from pasta_decoding.training.loop import Meter, share_of
from pasta_decoding.training.pairs import labels_of
from pasta_decoding.training.view import LossParts, label_logprobs

log = logging.getLogger(__name__)

INTERVAL_STEPS = 4
WATCHED_ROWS = 60
LARGEST_FALL = 0.3
"""Nats that ln p of `end` or `sync` may fall."""
SLOW_AFTER_STEPS = 16
SLOW_RATIO = 0.2
"""Nats. Best answers that have risen by less are learned too slowly."""


@dataclass
class Watch:
    """The watch of one round.

    rows:   layouts of stage 1 whose endings and syncs are measured; at most `WATCHED_ROWS`.
    end:    the label that ends an answer.
    bf16:   whether the forward runs as in training.
    """

    path: Path
    rows: Sequence[Layout]
    end: int
    sync: int
    bf16: bool
    stop_reason: str | None = None
    _meter: Meter = field(default_factory=Meter)

    def begin(self, model: Any, step: int) -> None:
        """Measure before the first step, or drop the lines after the step that a run resumes."""
        lines = [line for line in read_lines(self.path) if line["step"] <= step]
        if lines:
            write_lines(self.path, lines)
        else:
            self._write({"step": 0, **self._label_means(model)})

    def record(self, parts: LossParts) -> None:
        """Take the parts of one pair's loss."""
        if "ratio_best" in parts:
            self._meter.add({"ratio_best": parts["ratio_best"]})

    def check(self, model: Any, step: int) -> None:
        """Write a line if it is time, and set `stop_reason` if the round should stop.

        All processes call it together.
        """
        if step % INTERVAL_STEPS:
            return
        ratios = self._meter.read(model.device)
        self._write({"step": step, **ratios, **self._label_means(model)})
        self.stop_reason = reason_to_stop(read_lines(self.path))

    def is_slow(self, step: int) -> bool:
        """Have the best answers risen too little by `step`?"""
        last_line = read_lines(self.path)[-1]
        return step == SLOW_AFTER_STEPS and last_line.get("ratio_best", SLOW_RATIO) < SLOW_RATIO

    def _label_means(self, model: Any) -> dict[str, float]:
        """Return the mean log-probability of `end` and `sync` on the watched rows."""
        was_training = model.training
        model.eval()
        meter = Meter()
        device = model.device.type
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=self.bf16):
            for layout in share_of(self.rows[:WATCHED_ROWS]):
                [logprobs_L] = label_logprobs(model, [layout])
                labels_L = torch.tensor(labels_of(layout), device=logprobs_L.device)
                parts = {"end": logprobs_L[labels_L == self.end]}
                parts["sync"] = logprobs_L[labels_L == self.sync]
                meter.add(parts)
        model.train(was_training)
        return meter.read(model.device)

    def _write(self, line: dict[str, float]) -> None:
        measures = [f"{name} {value:.3f}" for name, value in line.items() if name != "step"]
        log.info("watched at step %d: %s", line["step"], ", ".join(measures))
        append_line(self.path, line)


def reason_to_stop(lines: Sequence[dict[str, float]]) -> str | None:
    """Return why a round with these lines should stop; None if it should go on."""
    ratios = [line["ratio_best"] for line in lines if "ratio_best" in line]
    if len(ratios) > 1 and max(ratios[-2:]) < 0:
        return f"the best answers fell twice in a row, to {ratios[-1]:.2f} nats"
    first = lines[0]
    last = lines[-1]
    for name in ("end", "sync"):
        fall = first.get(name, 0.0) - last.get(name, 0.0)
        if fall > LARGEST_FALL:
            return f"ln p of `{name}` fell by {fall:.2f} nats"
    return None
