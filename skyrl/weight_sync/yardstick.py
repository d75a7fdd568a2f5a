"""Finds an engine that accepts new weights and keeps computing with old ones, by its log-probabilities alone.

An engine that runs none of this library's code only promises that it has loaded what it was sent. Each version, it
continues the same prompts from the same seeds, and the learner scores what it drew. How far both have moved since an
earlier version, the yardstick, tells whether the engine follows the learner:

    e, l          log-probability of one token, by the engine and by the learner, in nats
    de, dl        how far each has moved since the yardstick was taken
    |de - dl|     small if the engine follows, |dl| if it stays
    |de|          |dl| if the engine follows, small if it stays

Updates of a small learning rate move both by less than they round. The difference of the two columns then has no
meaning: rounding alone makes the first larger by up to sqrt(2) times the distance that engine and learner had at the
yardstick. So a verdict needs more than that, and more than chance. Without one the yardstick stays, and the updates
since then add up: those that were lost are found together, at the first version at which they differ from rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from attrs import field, frozen
from torch import Tensor

from skyrl.inference.engine import Completion

Tokens = tuple[int, ...]

Scores = Mapping[tuple[Tokens, Tokens], Tensor]
"""A learner's log-probabilities of answers, (N,) float64 each, by prompt and answer."""

CERTAINTY = 5.0
"""Number of standard errors beyond which a mean is not chance. The rows of a comparison are its independent draws, a
few dozen: Student's t with 31 degrees of freedom exceeds 5 with probability 1e-5."""

ROUNDING = math.sqrt(2)
"""Largest bias that rounding causes, in distances of engine and learner: that of the difference of two versions."""


class Verdict(Enum):
    """Outcome of a comparison with a yardstick."""

    FOLLOWS = "the engine has moved with the learner"
    STAYS = "the learner has moved, and the engine has not"
    UNKNOWN = "too little has changed to tell"


@frozen(kw_only=True)
class Answer:
    """An engine's continuation of one prompt, with the learner's scores."""

    prompt: Tokens
    completion: Completion

    learner: Tensor = field(eq=False)
    """(N,) float64: the learner's log-probabilities of the completion's tokens, in nats."""

    @property
    def engine(self) -> Tensor:
        """(N,) float64: the engine's."""
        return torch.tensor(self.completion.logprobs, dtype=torch.float64)

    @property
    def tokens(self) -> Tokens:
        """The continuation."""
        return self.completion.token_ids

    @property
    def distance(self) -> Tensor:
        """(N,): absolute difference at each token, in nats."""
        return (self.engine - self.learner).abs()


@frozen(kw_only=True)
class Yardstick:
    """An engine's answers at the last version at which it was known to compute with the learner's weights."""

    version: int
    answers: tuple[Answer, ...]

    def verdict(self, now: Sequence[Answer], rescored: Scores) -> Verdict:
        """Compare with the answers to the same prompts at a later version. `rescored` are the learner's present
        log-probabilities of this yardstick's own answers.
        """
        before = {answer.prompt: answer for answer in self.answers}
        noise = mean([answer.distance for answer in self.answers])
        moved = mean([(rescored[each.prompt, each.tokens] - each.learner).abs() for each in self.answers])
        evidence = [_evidence(before[answer.prompt], answer, moved, noise) for answer in now]
        found, error = _mean_of_rows(evidence)
        if found - CERTAINTY * error > ROUNDING * noise:
            return Verdict.STAYS
        return Verdict.FOLLOWS if found + CERTAINTY * error < 0 else Verdict.UNKNOWN


def mean(rows: Sequence[Tensor]) -> float:
    """Mean over all tokens of rows (N_i,); 0 if there are none."""
    whole = torch.cat(list(rows)) if rows else torch.zeros(0)
    return whole.mean().item() if whole.numel() else 0.0


def _evidence(before: Answer, now: Answer, moved: float, noise: float) -> Tensor:
    """(N,) nats for each token of `now`: above 0 if it looks as if the engine has stayed, below 0 if it has followed.

    Tokens are paired as far as the answers are equal. Behind that, the distance of engine and learner is compared with
    the middle between `noise`, which an engine that follows shows, and `moved`, which one that stays does.
    """
    pairs = 0
    for old, new in zip(before.tokens, now.tokens, strict=False):
        if old != new:
            break
        pairs += 1
    engine, learner = now.engine[:pairs] - before.engine[:pairs], now.learner[:pairs] - before.learner[:pairs]
    return torch.cat([(engine - learner).abs() - engine.abs(), 2 * now.distance[pairs:] - moved - noise])


def _mean_of_rows(rows: Sequence[Tensor]) -> tuple[float, float]:
    """Mean over all tokens, and its standard error, where the tokens of one row may depend on each other."""
    sizes = torch.tensor([float(row.numel()) for row in rows], dtype=torch.float64)
    sums = torch.stack([row.sum() for row in rows])
    count = sizes.sum().item()
    if len(rows) < 2 or not count:
        return 0.0, math.inf
    found = sums.sum().item() / count
    spread = (sums - found * sizes).square().sum().item() * len(rows) / (len(rows) - 1)
    return found, math.sqrt(spread) / count
