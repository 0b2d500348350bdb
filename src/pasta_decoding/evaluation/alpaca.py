"""An annotator that the package alpaca_eval configures, as a judge (extra `eval`)."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pasta_decoding.data.lines import append_line, read_lines
from pasta_decoding.errors import PastaError, install_command

# The package loses all that it was asked at once when a request fails for good, so it gets little.
_AT_ONCE = 8
_FIRST_PAUSE_S = 2.0
# What the package raises over a reply that is no completion.
_NONSENSE = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)
_WHERE = "The package takes key and address from OPENAI_API_KEY and OPENAI_BASE_URL."

Row = dict[str, str]
"""One pair as the package names it: output_2 is the answer that a preference of 2 is for."""


class AlpacaAnnotator:
    """Asks as one of the package's annotator configurations says, in the order that it draws.

    Every verdict is kept in a file, and what is there is not asked again.

    failures: why there was no verdict, and how often; these are asked again next time.
    """

    def __init__(
        self,
        config: str,
        cache: Path,
        *,
        retries: int,
        tick: Callable[[], None] = lambda: None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._config, self._cache = config, cache
        self._retries, self._tick, self._pause = retries, tick, pause
        self._annotator = _load(config)
        self._known = {
            line["key"]: float(line["preference"]) for line in read_lines(cache, resume=True)
        }

    def prefer(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]
    ) -> list[float | None]:
        """Return the preference for a over b, one for each prompt; None where there is no verdict.

        Raises PastaError where no question can succeed: a refused key, no such model, nobody there.
        """
        rows = [
            {"instruction": prompt, "output_1": other, "output_2": answer}
            for prompt, answer, other in zip(prompts, a, b, strict=True)
        ]
        todo = [row for row in rows if self._key(row) not in self._known]
        for _ in range(len(rows) - len(todo)):
            self._tick()
        for start in range(0, len(todo), _AT_ONCE):
            some = todo[start : start + _AT_ONCE]
            self._keep(some, self._ask(some))
        return [self._known.get(self._key(row)) for row in rows]

    def _ask(self, rows: list[Row]) -> list[Mapping[str, Any]]:
        """Ask about some pairs, again after growing pauses; return nothing if all tries failed."""
        import openai

        last: Exception | None = None
        for attempt in range(1 + self._retries):
            if attempt:
                self._pause(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                with _quiet():
                    found: list[Mapping[str, Any]] = self._annotator.annotate_pairs(rows)
            except (openai.AuthenticationError, openai.NotFoundError) as error:
                raise PastaError(f"{self._config}: {error}", hint=_WHERE) from error
            except (openai.OpenAIError, *_NONSENSE) as error:
                last = error
            else:
                return found
        reason = f"{type(last).__name__}: {str(last)[:80]}"
        if type(last) is openai.APIConnectionError:  # a time-out is one of another class
            raise PastaError(f"{self._config}: {reason}", hint=_WHERE) from last
        self.failures[reason] += len(rows)
        return []

    def _keep(self, rows: Sequence[Row], answers: Sequence[Mapping[str, Any]]) -> None:
        for answer in answers:
            preference = answer["preference"]
            if preference is None or not math.isfinite(preference):
                self.failures["a reply without a verdict"] += 1
                continue
            key = self._key(answer)
            self._known[key] = float(preference) - 1
            append_line(self._cache, {"key": key, "preference": self._known[key]})
        for _ in rows:
            self._tick()

    def _key(self, row: Mapping[str, Any]) -> str:
        asked = [self._config, *(row[name] for name in ("instruction", "output_1", "output_2"))]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]


def _load(config: str) -> Any:
    """Return the package's annotator. Raises PastaError without it or the configuration."""
    try:
        with _quiet():
            from alpaca_eval.annotators import PairwiseAnnotator
    except ImportError as error:
        message = "this annotator needs the package alpaca_eval"
        raise PastaError(message, hint=install_command("eval")) from error
    try:
        with _quiet():
            # Its own cache never asks again where a verdict was missing.
            return PairwiseAnnotator(
                annotators_config=config, caching_path=None, is_avoid_reannotations=False
            )
    except FileNotFoundError as error:
        hint = "Give the name of one in alpaca_eval/evaluators_configs, or a folder like those."
        raise PastaError(f"alpaca_eval has no annotator {config!r}", hint=hint) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the package from telling of every request, and of every failure with its traceback."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
