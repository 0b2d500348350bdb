"""A judge that needs no model: logistic regression on the difference of two answers' features.

P(a better than b) = sigmoid(u(a) - u(b)), u(x) = slope * (features(x) . weights + length terms):
antisymmetric and transitive by construction (Bradley and Terry 1952). There are two of them:

- the whole judge: the length terms say how much length by itself is worth.
- the judge at equal length: what length explains is taken out of every feature, and length by
  itself is worth nothing. This one cannot be pleased by longer or shorter answers, as in
  length-controlled AlpacaEval, and is the one that may drive training.

Shapes: P pairs, A answers, F features, K terms of length.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pasta_decoding.errors import PastaError
from pasta_decoding.eval.judge.base import fingerprint, sigmoid
from pasta_decoding.eval.judge.features import FEATURES, features

Array = NDArray[np.float64]

FORMAT = "pasta-judge-1"
# Knots of the piecewise linear length terms, in log characters: 50, 150, 400, 800 and 1800.
_LENGTH_KNOTS = (3.9, 5.0, 6.0, 6.7, 7.5)


@dataclass(frozen=True, slots=True)
class LocalJudge:
    """The fitted numbers; `prefer` is all that it does with them.

    weights_F, low_F, high_F: a feature is clipped to [low, high] and multiplied.
    length_K, equal_length_K: weights of the length terms, of the whole judge and of the one at
                              equal length, which takes out what length explains.
    slope:                    calibration, fitted on prompts that the weights had not seen.
    trained_on:               pairs of each source.
    prompts:                  fingerprints of the prompts that it was fitted on.
    at_equal_length:          which of the two this is.
    """

    weights_F: tuple[float, ...]
    low_F: tuple[float, ...]
    high_F: tuple[float, ...]
    length_K: tuple[float, ...]
    equal_length_K: tuple[float, ...]
    slope: float
    ridge: float
    trained_on: dict[str, int]
    prompts: frozenset[str] = field(repr=False)
    at_equal_length: bool = False

    def prefer(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]
    ) -> list[float | None]:
        """Return the preferences; there always is a verdict, 0.5 on two equal answers."""
        asked = list(dict.fromkeys([*zip(prompts, a, strict=True), *zip(prompts, b, strict=True)]))
        utility = dict(zip(asked, self.utilities(*measured(asked)), strict=True))
        margins = [utility[p, x] - utility[p, y] for p, x, y in zip(prompts, a, b, strict=True)]
        return [sigmoid(margin) for margin in margins]

    def utilities(self, features_AF: Array, length_A: Array) -> Array:
        """Return utility_A in logits; only differences on one prompt mean anything."""
        kept_AF = np.clip(features_AF, self.low_F, self.high_F)
        terms_AK = length_terms(length_A)
        length_K = self.equal_length_K if self.at_equal_length else self.length_K
        return self.slope * (kept_AF @ self.weights_F + terms_AK @ length_K)

    def equal_length(self) -> LocalJudge:
        """Return the judge that compares answers as if they were equally long."""
        return replace(self, at_equal_length=True)

    def has_seen(self, prompt: str) -> bool:
        """Was it fitted on this prompt?"""
        return fingerprint(prompt) in self.prompts


def measured(answers: Iterable[tuple[str, str]]) -> tuple[Array, Array]:
    """Return features_AF and length_A (log characters) of (prompt, answer)."""
    rows, lengths = [], []
    for prompt, answer in answers:
        rows.append(list(features(prompt, answer).values()))
        lengths.append(np.log1p(len(answer.strip())))
    return np.array(rows).reshape(-1, len(FEATURES)), np.array(lengths)


def length_terms(length_A: Array) -> Array:
    """Return terms_AK: the length itself and what of it lies above each knot."""
    above = [np.maximum(0.0, length_A - knot) for knot in _LENGTH_KNOTS]
    return np.stack([length_A, *above], axis=1)


def save_judge(path: Path, judge: LocalJudge) -> None:
    """Write the judge as JSON; until it is written `path` is untouched."""
    numbers = asdict(judge) | {"prompts": sorted(judge.prompts)}
    del numbers["at_equal_length"]  # both of them are in the file
    found = {"format": FORMAT, "features": FEATURES, "length_knots": _LENGTH_KNOTS} | numbers
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_judge(path: Path) -> LocalJudge:
    """Read a judge. Raises PastaError if the file is none, or one of another version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PastaError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _unfit(path, "not JSON") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _unfit(path, f"not a judge of the format {FORMAT}")
    made = (found.pop("features", None), found.pop("length_knots", None))
    if made != (list(FEATURES), list(_LENGTH_KNOTS)):
        raise _unfit(path, "it looks at other features than this version")
    del found["format"]
    return _checked(path, found)


def _checked(path: Path, found: dict[str, object]) -> LocalJudge:
    expected = {one.name for one in fields(LocalJudge)} - {"at_equal_length"}
    if set(found) != expected:
        wrong = ", ".join(sorted(set(found) ^ expected))
        raise _unfit(path, f"missing or unknown: {wrong}")
    trained_on, prompts = found["trained_on"], found["prompts"]
    counted = isinstance(trained_on, dict) and all(map(_is_count, trained_on.values()))
    if not (isinstance(trained_on, dict) and counted and isinstance(prompts, list)):
        raise _unfit(path, "what it was trained on is missing")

    def numbers(name: str, size: int) -> tuple[float, ...]:
        return _numbers(path, name, found[name], size)

    return LocalJudge(
        weights_F=numbers("weights_F", len(FEATURES)),
        low_F=numbers("low_F", len(FEATURES)),
        high_F=numbers("high_F", len(FEATURES)),
        length_K=numbers("length_K", 1 + len(_LENGTH_KNOTS)),
        equal_length_K=numbers("equal_length_K", 1 + len(_LENGTH_KNOTS)),
        slope=_numbers(path, "slope", [found["slope"]], 1)[0],
        ridge=_numbers(path, "ridge", [found["ridge"]], 1)[0],
        trained_on=trained_on,
        prompts=frozenset(map(str, prompts)),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int)


def _numbers(path: Path, name: str, value: object, size: int) -> tuple[float, ...]:
    if isinstance(value, list) and len(value) == size:
        with suppress(TypeError, ValueError):
            numbers = tuple(float(one) for one in value)
            if all(map(math.isfinite, numbers)):
                return numbers
    raise _unfit(path, f"{name!r} is not {size} finite numbers")


def _unfit(path: Path, reason: str) -> PastaError:
    return PastaError(f"{path}: {reason}", hint="Make a judge with `pasta judge train`.")
