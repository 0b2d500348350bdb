"""What each round did: greedy answers to prompts that are not trained on, and a plot of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pasta_decoding.data.asked import Asked
from pasta_decoding.data.lines import read_lines, write_text
from pasta_decoding.training.preference_run import PreferenceRun
from pasta_decoding.training.rounds import describe_parts, plot_rounds


class Checker:
    """Greedy answers to the check prompts after each round, and what they show."""

    def __init__(self, run: PreferenceRun, prompts: Sequence[Asked]) -> None:
        self._run = run
        self._prompts = prompts
        self.points: list[dict[str, Any]] = []

    def check(self, number: int, policy: Path) -> None:
        """Answer the check prompts with the policy that round `number` ended with."""
        if self._prompts:
            figures = self._figures(number, policy, f"round-{number}/check", parallel=True)
            self.points.append({"round": number, **figures, **self._spent_until(number)})

    def report(self) -> None:
        """Write the figures of all rounds beside the baseline's, and the plot."""
        if self._prompts:
            out = self._run.around.out
            baseline = Path(self._run.config.baseline)
            figures = self._figures(0, baseline, "check_baseline", parallel=False)
            found = {"baseline": figures, "rounds": self.points}
            write_text(out / "rounds.json", json.dumps(found, indent=2) + "\n")
            plot_rounds(self.points, out / "rounds.png")

    def _figures(
        self, number: int, adapter: Path, name: str, *, parallel: bool
    ) -> dict[str, float | None]:
        run = self._run
        sampler = replace(run.sampler("check", 1, parallel=parallel), temperature=0.0)
        with run.spending(number, f"{Path(name).name}_answers") as spent:
            answers = run.sample(adapter, self._prompts, sampler, f"{name}.jsonl")
            spent["tokens"] = sum(answer.fed_tokens for answer in answers)
        load_quality = run.around.load_quality
        parts = run.measure(number, self._prompts, answers, f"{name}_parts.jsonl", load_quality)
        return describe_parts(parts)

    def _spent_until(self, number: int) -> dict[str, float]:
        """Return what all stages but the checks took up to the end of a round."""
        past = [
            line
            for line in read_lines(self._run.around.out / "spent.jsonl")
            if line["round"] <= number and not line["stage"].startswith("check")
        ]
        return {name: sum(line[name] for line in past) for name in ("seconds", "tokens")}
