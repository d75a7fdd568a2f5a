"""Maps numbers of a token to one of a few shades: class names of the style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp, isfinite
from typing import TypeGuard

from attrs import frozen

MODES = ("mask", "probability", "difference", "advantage", "version")
"""Quantities by which tokens can be coloured."""

STEPS = 4
"""Number of shades on each side of 0."""


@frozen(kw_only=True)
class Token:
    """One token of an answer; None where the run did not store or compute a number."""

    text: str
    id: int
    sampled: bool
    version: int | None = None
    logprob: float | None = None
    """Log-probability under the engine, in nats."""

    learner: float | None = None
    """Log-probability under the learner, before the update, in nats."""

    advantage: float | None = None

    @property
    def difference(self) -> float | None:
        """Log-probability under the learner minus log-probability under the engine, in nats."""
        return None if self.learner is None or self.logprob is None else self.learner - self.logprob

    @property
    def title(self) -> str:
        """All numbers of the token, as a tooltip."""
        if not self.sampled:
            return f"id {self.id}, not sampled"
        numbers = {
            "log-probability": self.logprob,
            "learner": self.learner,
            "difference": self.difference,
            "advantage": self.advantage,
        }
        known = [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
        return ", ".join([f"id {self.id}", *known, *([] if self.version is None else [f"weights {self.version}"])])


def shades(tokens: Sequence[Token], mode: str) -> list[str]:
    """A class for each token: `m` not sampled, `s` sampled, `u` unknown, `p0` to `p9` probability in tenths, `v0` to
    `v5` version of the weights; for signed values `n4` to `n1`, `z` for 0, and `a1` to `a4`.

    Differences are scaled to one nat, advantages to the largest of the tokens given.
    """
    largest = max((abs(token.advantage) for token in tokens if _is_finite(token.advantage)), default=0.0)
    versions = sorted({token.version for token in tokens if token.sampled and token.version is not None})
    return [_shade(token, mode, largest, versions) for token in tokens]


def _shade(token: Token, mode: str, largest: float, versions: Sequence[int]) -> str:
    if not token.sampled:
        return "m"
    match mode:
        case "probability" if _is_finite(token.logprob):
            return f"p{min(int(exp(min(token.logprob, 0.0)) * 10), 9)}"
        case "difference" if _is_finite(token.difference):
            return signed(token.difference)
        case "advantage" if _is_finite(token.advantage):
            return signed(token.advantage / largest if largest else 0.0)
        case "version" if token.version is not None:
            return f"v{versions.index(token.version) % 6}"
    return "s" if mode == "mask" else "u"


def signed(value: float) -> str:
    """The shade of a number between -1 and 1; numbers beyond get the strongest shade."""
    step = min(ceil(abs(value) * STEPS), STEPS)
    return f"{'a' if value > 0 else 'n'}{step}" if step else "z"


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and isfinite(value)
