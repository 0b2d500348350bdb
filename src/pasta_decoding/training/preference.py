"""Stage 2: preference training on sampled answers, in rounds of sample, score, pair and train.

The run folder keeps everything, and every stage goes on from what is there:

    config.json  prompts.jsonl  spent.jsonl   settings, prompts, seconds and tokens of each stage
    baseline.jsonl                            the sequential baseline's answers
    round-N/samples.jsonl                     answers with token ids and seeds, line by line
    round-N/parts.jsonl                       what their scores are made of, prompt by prompt
    round-N/scores.jsonl  pairs.jsonl  worst_repeats.jsonl  summary.json
    round-N/reference.jsonl                   log-probabilities before training
    round-N/train/  round-N/adapter/          checkpoints and metrics; the round's result
    adapter/                                  the last round's result

Only scores, pairs and what follows depend on lambda, so runs that differ in it can share the
rest: `share_samples`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pasta_decoding.data.asked import Asked
from pasta_decoding.files import copy_whole
from pasta_decoding.training.config import PreferenceConfig
from pasta_decoding.training.preference_run import PreferenceRun, Surroundings
from pasta_decoding.training.run import begin_run, disk_errors, find_run
from pasta_decoding.training.scoring import baseline_tokens
from pasta_decoding.training.settings import keep_prompts, refuse_misfits


def train_preference(
    config: PreferenceConfig,
    prompts: Sequence[Asked],
    around: Surroundings,
) -> dict[str, Any]:
    """Run all rounds, resuming what is in the run folder; return where the adapter is, and figures.

    Raises PastaError for another run's folder, adapters that do not fit, or nothing to learn from.
    """
    find_run(around.out, config)
    refuse_misfits(config)
    with disk_errors(around.out):
        begin_run(around.out, config)
        run = PreferenceRun(config, around, keep_prompts(around.out, prompts))
        baseline = baseline_tokens(run.baseline_answers())
        policy = Path(config.policy)
        for number in range(1, config.rounds + 1):
            policy = run.round(number, policy, baseline)
        copy_whole(policy, around.out / "adapter")
        return run.result()
